"""The backward as distributed-attention clients and the extension's direct callers use it."""

from __future__ import annotations

import pytest
import torch
from cases import Case
from harness import backend_forward, backend_varlen_forward, check_gradients, gradients, make_problem
from reference import assert_gradient_accurate

from flash_attn import backends, dropout_mask
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

pytestmark = pytest.mark.by_both_paths

DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
SCALE = 0.125


def poisoned(shape, like):
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def positional_backward(problem, dout, out, lse, grads, state, p=0.0):
    """`bwd` (19 arguments) or `varlen_bwd` (24), positionally, as the extension's clients call them."""
    c, backend = problem.case, backends.get(problem.q.device.type)
    tensors = (dout, problem.q, problem.k, problem.v, out, lse, *grads)
    if problem.layout is None:
        return backend.bwd(*tensors, None, p, SCALE, c.causal, *c.window, c.softcap, True, None, state)
    lengths = (problem.cu_seqlens_q, problem.cu_seqlens_k, None, problem.max_seqlen_q, problem.max_seqlen_k)
    return backend.varlen_bwd(*tensors, *lengths, p, SCALE, False, c.causal, *c.window, c.softcap, True, None, state)


def forward(problem, p=0.0):
    c = problem.case
    if problem.layout is None:
        return backend_forward(problem.q, problem.k, problem.v, None, None, p, SCALE, c.causal, c.window, c.softcap,
                               p > 0)  # fmt: skip
    return backend_varlen_forward(problem, scale=SCALE, p=p, return_softmax=p > 0)


@pytest.mark.parametrize("kind", ("dense", "packed"))
@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_positional_backward_of_the_extension(device, kind, dropout):
    """The given tensors come back, written: slices of one buffer; the LSE a transposed view."""
    case = Case(3, 50, 50, 4, 4, 64, DTYPE[device], True, softcap=9.0, kind=kind, dropout=dropout)
    problem = make_problem(case, device)
    out, lse, dmask, state = forward(problem, dropout)
    dout = torch.randn_like(out)
    buffer = poisoned((*problem.k.shape[:-2], 3, 4, 64), out)
    dq_rows = len(problem.q) if kind == "packed" else None
    grads = (buffer.select(-3, 0)[:dq_rows], buffer.select(-3, 1), buffer.select(-3, 2))
    turned = lse.transpose(-1, -2).contiguous().transpose(-1, -2)
    results = positional_backward(problem, dout, out, turned, grads, state, dropout)
    assert [x.data_ptr() for x in results[:3]] == [x.data_ptr() for x in grads]
    check_gradients(problem, dout, grads, dmask >= 0 if dropout else None)
    plain = positional_backward(problem, dout, out, lse, (None, None, None), state, dropout)
    assert all(torch.equal(a, b) for a, b in zip(results, plain))
    batch, rows = (3, 50) if kind == "dense" else (1, len(problem.q))
    delta = results[3] if kind == "dense" else results[3][None]
    assert delta.dtype == torch.float32 and delta.shape[:2] == (batch, 4) and delta.shape[2] >= rows


def merged(parts):
    """out and LSE over the keys of all parts [(out, lse (b, h, s))], in float32."""
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), dim=0)
    out = sum(out.float() * (part - lse).exp().transpose(1, 2)[..., None] for out, part in parts)
    return out.to(parts[0][0].dtype), lse


def ring_steps(seqlen, causal):
    """(rows of q, rows of k, causal) of each step over two ranks' keys; what a causal mask hides is left out."""
    half = seqlen // 2
    first, second, everything = slice(0, half), slice(half, seqlen), slice(0, seqlen)
    if causal:
        return [(first, first, True), (second, first, False), (second, second, True)]
    return [(everything, first, False), (everything, second, False)]


@pytest.mark.parametrize("causal", (False, True))
def test_ring_attention(device, causal):
    """Keys in two halves: out and LSE merged, then a backward per half with the merged ones, into slices."""
    problem = make_problem(Case(2, 128, 128, 4, 2, 64, DTYPE[device], causal), device)
    q, k, v = problem.q, problem.k, problem.v
    steps = ring_steps(128, causal)
    tails = {mask: (0.0, SCALE, mask, -1, -1, 0.0, None) for mask in (False, True)}
    parts = [
        _flash_attn_forward(q[:, rows], k[:, keys], v[:, keys], *tails[mask], False)[:2] for rows, keys, mask in steps
    ]
    if causal:
        late = merged(parts[1:])
        out, lse = torch.cat([parts[0][0], late[0]], dim=1), torch.cat([parts[0][1], late[1]], dim=2)
    else:
        out, lse = merged(parts)
    dout = torch.randn_like(out)
    sums = [torch.zeros(x.shape, device=device) for x in (q, k, v)]
    for rows, keys, mask in steps:
        dq = poisoned(q[:, rows].shape, q)
        dkv = poisoned((2, k[:, keys].shape[1], 2, 2, 64), k)
        lse_rows = lse[:, :, rows].transpose(1, 2).contiguous().transpose(1, 2)
        grads = (dq, dkv[:, :, 0], dkv[:, :, 1])
        tensors = (dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse_rows)
        _flash_attn_backward(*tensors, *grads, *tails[mask], True, None)
        for total, index, grad in zip(sums, (rows, keys, keys), grads):
            total[:, index] += grad.float()
    check_gradients(problem, dout, [x.to(q.dtype) for x in sums])


def test_ring_attention_of_packed_sequences(device):
    """The same over halves of every sequence, with the (h, total) LSE as a transposed view of a (total, h) one."""
    halves, heads = [24, 40, 8], 4
    problem = make_problem(
        Case(3, 0, 0, heads, 2, 64, DTYPE[device], kind="packed"), device, [(2 * n, 2 * n) for n in halves]
    )
    q, k, v = (x[: problem.cu_seqlens_q[-1]] for x in (problem.q, problem.k, problem.v))
    starts = problem.cu_seqlens_k.tolist()
    cu_half = torch.tensor([0, *halves], device=device).cumsum(0).int()
    tail = (0.0, SCALE, False, -1, -1, 0.0, None)
    lengths = (problem.cu_seqlens_q, cu_half, 80, 40)
    index = [
        torch.cat([torch.arange(s + part * n, s + (part + 1) * n, device=device) for s, n in zip(starts, halves)])
        for part in (0, 1)
    ]
    parts = [_flash_attn_varlen_forward(q, k[i], v[i], *lengths, *tail[:3])[:2] for i in index]
    out, lse = merged([(out[None], lse[None]) for out, lse in parts])
    out, lse = out[0], lse[0].t().contiguous().t()
    dout = torch.randn_like(out)
    dq_sum, dk, dv = torch.zeros(q.shape, device=device), torch.zeros_like(k), torch.zeros_like(v)
    for i in index:
        dq, dkv = poisoned(q.shape, q), poisoned((len(i), 2, 2, 64), k)
        grads = (dq, dkv[:, 0], dkv[:, 1])
        _flash_attn_varlen_backward(dout, q, k[i], v[i], out, lse, *grads, *lengths, *tail, True, None)
        dq_sum += dq.float()
        dk[i], dv[i] = dkv.unbind(1)
    exact = gradients(problem, dout, torch.float64)
    plain = gradients(problem, dout, q.dtype)
    for name, ours, reference, same in zip(("dq", "dk", "dv"), (dq_sum.to(q.dtype), dk, dv), exact, plain):
        rows = len(ours)
        assert_gradient_accurate(ours, reference[:rows], same[:rows], name)


def test_keys_of_another_rank_leave_masked_rows_alone(device):
    """Where the merged LSE is far above that of the part, and in rows that see no key of it, the gradient is 0."""
    q, k, v = (torch.randn(1, 40, 2, 64, device=device, dtype=getattr(torch, DTYPE[device])) for _ in "qkv")
    tail = (0.0, SCALE, True, -1, -1, 0.0, None)
    out, lse, *_ = _flash_attn_forward(q, k[:, :10], v[:, :10], *tail, False)
    assert torch.isposinf(lse[:, :, :30]).all()
    merged_lse = torch.full_like(lse, 200.0)
    grads = [poisoned(x.shape, x) for x in (q, k[:, :10], v[:, :10])]
    _flash_attn_backward(torch.randn_like(out), q, k[:, :10], v[:, :10], out, merged_lse, *grads, *tail, True, None)
    assert all((x == 0).all() for x in grads)


@pytest.mark.parametrize("dropout", (0.1, 0.5))
def test_backward_of_a_state_repeats_the_mask(device, dropout):
    """rng_state alone tells the mask: the backward in another call, after other random numbers were drawn."""
    problem = make_problem(Case(2, 70, 90, 4, 2, 64, DTYPE[device], True, dropout=dropout), device)
    out, lse, _, state = _flash_attn_forward(
        problem.q, problem.k, problem.v, dropout, SCALE, True, -1, -1, 0.0, None, False
    )
    torch.manual_seed(123)
    _flash_attn_forward(problem.q, problem.k, problem.v, dropout, SCALE, True, -1, -1, 0.0, None, False)
    dout = torch.randn_like(out)
    grads = [poisoned(x.shape, x) for x in (problem.q, problem.k, problem.v)]
    tail = (dropout, SCALE, True, -1, -1, 0.0, None, False)
    _flash_attn_backward(dout, problem.q, problem.k, problem.v, out, lse, *grads, *tail, state.clone())
    check_gradients(problem, dout, grads, dropout_mask(state, dropout, 2, 4, 70, 90))
