"""Attention sinks where they are special: extreme logits, rows without keys, counting once, gradients, determinism.

What they do together with every other feature is in the pairwise cases of test_forward.py and test_backward.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from cases import GQA_RATIOS, Case
from harness import check_forward, check_gradients, make_problem, run
from reference import attention

from flash_attn import backends, flash_attn_func, flash_attn_varlen_func

DTYPE = "bfloat16"


def dense_problem(device, case, sinks):
    problem = make_problem(case, device)
    problem.sinks = torch.as_tensor(sinks, dtype=torch.float32, device=device).expand(case.nheads).contiguous()
    return problem


def training_step(problem, **overrides):
    """out, LSE and the gradients of `problem.inputs` from random dout and dlse, all checked against the reference."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.inputs.items()}
    for name, x in leaves.items():
        setattr(problem, name, x)
    out, lse, dmask = run(problem, **overrides)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (dout, dlse))
    for name, x in leaves.items():
        setattr(problem, name, x.detach())
    keep = dmask >= 0 if problem.case.dropout else None
    check_forward(problem, out, lse, keep)
    check_gradients(problem, dout, grads, keep, dlse)
    return out, lse, grads


@pytest.mark.parametrize("head_dim", (32, 64, 128, 256))
@pytest.mark.parametrize("seqlen_k", (1, 17, 64, 300, 1500))
def test_the_sink_counts_once(device, head_dim, seqlen_k):
    """However many key blocks and threads share a row: keys of logit 0 and a sink of logit log(5)."""
    q = torch.zeros(1, 150, 2, head_dim, device=device, dtype=torch.bfloat16)
    k = torch.zeros(1, seqlen_k, 2, head_dim, device=device, dtype=torch.bfloat16)
    v = torch.ones_like(k)
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, sinks=torch.full((2,), math.log(5), device=device))
    assert (lse.double() - math.log(seqlen_k + 5)).abs().max() < 2e-6
    assert (out.double() - seqlen_k / (seqlen_k + 5)).abs().max() < 2e-3


@pytest.mark.parametrize("sink", (-1e4, -200.0, -30.0, 0.0, 30.0, 200.0, 1e4))
@pytest.mark.parametrize("causal", (False, True))
def test_sinks_far_from_the_scores(device, sink, causal):
    """Below by far: no effect; above by far: out 0 and LSE the sink, without overflow."""
    problem = dense_problem(device, Case(2, 130, 300, 4, 2, 64, DTYPE, causal=causal), sink)
    out, lse, grads = training_step(problem)
    plain, plain_lse, _ = run(problem, sinks=torch.full_like(problem.sinks, -math.inf))
    if sink <= -200.0:
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
        assert (grads[3] == 0).all()
    if sink >= 200.0:
        assert (out == 0).all() and (lse == sink).all()


@pytest.mark.parametrize("scale", (1e-3, 40.0))
def test_large_and_small_scores(device, scale):
    """The reference of the online softmax far above and far below the sink; softmax_scale leaves the sink alone."""
    problem = dense_problem(device, Case(1, 100, 200, 2, 2, 64, "float16"), [2.0, 60.0])
    out, lse, _ = run(problem, softmax_scale=scale)
    check_forward(problem, out, lse, scale=scale)


def test_scale_that_is_not_positive(device):
    for scale in (0.0, -0.2):
        problem = dense_problem(device, Case(1, 70, 90, 2, 1, 64, DTYPE, causal=True), [0.5, 3.0])
        out, lse, _ = run(problem, softmax_scale=scale)
        check_forward(problem, out, lse, scale=scale)


@pytest.mark.parametrize("seqlen_k", (0, 60))
def test_rows_without_keys_have_the_sink_alone(device, seqlen_k):
    """out 0, LSE the sink, and the sink gets its gradient from that of the LSE."""
    problem = dense_problem(device, Case(1, 200, seqlen_k, 3, 3, 64, DTYPE, causal=True), [1.5, -2.0, 7.0])
    out, lse, _ = training_step(problem)
    assert (out[:, : 200 - seqlen_k] == 0).all()
    assert (lse[:, :, : 200 - seqlen_k] == problem.sinks[:, None]).all()
    leaf = problem.sinks.clone().requires_grad_()
    lse = run(problem, sinks=leaf)[1]
    dlse = torch.zeros_like(lse)
    dlse[:, :, : 200 - seqlen_k] = torch.randn(3, 200 - seqlen_k, device=device)
    torch.testing.assert_close(torch.autograd.grad(lse, leaf, dlse)[0], dlse.sum((0, 2)))


def test_infinitely_low_sinks_are_none(device):
    problem = dense_problem(device, Case(2, 90, 70, 2, 1, 64, DTYPE, causal=True), -math.inf)
    plain, plain_lse, _ = run(problem, sinks=None)
    leaf = problem.sinks.requires_grad_()
    out, lse, _ = run(problem)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and torch.isposinf(lse).any()
    finite = lse.masked_fill(lse.isinf(), 0.0)
    (dsinks,) = torch.autograd.grad((out.float().sum() + finite.sum()), leaf)
    assert (dsinks == 0).all()


@pytest.mark.parametrize("seqlens", ((1, 1500), (100, 300), (130, 2048)))
@pytest.mark.parametrize("family", ("", "wgmma:3", "mma_sync"))
def test_infinitely_high_sinks_have_all_the_weight(device, monkeypatch, seqlens, family):
    monkeypatch.setenv("FLASH_ATTN_FAMILY", family)
    problem = dense_problem(device, Case(1, *seqlens, 4, 2, 64, DTYPE), [math.inf, 0.5, math.inf, -1.0])
    out, lse, _ = run(problem)
    assert (out[:, :, ::2] == 0).all() and torch.isposinf(lse[:, ::2]).all()
    assert (out[:, :, 1::2] != 0).any() and torch.isfinite(lse[:, 1::2]).all()


@pytest.mark.parametrize("ratio", GQA_RATIOS)
def test_gqa(device, ratio):
    training_step(make_problem(Case(2, 65, 130, 2 * ratio, 2, 64, DTYPE, causal=True, sinks=True), device))


@pytest.mark.parametrize("kind", ("packed", "padded"))
@pytest.mark.parametrize("features", ({}, {"causal": True}, {"window": (40, 0), "dropout": 0.2}), ids=str)
def test_sequences(device, kind, features):
    """Empty sequences, sequences without keys, and rows of no sequence, which have no sink."""
    problem = make_problem(Case(4, 200, 300, 4, 2, 64, DTYPE, kind=kind, sinks=True, **features), device)
    out, lse, _ = training_step(problem)
    end = int(problem.cu_seqlens_q[-1])
    assert (out[end:] == 0).all() and torch.isposinf(lse[:, end:]).all() and torch.isfinite(lse[:, :end]).all()


@pytest.mark.parametrize("features", ({"page_size": 16}, {"kind": "leftpad"}, {"kind": "seqused"}), ids=str)
def test_key_layouts(device, features):
    case = Case(4, 70, 150, 4, 2, 128, DTYPE, causal=True, sinks=True, **{"kind": "packed", **features})
    problem = make_problem(case, device)
    out, lse, _ = run(problem)
    check_forward(problem, out, lse)


@pytest.mark.parametrize("head_dim", (64, 128))
def test_dropout_keeps_the_sink(device, head_dim):
    """A sink has no value to drop: the LSE is that without dropout; rows of S_dmask sum to less than 1."""
    problem = make_problem(Case(2, 140, 200, 2, 2, head_dim, DTYPE, dropout=0.4, sinks=True), device)
    out, lse, dmask = run(problem)
    reference = check_forward(problem, out, lse, keep=dmask >= 0)
    assert (lse - run(problem, dropout_p=0.0)[1]).abs().max() < 1e-5
    assert (dmask[:, :, :140, :200].abs().double() - reference.probs).abs().max() < 4e-3


def test_gradient_is_that_of_one_more_key(device):
    """By the definition: a key whose value is 0, and whose logit is the sink, appended to each row."""
    q, k, v = (torch.randn(2, 40, 2, 32, device=device, dtype=torch.bfloat16) for _ in "qkv")
    sinks = torch.randn(2, device=device, requires_grad=True)
    out = flash_attn_func(q, k, v, sinks=sinks)
    dout = torch.randn_like(out)
    (ours,) = torch.autograd.grad(out, sinks, dout)
    leaf = sinks.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(attention(q, k, v, sinks=leaf).out, leaf, dout.double())
    torch.testing.assert_close(ours.double(), expected, atol=5e-3 * 80**0.5, rtol=0.0)


@pytest.mark.parametrize("kind", ("dense", "packed"))
def test_gradient_repeats_bitwise(device, kind):
    problem = make_problem(Case(4, 700, 500, 4, 2, 64, DTYPE, causal=True, kind=kind, sinks=True), device)
    runs = []
    dout = torch.randn_like(problem.q)
    for _ in range(3):
        leaves = [x.detach().clone().requires_grad_() for x in problem.inputs.values()]
        problem.q, problem.k, problem.v, problem.sinks = leaves
        out, _, _ = run(problem, deterministic=True)
        runs.append(torch.autograd.grad(out, leaves, dout))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_dtypes_and_strides(device, dtype):
    """Half precision sinks are converted, with a gradient of the same dtype; any strides."""
    q, k, v = (torch.randn(1, 30, 4, 32, device=device, dtype=torch.bfloat16) for _ in "qkv")
    base = torch.randn(4, 3, device=device).to(dtype).requires_grad_()
    out = flash_attn_func(q, k, v, sinks=base[:, 1])
    assert torch.equal(out, flash_attn_func(q, k, v, sinks=base[:, 1].detach().float().contiguous()))
    (gradient,) = torch.autograd.grad(out.float().sum(), base)
    assert gradient.dtype == dtype and (gradient[:, [0, 2]] == 0).all() and (gradient[:, 1] != 0).all()
    one = torch.zeros(1, device=device, requires_grad=True)
    flash_attn_func(q, k, v, sinks=one.expand(4)).float().sum().backward()
    assert one.grad.shape == (1,)


def test_only_the_sinks_ask_for_a_gradient(device):
    q, k, v = (torch.randn(1, 30, 4, 32, device=device, dtype=torch.bfloat16) for _ in "qkv")
    sinks = torch.randn(4, device=device, requires_grad=True)
    flash_attn_func(q, k, v, sinks=sinks).float().sum().backward()
    assert sinks.grad.abs().sum() > 0


def test_torch_func_grad(device):
    q, k, v = (torch.randn(1, 20, 2, 32, device=device, dtype=torch.bfloat16) for _ in "qkv")
    sinks = torch.randn(2, device=device)
    actual = torch.func.grad(lambda x: flash_attn_func(q, k, v, sinks=x).float().square().sum())(sinks)
    leaf = sinks.clone().requires_grad_()
    flash_attn_func(q, k, v, sinks=leaf).float().square().sum().backward()
    assert torch.equal(actual, leaf.grad)


@pytest.mark.devices("cuda")
def test_no_host_synchronisation(device):
    problem = make_problem(Case(4, 150, 300, 4, 2, 64, DTYPE, True, kind="packed", sinks=True), device)
    leaves = [x.detach().clone().requires_grad_() for x in problem.inputs.values()]
    problem.q, problem.k, problem.v, problem.sinks = leaves
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(problem)[0].float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_bad_sinks(device):
    q = torch.randn(1, 5, 4, 16, device=device, dtype=torch.bfloat16)
    cu = torch.tensor([0, 5], dtype=torch.int32, device=device)
    calls = (
        lambda sinks: flash_attn_func(q, q, q, sinks=sinks),
        lambda sinks: flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 5, 5, sinks=sinks),
    )
    out = torch.full_like(q, 7.0)
    backend = backends.get(device)
    tail = (None, 0.0, 1.0, False, -1, -1, 0.0, False, None)
    calls = (*calls, lambda sinks: backend.fwd(q, q, q, out, *tail, sinks=sinks))
    for call in calls:
        for sinks, message in (
            (torch.zeros(4, device=device, dtype=torch.float64), "sinks: expected dtype float32, got float64"),
            (torch.zeros(3, device=device), "sinks: expected shape [4], got [3]"),
            (torch.zeros(1, 4, device=device), "sinks: expected shape [4], got [1, 4]"),
        ):
            with pytest.raises(RuntimeError) as caught:
                call(sinks)
            assert str(caught.value).splitlines()[0] == message
    for call in (calls[0], calls[-1]):
        with pytest.raises(TypeError, match="^sinks: expected a Tensor, got float$"):
            call(1.0)
    assert (out == 7.0).all()
