"""Sinks over a KV cache: once per row however its keys are split, rows and requests without keys, extreme logits.

float64 attention is the reference. Chunks of prompts, batch-invariant calls, plans, operators and graphs of them are
among the cases of those tests.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cases import DTYPES
from harness import captured
from kvcache_harness import KvCase, check_append, check_attention, check_call, make_problem, plan_for, run
from reference import assert_accurate, attention

from flash_attn import backends, flash_attn_func, flash_attn_with_kvcache

LONG = (2900, 0, -1, 1, 511)
FEATURES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (300, 0)},
    "both sides": {"window": (70, 3)},
    "softcap": {"softcap": 4.0, "causal": True},
    "alibi": {"alibi": True, "window": (900, -1)},
    "leftpad": {"leftpad": (2500, 0, 0, 1, 7), "causal": True},
    "pages": {"page_size": 16, "causal": True},
    "odd pages": {"page_size": 17, "window": (400, 0)},
}


@pytest.mark.each
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("num_splits", (0, 1, 3, 2**31 - 1))
def test_splits(device, features, num_splits):
    """The sink counts once per row; sequences without keys have it alone, inactive requests do not have it."""
    for seqlen_q, seqlen_new, nheads, nheads_k in ((1, None, 8, 1), (3, 3, 4, 2)):
        case = KvCase(LONG, seqlen_q, seqlen_new, 3003, nheads, nheads_k, sinks=True, **features)
        check_call(case, device, num_splits=num_splits)


@pytest.mark.parametrize("options", ({}, {"num_splits": 1}, {"num_splits": 7}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("head_dim", (32, 64, 128, 192, 256))
@pytest.mark.parametrize("seqlen_k", (1, 64, 511, 5000))
def test_the_sink_counts_once(device, head_dim, seqlen_k, options):
    """However many warps, parts and thread blocks share a row: keys of logit 0 and a sink of logit log(5)."""
    for heads in (2, 24, 48):  # tiles of 16, 32 and 64 rows
        q = torch.zeros(1, 1, heads, head_dim, device=device, dtype=torch.bfloat16)
        k = torch.zeros(1, seqlen_k, 1, head_dim, device=device, dtype=torch.bfloat16)
        sinks = torch.full((heads,), math.log(5), device=device)
        out, lse = flash_attn_with_kvcache(
            q, k, torch.ones_like(k), cache_seqlens=seqlen_k, sinks=sinks, return_softmax_lse=True, **options
        )  # fmt: skip
        assert (lse.double() - math.log(seqlen_k + 5)).abs().max() < 2e-6
        assert (out.double() - seqlen_k / (seqlen_k + 5)).abs().max() < 2e-3


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("head_dim,page_size", ((64, 0), (128, 256)))
def test_pairs_of_thread_blocks(device, head_dim, page_size):
    """One tile for each multiprocessor, whose halves pairs of thread blocks combine on sm_90."""
    batch = torch.cuda.get_device_properties(device).multi_processor_count
    case = KvCase((2048,) * batch, capacity=2048, nheads=4, nheads_k=1, head_dim=head_dim, page_size=page_size)
    check_call(dataclasses.replace(case, sinks=True), device)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES["cpu"])))
def test_dtypes(device, dtype):
    if dtype not in DTYPES[device]:
        pytest.skip(f"{dtype} tensors are for the CPU")
    check_call(KvCase(seqlen_q=2, seqlen_new=2, causal=True, dtype=dtype, rotary_dim=32, sinks=True), device)
    check_call(KvCase(head_dim=37, dtype=dtype, layout="unaligned", sinks=True), device)


@pytest.mark.parametrize("sinks", (torch.float16, torch.bfloat16))
def test_half_precision_and_strides(device, sinks):
    problem = make_problem(KvCase(), device)
    base = torch.randn(4, 3, device=device).to(sinks)
    out = run(problem, sinks=base[:, 1])[0]
    assert torch.equal(out, run(problem, sinks=base[:, 1].float().contiguous())[0])


@pytest.mark.parametrize("num_splits", (0, 1, 3))
@pytest.mark.parametrize("sink", (-1e4, -200.0, -30.0, 0.0, 30.0, 200.0, 1e4))
def test_sinks_far_from_the_scores(device, sink, num_splits):
    """Below by far: no effect; above by far: out 0 and LSE the sink, without overflow."""
    problem = make_problem(KvCase((1500, 40), capacity=1500, window=(1200, 0)), device)
    problem.sinks = torch.full((4,), sink, device=device)
    out, lse = run(problem, num_splits=num_splits)
    check_attention(problem, out, lse)
    plain, plain_lse = run(problem, num_splits=num_splits, sinks=torch.full_like(problem.sinks, -math.inf))
    if sink <= -200.0:
        assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    if sink >= 200.0:
        assert (out == 0).all() and (lse == sink).all()


def test_large_scores(device):
    """Scores of about 1e4 with sinks between them."""
    problem = make_problem(KvCase(seqlen_q=2, seqlen_new=2, causal=True), device)
    problem.q *= 300
    problem.sinks = torch.tensor([-3000.0, 0.0, 2000.0, 2e4], device=device)
    check_attention(problem, *run(problem))


@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("scale", (0.0, -0.2, 1e-30, 40.0))
def test_scales(device, scale, options):
    """softmax_scale leaves the sink alone."""
    q, k, v = (torch.randn(2, n, 2, 64, device=device, dtype=torch.bfloat16) for n in (3, 700, 700))
    sinks = torch.tensor([0.5, 30.0], device=device)
    out, lse = flash_attn_with_kvcache(
        q, k, v, sinks=sinks, softmax_scale=scale, causal=True, return_softmax_lse=True, **options
    )
    reference, plain = (
        attention(q, k, v, causal=True, scale=scale, sinks=sinks, dtype=dtype) for dtype in (torch.float64, q.dtype)
    )
    assert_accurate(out, reference.out, plain.out, "out")
    assert_accurate(lse, reference.lse, plain.lse, "lse")


@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("seqlen_q", (1, 40))
def test_rows_without_keys(device, options, seqlen_q):
    """Empty caches, padding that leaves none, rows before the first key: out 0 and exactly the sink."""
    case = KvCase((0, -1, 30, 9), seqlen_q, None, 700, causal=True, leftpad=(0, 0, 30, 0), sinks=True)
    problem = make_problem(case, device)
    problem.sinks[1] = -math.inf
    out, lse = run(problem, **options)
    wanted = problem.sinks.masked_fill(problem.sinks == -math.inf, math.inf)[:, None]
    for i, rows in ((0, seqlen_q), (2, seqlen_q), (3, max(seqlen_q - 9, 0))):
        assert (out[i, :rows] == 0).all() and torch.equal(lse[i, :, :rows], wanted.expand(-1, rows))
    assert (out[1] == 0).all() and torch.isposinf(lse[1]).all()
    assert torch.isfinite(lse[3, :, max(seqlen_q - 9, 0) :]).all()
    empty = problem.k_cache[:, :0]
    out, lse = flash_attn_with_kvcache(
        problem.q, empty, empty, cache_batch_idx=problem.rows, sinks=problem.sinks, return_softmax_lse=True
    )
    assert (out == 0).all() and torch.equal(lse, wanted.expand_as(lse))


@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
def test_infinitely_low_sinks_are_none(device, options):
    """The same bits; without a window the CPU computes attention without sinks by another kernel."""
    problem = make_problem(KvCase(LONG, 2, None, 3000, window=(700, 0)), device)
    plain, plain_lse = run(problem, **options)
    out, lse = run(problem, sinks=torch.full((4,), -math.inf, device=device), **options)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and torch.isposinf(lse).any()


@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
def test_infinite_and_nan_sinks(device, options):
    """+inf has all the weight of its head, NaN makes its head NaN; other heads are as they were."""
    problem = make_problem(KvCase((1500, 40), 1, None, 1500), device)
    sinks = torch.tensor([math.inf, 0.5, math.nan, 0.5], device=device)
    out, lse = run(problem, sinks=sinks, **options)
    same, same_lse = run(problem, sinks=torch.full_like(sinks, 0.5), **options)
    assert (out[:, :, 0] == 0).all() and torch.isposinf(lse[:, 0]).all()
    assert out[:, :, 2].isnan().all() and lse[:, 2].isnan().all()
    assert torch.equal(out[:, :, 1::2], same[:, :, 1::2]) and torch.equal(lse[:, 1::2], same_lse[:, 1::2])


@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
@pytest.mark.parametrize("sink", (0.0, 1e4))
def test_nan_in_queries_keys_and_values(device, options, sink):
    """It reaches the rows that see it; a sink that has all the weight silences no value."""
    problem = make_problem(KvCase((1500, 1400, 1300, 40), 1, None, 1500), device)
    sinks = torch.full((4,), sink, device=device)
    problem.q[0, :, 1] = math.nan
    problem.k_cache[problem.rows[1].long(), 700, 0] = math.nan
    problem.v_cache[problem.rows[2].long(), 1200, 1] = math.nan
    out, lse = run(problem, sinks=sinks, **options)
    is_nan = torch.zeros(4, 4, dtype=torch.bool, device=device)
    is_nan[0, 1] = is_nan[1, :2] = True
    assert torch.equal(lse[:, :, 0].isnan(), is_nan)
    is_nan[2, 2:] = True
    assert torch.equal(out[:, 0].isnan().all(-1), is_nan) and torch.equal(out[:, 0].isnan().any(-1), is_nan)


@pytest.mark.parametrize("options", ({}, {"num_splits": 3}, {"batch_invariant": True}), ids=str)
def test_a_plan_for_calls_with_and_without_sinks(device, options):
    """It knows nothing of them: in turns, each has the bits of a call without a plan."""
    problem = make_problem(KvCase(LONG, 2, None, 3000, nheads=8, causal=True, sinks=True), device)
    plan = plan_for(problem, **options)
    for sinks in (problem.sinks, None, 2 * problem.sinks, None):
        out, lse = run(problem, sinks=sinks, plan=plan)
        expected, expected_lse = run(problem, sinks=sinks, **options)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        check_attention(dataclasses.replace(problem, sinks=sinks), out, lse)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("num_splits", (0, 1, 3))
def test_replay_with_other_sinks_and_lengths(device, num_splits):
    case = KvCase((40, 0, 1900, 17), 1, 1, 2048, page_size=16, nheads=8, rotary_dim=32, sinks=True)
    static = make_problem(case, device)
    graph, (out, lse) = captured(lambda: run(static, num_splits=num_splits))
    for lengths in (case.lengths, (-1, 2000, -1, 5), (0, 0, 0, 0)):
        problem = make_problem(dataclasses.replace(case, lengths=lengths), device)
        for field in dataclasses.fields(static):
            target, source = getattr(static, field.name), getattr(problem, field.name)
            if isinstance(target, torch.Tensor):
                target.copy_(source)
        static.case = problem.case
        out.fill_(math.nan)
        graph.replay()
        check_append(static, problem)
        check_attention(static, out, lse)


@pytest.mark.devices("cuda")
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("num_splits", (0, 1, 3))
def test_requests_that_do_not_fit_have_no_sink(device, page_size, num_splits):
    """A length, and a page or cache row, that do not exist: LSE +inf, as for inactive requests."""
    problem = make_problem(KvCase((400, 1890, 1700, 0), 1, 1, 2000, page_size=page_size, sinks=True), device)
    before = problem.clone()
    problem.lengths[1] = 10**6
    place = problem.table if page_size else problem.rows
    kept = place.clone()
    place[2] = 10**6
    out, lse = run(problem, num_splits=num_splits)
    place.copy_(kept)
    takes_part = (True, False, False, True)
    check_append(problem, before, takes_part)
    check_attention(problem, out, lse, takes_part)


def test_gradients_are_not_lost(device):
    problem = make_problem(KvCase((50,) * 4, sinks=True), device)
    problem.sinks.requires_grad_()
    out, _ = run(problem)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()
    with pytest.raises(RuntimeError, match="^out: expected None where gradients are recorded"):
        run(problem, out=torch.empty_like(problem.q))
    with torch.no_grad():
        assert torch.equal(run(problem)[0], out)


def test_bad_sinks(device):
    """The messages of the forward, from the public function and the backend; nothing is written."""
    problem = make_problem(KvCase((50,) * 4, seqlen_new=1), device)
    q, out = problem.q, torch.full_like(problem.q, 7.0)
    before = problem.clone()

    def direct(sinks):
        new = (problem.k, problem.v, problem.lengths, None, None, problem.rows, None, None, None)
        scores = (1.0, False, -1, -1, 0.0, False, 0, None)
        return backends.get(device).fwd_kvcache(q, problem.k_cache, problem.v_cache, *new, out, *scores, sinks=sinks)

    calls = (
        direct,
        lambda sinks: run(problem, sinks=sinks, out=out),
        lambda sinks: flash_attn_func(q, q, q, sinks=sinks),
    )
    wrong = [
        (torch.zeros(4, device=device, dtype=torch.float64), "sinks: expected dtype float32, got float64"),
        (torch.zeros(3, device=device), "sinks: expected shape [4], got [3]"),
        (torch.zeros(4, 4, device=device), "sinks: expected shape [4], got [4, 4]"),
    ]
    if device == "cuda":
        wrong.append((torch.zeros(4), None))
    for sinks, message in wrong:
        messages = []
        for call in calls:
            with pytest.raises(RuntimeError, match="^sinks: expected ") as caught:
                call(sinks)
            messages.append(str(caught.value).splitlines()[0])
        assert messages == [message or messages[0]] * 3
    shared = torch.empty(q.numel(), device=device)
    with pytest.raises(RuntimeError, match="^out: expected memory that does not overlap sinks"):
        run(problem, sinks=shared[:4], out=shared.view(q.dtype)[: q.numel()].view(q.shape))
    assert (out == 7.0).all()
    check_append(dataclasses.replace(problem, k=None, v=None), before)
