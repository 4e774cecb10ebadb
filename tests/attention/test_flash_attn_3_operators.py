"""FlashAttention-3's operators in training: fwd and bwd as clients call them, gradients, fakes, tracing."""

from __future__ import annotations

import pytest
import torch
from flash_attn_3_harness import CASES, OPS, as_flash_attn, cache_problem, fa3, with_leaves
from harness import check_forward, check_gradients, make_problem

import flash_attn

TRAINING = {name: CASES[name] for name in ("causal", "masked rows", "head dim of v", "varlen", "varlen, keys in use")}


def lengths_of(problem):
    """cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k of a problem."""
    return problem.cu_seqlens_q, problem.cu_seqlens_k, None, problem.seqused_k


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("strided", (False, True))
def test_backward_operators(device, name, strided):
    """fwd, then bwd and _flash_attn_backward into given gradients, as clients with their autograd.Function do it."""
    problem = make_problem(TRAINING[name], device)
    c, lengths, (q, k, v) = problem.case, lengths_of(problem), (problem.q, problem.k, problem.v)
    out, lse, *scratch = OPS.fwd(q, k, v, None, None, None, None, *lengths[:2], None, *lengths[2:], is_causal=c.causal)
    check_forward(problem, out, as_flash_attn(lse))
    assert [x.shape for x in scratch] == [(0,), (0,)]
    dout, grads = torch.randn_like(out), []
    for x in (q, k, v):
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"), device=device, dtype=x.dtype)
        grads.append(wide[..., ::2] if strided else wide[..., : x.shape[-1]])
    results = OPS.bwd(dout, q, k, v, out, lse, *grads, *lengths, None, None, None, c.causal)
    assert len(results) == 5 and results[0].dtype == torch.float32
    check_gradients(problem, dout, grads)
    same = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    softmax_d = fa3._flash_attn_backward(
        dout, q, k, v, out, lse, *lengths, problem.max_seqlen_q, problem.max_seqlen_k, *same, is_causal=c.causal,
        deterministic=True,
    )  # fmt: skip
    assert softmax_d.shape == results[0].shape
    check_gradients(problem, dout, same)


@pytest.mark.parametrize("name", TRAINING)
def test_the_forward_operator_is_differentiable(device, name):
    problem = make_problem(TRAINING[name], device)
    leaves = with_leaves(problem)
    cu_q, cu_k, used_q, used_k = lengths_of(problem)
    out, lse, *_ = fa3._flash_attn_forward(
        *leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_q=used_q, seqused_k=used_k,
        max_seqlen_q=problem.max_seqlen_q, max_seqlen_k=problem.max_seqlen_k, causal=problem.case.causal,
    )  # fmt: skip
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    problem.q, problem.k, problem.v = (x.detach() for x in leaves)
    check_forward(problem, out.detach(), as_flash_attn(lse.detach()))
    check_gradients(problem, dout, grads, dlse=dlse)


@pytest.mark.parametrize("packed", ("queries", "keys", "neither"))
def test_one_side_packed(device, packed):
    """A batch of queries over packed keys and the reverse, and batches of which the first rows are in use."""
    q = torch.randn(3, 10, 4, 32, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(3, 12, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2))
    used_q, used_k = [10, 4, 0], [12, 7, 5]
    as_int = {"dtype": torch.int32, "device": device}
    options = {"causal": True, "seqused_q": torch.tensor(used_q, **as_int), "seqused_k": torch.tensor(used_k, **as_int)}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    inputs = list(leaves)
    if packed == "queries":
        inputs[0], options["cu_seqlens_q"] = q.flatten(0, 1), torch.arange(0, 40, 10, **as_int)
    if packed == "keys":
        inputs[1:], options["cu_seqlens_k"] = [k.flatten(0, 1), v.flatten(0, 1)], torch.arange(0, 48, 12, **as_int)
    out, lse, *_ = fa3._flash_attn_forward(*inputs, **options)
    assert lse.shape == ((4, 30) if packed == "queries" else (3, 4, 10))
    rows = [
        torch.nn.functional.pad(flash_attn.flash_attn_func(
            q[i : i + 1, :n], k[i : i + 1, :m], v[i : i + 1, :m], causal=True
        ), (0, 0, 0, 0, 0, 10 - n)) if n else q[i : i + 1] * 0
        for i, (n, m) in enumerate(zip(used_q, used_k))
    ]  # fmt: skip
    expected = torch.cat(rows)
    assert torch.allclose(out.view_as(expected).float(), expected.float(), atol=2e-2)
    dout = torch.randn_like(expected)
    grads = torch.autograd.grad(out, leaves, dout.view_as(out))
    for ours, theirs in zip(grads, torch.autograd.grad(expected, leaves, dout)):
        assert torch.allclose(ours.float(), theirs.float(), atol=5e-2)


def test_caches_have_no_backward(device):
    q, k, v, table, cu, lengths = cache_problem(device)
    out, *_ = fa3._flash_attn_forward(
        q.requires_grad_(), k, v, cu_seqlens_q=cu, seqused_k=lengths, page_table=table, causal=True
    )
    with pytest.raises(NotImplementedError, match="^page_table: expected None in training"):
        out.sum().backward()


def test_forward_mode_is_rejected(device):
    q = torch.randn(1, 4, 2, 32, device=device, dtype=torch.bfloat16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            OPS.fwd(dual, q, q)


def test_operators_are_sound(device):
    """torch's own check of schemas, fakes, autograd registration and tracing."""
    q, k, v = (torch.randn(2, 7, 2, 16, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(fa3._flash_attn_forward, (q, k, v), {"causal": True})
    cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    packed = tuple(x.detach()[0].requires_grad_() for x in (q, k, v))
    torch.library.opcheck(fa3._flash_attn_forward, packed, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4})
    out, lse, *_ = OPS.fwd(q.detach(), k.detach(), v.detach())
    arguments = tuple(x.detach() for x in (out, q, k, v, out, lse))
    grads = {name: torch.empty_like(q, requires_grad=False) for name in ("dq", "dk", "dv")}
    torch.library.opcheck(fa3._flash_attn_backward, arguments, grads)


def test_compiled(device):
    """The functions trace whole, rows in use included."""
    q, k, v = (torch.randn(20, 4, 32, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 8, 20], dtype=torch.int32, device=device)
    used = torch.tensor([5, 12], dtype=torch.int32, device=device)

    def step(q, k, v):
        dense = fa3.flash_attn_func(q[None], k[None], v[None], causal=True, return_attn_probs=True)
        packed = fa3.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, used, used, causal=True)
        direct = fa3._flash_attn_forward(q[None], k[None], v[None])[0]
        return dense[0][0] + packed + direct[0], dense[1]

    results = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        out, lse = function(q, k, v)
        results.append((out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), (q, k, v))))
    for eager, compiled in zip(*results):
        assert torch.allclose(eager.float(), compiled.float(), atol=5e-2)


def test_out_compiled(device):
    q = torch.randn(1, 20, 4, 32, device=device, dtype=torch.bfloat16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q, out):
        return fa3.flash_attn_func(q, q, q, causal=True, out=out)

    out = torch.empty_like(q)
    compiled(q, out)
    assert torch.equal(out, fa3.flash_attn_func(q, q, q, causal=True))
