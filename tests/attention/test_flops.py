"""FLOPs as torch.utils.flop_counter counts them, against its own counts of SDPA."""

from __future__ import annotations

import fresh_process
import pytest
import torch
from flash_attn_3_harness import OPS, fa3
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import flash_attn
from flash_attn.context_parallel import CpPlan, LocalGroup, flash_attn_cp_func
from flash_attn.context_parallel.plan.steps import METHODS
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_varlen_forward

HEADS, HEADS_K, HEAD_DIM = 4, 2, 16


def tensor(device, *shape, grad=False):
    return torch.randn(*shape, device=device, dtype=torch.float16, requires_grad=grad)


def counted(call, backward=False):
    with FlopCounterMode(display=False) as counter:
        out = call()
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


def flops_of_torch(sq, sk, batch=1, backward=False):
    """Torch's count of SDPA, on meta tensors: of the flash operator, in which the forward is 2 and the backward 5."""
    q = torch.empty(batch, HEADS, sq, HEAD_DIM, device="meta", dtype=torch.float16)
    k = torch.empty(batch, HEADS, sk, HEAD_DIM, device="meta", dtype=torch.float16)
    forward = counted(lambda: scaled_dot_product_attention(q, k, k))
    if not backward:
        return forward
    out, lse = torch.empty_like(q), torch.empty(batch, HEADS, sq, device="meta")
    seed = torch.empty((), dtype=torch.int64, device="meta")
    operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return forward + counted(lambda: operator(out, q, k, k, out, lse, None, None, sq, sk, 0.0, False, seed, seed))


@pytest.mark.parametrize("causal", (False, True))
def test_dense(device, causal):
    """Masks are not accounted for, as in torch's counts."""
    q, k, v = (tensor(device, 2, s, h, HEAD_DIM, grad=True) for s, h in ((9, HEADS), (11, HEADS_K), (11, HEADS_K)))
    call = lambda: flash_attn.flash_attn_func(q, k, v, causal=causal)  # noqa: E731
    assert counted(call) == flops_of_torch(9, 11, 2) > 0
    assert counted(call, backward=True) == flops_of_torch(9, 11, 2, backward=True)
    out = call()  # before the mode: the backward alone is seen
    assert counted(lambda: torch.autograd.grad(out.sum(), q)) == (
        flops_of_torch(9, 11, 2, backward=True) - flops_of_torch(9, 11, 2)
    )


def test_packed_tensors_and_another_head_dim_of_v(device):
    qkv, kv = tensor(device, 2, 9, 3, HEADS, HEAD_DIM), tensor(device, 2, 9, 2, HEADS, HEAD_DIM)
    for call in (
        lambda: flash_attn.flash_attn_qkvpacked_func(qkv),
        lambda: flash_attn.flash_attn_kvpacked_func(qkv[:, :, 0], kv),
    ):
        assert counted(call) == flops_of_torch(9, 9, 2)
    v = tensor(device, 2, 9, HEADS, 3 * HEAD_DIM)
    assert counted(lambda: flash_attn.flash_attn_func(*qkv.unbind(2)[:2], v)) == 2 * flops_of_torch(9, 9, 2)


def test_packed_sequences(device):
    """By the lengths, not by the tensors; with seqused_k by these and the left padding."""
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 5, 14], [0, 6, 8, 17]))
    q = tensor(device, 20, HEADS, HEAD_DIM, grad=True)
    k, v = (tensor(device, 20, HEADS_K, HEAD_DIM, grad=True) for _ in "kv")
    lengths = ((5, 6), (9, 9))
    call = lambda: flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 9)  # noqa: E731
    assert counted(call) == sum(flops_of_torch(*pair) for pair in lengths)
    assert counted(call, backward=True) == sum(flops_of_torch(*pair, backward=True) for pair in lengths)
    used, padding = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([4, 2, 7], [1, 0, 2]))
    with torch.no_grad():
        operator = (q, k, v, cu_q, cu_k, 9, 9, 0.0, 0.25, False)
        for more in ({}, {"seqused_k": used, "leftpad_k": padding}):
            expected = ((5, 3), (9, 5)) if more else lengths
            assert counted(lambda more=more: _flash_attn_varlen_forward(*operator, **more)[0]) == sum(
                flops_of_torch(*pair) for pair in expected
            )


def test_public_backward(device):
    q = tensor(device, 2, 9, HEADS, HEAD_DIM)
    lse = torch.zeros(2, HEADS, 9, device=device)
    options = (0.0, 0.25, False, -1, -1, 0.0, None, False)
    count = counted(lambda: _flash_attn_backward(q, q, q, q, q, lse, None, None, None, *options))
    assert count == flops_of_torch(9, 9, 2, backward=True) - flops_of_torch(9, 9, 2)


@pytest.mark.parametrize("new", (0, 3))
def test_kvcache(device, new):
    q = tensor(device, 3, 4, HEADS, HEAD_DIM)
    cache = tensor(device, 3, 40, HEADS_K, HEAD_DIM)
    k = tensor(device, 3, new, HEADS_K, HEAD_DIM) if new else None
    lengths = torch.tensor([7, -1, 30], dtype=torch.int32, device=device)
    padding = torch.tensor([2, 0, 0], dtype=torch.int32, device=device)
    count = counted(
        lambda: flash_attn.flash_attn_with_kvcache(
            q, cache, cache.clone(), k, k, cache_seqlens=lengths, cache_leftpad=padding
        )
    )
    assert count == flops_of_torch(4, 7 + new - 2) + flops_of_torch(4, 30 + new)
    pages = tensor(device, 9, 16, HEADS_K, HEAD_DIM)
    table = torch.arange(9, dtype=torch.int32, device=device).view(3, 3)
    count = counted(lambda: flash_attn.flash_attn_with_kvcache(q, pages, pages, block_table=table))
    assert count == flops_of_torch(4, 48, 3)


def test_operators_of_flash_attention_3(device):
    """As flash_attn's, at each form of queries and keys."""
    q, k, v = (tensor(device, 2, s, h, HEAD_DIM, grad=True) for s, h in ((9, HEADS), (11, HEADS_K), (11, HEADS_K)))
    dense, backward = flops_of_torch(9, 11, 2), flops_of_torch(9, 11, 2, backward=True)
    assert counted(lambda: fa3.flash_attn_func(q, k, v), backward=True) == backward
    assert counted(lambda: OPS._flash_attn_forward(q, k, v)[0], backward=True) == backward
    with torch.no_grad():
        out, lse, *_ = OPS.fwd(q, k, v)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        assert counted(lambda: OPS.bwd(out, q, k, v, out, lse, *grads)) == backward - dense
        into = dict(zip(("dq", "dk", "dv"), grads))
        assert counted(lambda: OPS._flash_attn_backward(out, q, k, v, out, lse, **into)) == backward - dense
        used = torch.tensor([4, 8], dtype=torch.int32, device=device)
        assert counted(lambda: OPS.fwd(q, k, v)) == dense
        assert counted(lambda: OPS.fwd(q, k, v, seqused_k=used)) == flops_of_torch(9, 12)
        new = tensor(device, 2, 3, HEADS_K, HEAD_DIM)
        assert counted(lambda: OPS.fwd(q, k.clone(), v.clone(), new, new, seqused_k=used)) == flops_of_torch(9, 18)
        table = torch.tensor([[1, 0, 1]] * 2, dtype=torch.int32, device=device)
        assert counted(lambda: OPS.fwd(q, k, v, page_table=table)) == flops_of_torch(9, 33, 2)
        bounds = torch.tensor([0, 5, 18], dtype=torch.int32, device=device)
        rows = q.flatten(0, 1), k.flatten(0, 1)[:18], v.flatten(0, 1)[:18]
        packed = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": 13, "max_seqlen_k": 13}
        squares = flops_of_torch(5, 5) + flops_of_torch(13, 13)
        assert counted(lambda: OPS.fwd(*rows, **packed)) == squares
        assert counted(lambda: OPS.fwd(*rows, **packed, seqused_q=used // 2)) == (
            flops_of_torch(2, 5) + flops_of_torch(4, 13)
        )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bounds", ((0, 23), (0, 5, 23)))
def test_context_parallel(device, method, bounds):
    """The ranks' sum is what one GPU counts, and counting changes no result."""

    def rank_counts(group):
        plan = CpPlan.varlen(bounds, group=group, method=method)
        q, k, v = (plan.shard(x, 0).requires_grad_() for x in whole)

        def call():
            results.append(flash_attn_cp_func(q, k, v, plan=plan, causal=True))
            return results[-1]

        results = []
        count = counted(call), counted(call, backward=True)
        assert torch.equal(call(), results[0])
        return count

    whole = [tensor(device, bounds[-1], h, HEAD_DIM) for h in (HEADS, HEADS_K, HEADS_K)]
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    forward, both = (sum(counts) for counts in zip(*LocalGroup(2).run(rank_counts)))
    assert forward == sum(flops_of_torch(n, n) for n in lengths)
    assert both == sum(flops_of_torch(n, n, backward=True) for n in lengths)


def test_without_values_every_sequence_has_the_most_that_it_can(device):
    with FakeTensorMode():
        q, k = (torch.empty(20, h, HEAD_DIM, device=device, dtype=torch.float16) for h in (HEADS, HEADS_K))
        cu_seqlens = torch.empty(4, dtype=torch.int32, device=device)
        count = counted(lambda: flash_attn.flash_attn_varlen_func(q, k, k, cu_seqlens, cu_seqlens, 9, 11))
        assert count == flops_of_torch(9, 11, 3)
        q = q.view(4, 5, HEADS, HEAD_DIM)
        cache = torch.empty(4, 32, HEADS_K, HEAD_DIM, device=device, dtype=torch.float16)
        lengths = torch.empty(4, dtype=torch.int32, device=device)
        count = counted(lambda: flash_attn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths))
        assert count == flops_of_torch(5, 32, 4)


@pytest.mark.parametrize("modules", ["torch.utils.flop_counter, flash_attn", "flash_attn, torch.utils.flop_counter"])
def test_formulas_are_there_in_either_order_of_imports(modules):
    program = f"import {modules}; print(torch.ops.flash_attn_core.fwd in torch.utils.flop_counter.flop_registry)"
    result = fresh_process.run(program, check=True)
    assert result.stdout.strip() == "True"
