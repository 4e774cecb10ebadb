"""The largest logit of each head, against the scores of the float64 reference."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Case
from harness import check_forward, expected, make_problem, no_synchronisation, run

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

DTYPE = "bfloat16"

CASES = (
    Case(2, 130, 300, 4, 2, 64, DTYPE),
    Case(2, 300, 200, 6, 2, 128, "float16", causal=True),
    Case(1, 200, 900, 2, 1, 256, DTYPE, window=(100, 30)),
    Case(2, 65, 129, 3, 3, 32, "float16", softcap=5.0),
    Case(2, 100, 400, 4, 4, 80, DTYPE, alibi="batch", causal=True),
    Case(2, 70, 150, 2, 2, 192, DTYPE, softcap=15.0, alibi="heads", sinks=True),
    Case(1, 150, 200, 4, 1, 96, "float16", dropout=0.3, sinks=True),
    Case(2, 33, 500, 2, 2, 64, DTYPE, dropout=0.5, causal=True),
    Case(4, 129, 200, 4, 2, 64, DTYPE, kind="padded", causal=True),
    Case(4, 100, 300, 4, 2, 128, DTYPE, kind="packed", page_size=16, sinks=True),
    Case(4, 100, 300, 2, 2, 64, "float16", kind="leftpad", page_size=7),
    Case(4, 60, 200, 2, 2, 128, "float16", kind="seqused", causal=True),
)


def check(problem, max_logit, **overrides):
    reference = expected(problem, **overrides).max_logit
    assert max_logit.shape == (problem.case.nheads,) and not max_logit.requires_grad
    assert max_logit.dtype == (torch.float64 if problem.q.dtype == torch.float64 else torch.float32)
    assert torch.equal(max_logit.isinf(), reference.isinf())
    error = (max_logit.double() - reference).abs().nan_to_num()
    assert (error <= 1e-5 + 2e-6 * reference.abs().nan_to_num(posinf=0.0, neginf=0.0)).all(), (max_logit, reference)


@pytest.mark.parametrize("logit_case", CASES, ids=lambda case: case.id)
def test_features(device, logit_case):
    problem = make_problem(logit_case, device)
    out, lse, dmask, max_logit = run(problem, return_max_logit=True)
    check(problem, max_logit)
    check_forward(problem, out, lse, dmask >= 0 if logit_case.dropout else None)


@pytest.mark.devices("cpu")
@pytest.mark.parametrize("dtype", ("float32", "float64"))
def test_wide_dtypes(device, dtype):
    problem = make_problem(Case(2, 40, 60, 4, 2, 16, dtype, causal=True), device)
    check(problem, run(problem, return_max_logit=True)[3])


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("downwards", (False, True))
def test_a_maximum_that_creeps_up(device, head_dim, downwards):
    """By less than the online softmax needs to move its reference, in whichever order it takes the keys."""
    problem = make_problem(Case(1, 150, 1500, 2, 2, head_dim, DTYPE), device)
    ramp = torch.linspace(0.0, 5.0, 1500, device=device)
    ramp = ramp.flip(0) if downwards else ramp
    problem.q.zero_()
    problem.q[..., 0] = 1.0
    problem.k[..., 0] = ramp[:, None].to(problem.k.dtype)
    out, lse, _, max_logit = run(problem, softmax_scale=1.0, return_max_logit=True)
    assert (max_logit - 5.0).abs().max() < 1e-5
    check_forward(problem, out, lse, scale=1.0)


@pytest.mark.parametrize("seqlen_q", (1, 63, 65, 129, 200))
def test_negative_logits(device, seqlen_q):
    """Padding rows of a tile have scores of 0, which must not count; negative floats are ordered unlike integers."""
    for features in ({}, {"causal": True}, {"dropout": 0.1}):
        problem = make_problem(Case(2, seqlen_q, 300, 3, 1, 64, "float16", **features), device)
        problem.q.abs_().add_(0.1)
        problem.k.abs_().add_(0.1).neg_()
        max_logit = run(problem, return_max_logit=True)[3]
        assert (max_logit < 0).all()
        check(problem, max_logit)


@pytest.mark.parametrize("scale", (0.0, -0.3, 30.0))
def test_softmax_scales(device, scale):
    problem = make_problem(Case(2, 100, 150, 2, 1, 64, DTYPE, causal=True), device)
    check(problem, run(problem, softmax_scale=scale, return_max_logit=True)[3], scale=scale)


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(0, 5), (5, 0), (0, 0), (300, 1)])
def test_nothing_visible(device, seqlen_q, seqlen_k):
    """-inf, unless a row sees a key: of 300 rows the last one does."""
    problem = make_problem(Case(2, seqlen_q, seqlen_k, 2, 2, 64, DTYPE, causal=True), device)
    max_logit = run(problem, return_max_logit=True)[3]
    assert torch.isfinite(max_logit).all() if seqlen_q and seqlen_k else torch.isneginf(max_logit).all()
    check(problem, max_logit)


def test_sinks_are_no_logits(device):
    problem = make_problem(Case(2, 90, 130, 4, 2, 64, DTYPE, causal=True), device)
    plain = run(problem, return_max_logit=True)[3]
    for sink in (-math.inf, -50.0, 50.0):
        sinks = torch.full((4,), sink, device=device)
        assert torch.equal(run(problem, sinks=sinks, return_max_logit=True)[3], plain)


def test_heads_are_apart(device):
    """One outlier in one head of one sequence."""
    problem = make_problem(Case(3, 200, 200, 8, 8, 64, "float16"), device)
    plain = run(problem, return_max_logit=True)[3]
    problem.q[2, 150, 5] = 8.0
    problem.k[2, 177, 5] = 8.0
    max_logit = run(problem, return_max_logit=True)[3]
    others = [head for head in range(8) if head != 5]
    assert abs(max_logit[5].item() - 512.0) < 1e-3 and torch.equal(max_logit[others], plain[others])


def test_places_of_the_result(device):
    qkv = torch.randn(12, 3, 2, 32, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    q, k, v = qkv.unbind(1)
    calls = (
        lambda **kw: flash_attn_func(q[None], k[None], v[None], **kw),
        lambda **kw: flash_attn_qkvpacked_func(qkv[None], **kw),
        lambda **kw: flash_attn_kvpacked_func(q[None], qkv[None, :, 1:], **kw),
        lambda **kw: flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, **kw),
        lambda **kw: flash_attn_varlen_qkvpacked_func(qkv, cu, 7, **kw),
        lambda **kw: flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu, cu, 7, 7, **kw),
    )
    for call in calls:
        out, max_logit = call(return_max_logit=True)
        assert out.shape[-3:] == q.shape and max_logit.shape == (2,)
        results = call(return_max_logit=True, return_attn_probs=True)
        assert len(results) == 4 and torch.equal(results[3], max_logit) and results[2].shape == (0,)
        assert isinstance(call(), torch.Tensor) and len(call(return_attn_probs=True)) == 3


def test_training_with_it(device):
    """Gradients are those without it; the largest logit itself has none."""
    q, k, v = (torch.randn(2, 70, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    out, max_logit = flash_attn_func(q, k, v, causal=True, deterministic=True, return_max_logit=True)
    assert out.requires_grad and not max_logit.requires_grad
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    plain = torch.autograd.grad(flash_attn_func(q, k, v, causal=True, deterministic=True), (q, k, v), dout)
    for ours, other in zip(grads, plain):
        torch.testing.assert_close(ours, other, atol=2e-2, rtol=2e-2)


def test_it_repeats_bitwise(device):
    problem = make_problem(Case(4, 700, 900, 4, 2, 64, DTYPE, causal=True), device)
    results = [run(problem, return_max_logit=True) for _ in range(3)]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.devices("cuda")
def test_no_host_synchronisation_and_graphs(device):
    problem = make_problem(Case(4, 150, 300, 4, 2, 64, DTYPE, True, kind="packed", sinks=True), device)
    run(problem, return_max_logit=True)
    torch.cuda.synchronize()
    with no_synchronisation():
        run(problem, return_max_logit=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(problem, return_max_logit=True)
    for factor in (1.0, 3.0, 0.2):
        problem.q.normal_().mul_(factor)
        graph.replay()
        check(problem, results[3])
