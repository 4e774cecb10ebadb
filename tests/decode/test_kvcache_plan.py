"""KvCachePlan: one schedule for the layers of a step, updated in place, refused where it does not fit."""

from __future__ import annotations

import pytest
import torch
from kvcache_harness import KvCase, check_append, check_attention, make_problem, plan_for, run

import flash_attn
from flash_attn import KvCachePlan, backends

LONG = (3000, 0, -1, 1, 511)
CASES = (
    KvCase(),
    KvCase(LONG, capacity=3001, seqlen_new=1, nheads=8, rotary_dim=32),
    KvCase(LONG, capacity=3003, seqlen_q=3, seqlen_new=3, causal=True, page_size=16, softcap=5.0),
    KvCase(LONG, capacity=3000, window=(900, 0), alibi=True, leftpad=(2500, 0, 0, 1, 7)),
    KvCase((700, 64, 0), capacity=900, seqlen_q=130, seqlen_new=130, causal=True, page_size=17, head_dim=128),
    KvCase((290, 3), capacity=300, head_dim=37, seqlen_new=1),
    KvCase(LONG, capacity=3001, seqlen_new=1, nheads=8, sinks=True),
)


@pytest.mark.each
@pytest.mark.parametrize("kv_case", CASES, ids=str)
@pytest.mark.parametrize("options", ({}, {"num_splits": 1}, {"num_splits": 5}, {"batch_invariant": True}), ids=str)
def test_plan_of_every_kind(device, kv_case, options):
    """Accurate, the same bits in every layer, and those of a call without a plan."""
    problem = make_problem(kv_case, device)
    plan = plan_for(problem, **options)
    results = []
    for out in (None, torch.empty_like(problem.q), None):
        layer = problem.clone()
        results.append(run(layer, plan=plan, out=out))
        check_append(layer, problem)
        check_attention(layer, *results[-1])
    results.append(run(problem.clone(), **options))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_update_for_other_lengths(device):
    """Longer, shorter, none, a length that grows by one a step; int64 too. The memory stays where it is."""
    problem = make_problem(KvCase((2500,) * 4, capacity=2600, seqlen_new=1), device)
    plan = plan_for(problem)
    place = plan.tensor.data_ptr()
    for lengths in ((2500, 1, 0, 30), (-1, 2499, 64, -1), (0, 0, 0, 0), (1, 2, 3, 4), (2, 3, 4, 5)):
        step = problem.clone()
        step.case = KvCase(lengths, capacity=2600, seqlen_new=1)
        step.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        plan.update(step.lengths.long())
        before = step.clone()
        out, lse = run(step, plan=plan)
        check_append(step, before)
        check_attention(step, out, lse)
    assert plan.tensor.data_ptr() == place


def test_update_for_other_padding(device):
    problem = make_problem(KvCase((250, 90), capacity=300, leftpad=(10, 20)), device)
    plan = plan_for(problem)
    for leftpad in ((10, 20), (200, 90), (99, 21)):
        problem.leftpad = torch.tensor(leftpad, dtype=torch.int32, device=device)
        problem.case = KvCase((250, 90), capacity=300, leftpad=leftpad)
        plan.update(problem.lengths, problem.leftpad)
        check_attention(problem, *run(problem, plan=plan))


def test_size_does_not_depend_on_the_lengths(device):
    sizes = (1, 8, 2, 64, 5000)
    plans = [KvCachePlan(torch.full((3,), n, dtype=torch.int32, device=device), *sizes) for n in (0, 77, 5000, -1)]
    assert len({plan.tensor.numel() for plan in plans}) == 1
    assert plans[0].tensor.dtype == torch.int32 and plans[0].tensor.device.type == device


def test_equal_masks_are_one_plan(device):
    problem = make_problem(KvCase(causal=True), device)
    plan = plan_for(problem)
    expected = run(problem, plan=plan)
    for options in ({"window_size": (-1, 0), "causal": False}, {"window_size": (-7, 5)}):
        assert torch.equal(run(problem, plan=plan, **options)[0], expected[0])


def test_calls_that_do_not_fit(device):
    problem = make_problem(KvCase(seqlen_q=2, causal=True, page_size=16), device)
    plan, q = plan_for(problem, num_splits=3), problem.q
    for message, arguments in (
        ("batch 4, got one for 3", {"plan": KvCachePlan(problem.lengths[:3], 2, 4, 2, 64, 96, causal=True)}),
        ("seqlen_q 2, got one for 1", {"plan": KvCachePlan(problem.lengths, 1, 4, 2, 64, 96, causal=True)}),
        ("seqlen_new 2, got one for 0", {"k": q[:, :, :2], "v": q[:, :, :2]}),
        ("nheads 4, got one for 8", {"plan": KvCachePlan(problem.lengths, 2, 8, 2, 64, 96, causal=True)}),
        ("nheads_k 2, got one for 1", {"plan": KvCachePlan(problem.lengths, 2, 4, 1, 64, 96, causal=True)}),
        ("head_dim 64, got one for 128", {"plan": KvCachePlan(problem.lengths, 2, 4, 2, 128, 96, causal=True)}),
        ("seqlen_cache 80, got one for 96", {"block_table": problem.table[:, :5]}),
        (r"the window \(-1, -1\), got one for \(-1, 0\)", {"causal": False}),
        (r"the window \(9, 0\), got one for \(-1, 0\)", {"window_size": (9, 9)}),
        ("num_splits 2, got one for 3", {"num_splits": 2}),
        ("batch_invariant True, got one for False", {"batch_invariant": True}),
    ):
        with pytest.raises(RuntimeError, match=f"^plan: expected one made for {message}$"):
            run(problem, **{"plan": plan, **arguments})
    check_attention(problem, *run(problem, plan=plan, num_splits=3))


def test_wrong_arguments(device):
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    for error, message, arguments in (
        (TypeError, "cache_seqlens: expected a Tensor, got int", (5, 1, 4, 2, 64, 96)),
        (RuntimeError, "cache_seqlens: expected dtype int32", (lengths.float(), 1, 4, 2, 64, 96)),
        (RuntimeError, "cache_leftpad: expected shape", (lengths, 1, 4, 2, 64, 96, 0, False, (-1, -1), lengths[:2])),
        (RuntimeError, "num_splits: expected a value >= 0", (lengths, 1, 4, 2, 64, 96, 0, False, (-1, -1), None, -1)),
        (TypeError, "window_size: expected a pair", (lengths, 1, 4, 2, 64, 96, 0, False, 7)),
    ):
        with pytest.raises(error, match="^" + message):
            KvCachePlan(*arguments)
    plan = KvCachePlan(lengths, 1, 4, 2, 64, 96)
    with pytest.raises(RuntimeError, match="^cache_seqlens: expected shape"):
        plan.update(lengths[:2])


@pytest.mark.devices("cpu")
def test_plan_of_other_lengths_is_refused(device):
    problem = make_problem(KvCase(leftpad=(1, 0, 2, 3)), device)
    plan = plan_for(problem)
    plan.update(problem.lengths + 1, problem.leftpad)
    with pytest.raises(
        RuntimeError, match=r"^plan: expected one updated for cache_seqlens \[40, 0, 91, 17\], got one for"
    ):
        run(problem, plan=plan)
    plan.update(problem.lengths)
    with pytest.raises(RuntimeError, match="^plan: expected one updated for cache_leftpad"):
        run(problem, plan=plan)


@pytest.mark.devices("cuda")
def test_explanation_of_a_call(device):
    """The binding says how a call would run, with the memory that KvCachePlan reserves, and runs nothing."""
    q = torch.randn(16, 1, 32, 128, dtype=torch.bfloat16, device=device)
    cache = torch.randn(16, 8192, 8, 128, dtype=torch.bfloat16, device=device)
    lengths = torch.full((16,), 5000, dtype=torch.int32, device=device)
    out = torch.full_like(q, 7.0)

    def explain(q, num_splits=0, invariant=False):
        scores = (0.1, True, -1, -1, 0.0, False, num_splits, None, invariant)
        written = out if q.shape == out.shape else None
        optional = (lengths, None, None, None, None, None, None, written)
        return backends.get(device).explain_kvcache(q, cache, cache, None, None, *optional, *scores)

    for num_splits, invariant, split in (
        (0, False, "anywhere"),
        (1, False, "nowhere"),
        (5, False, "equal splits"),
        (0, True, "fixed splits"),
    ):
        plan = KvCachePlan(lengths, 1, 32, 8, 128, 8192, causal=True, num_splits=num_splits, batch_invariant=invariant)
        fields = explain(q, num_splits, invariant)
        assert fields["kernel"] == "split_kv" and fields["split"] == split
        assert fields["schedule_bytes"] + fields["workspace_bytes"] == 4 * plan.tensor.numel()
        assert fields["grid"] > 0 and fields["combines"] == (split != "nowhere")
    assert explain(q.expand(16, 512, 32, 128).contiguous())["kernel"] in ("mma_sync", "wgmma")
    assert explain(q[:, :0])["kernel"] == "none"
    assert torch.equal(out, torch.full_like(q, 7.0))


def test_name_and_documentation():
    assert "KvCachePlan" in flash_attn.__all__
    for name in ("seqlen_q", "nheads", "seqlen_cache", "seqlen_new", "cache_leftpad", "num_splits", "batch_invariant"):
        assert f"{name}:" in KvCachePlan.__doc__ or f"{name}," in KvCachePlan.__doc__


def test_a_plan_of_inference_mode(device):
    """Calls read it anywhere; only that mode may write it."""
    lengths = torch.tensor([3, 4], dtype=torch.int32, device=device)
    with torch.inference_mode():
        plan = KvCachePlan(lengths, 1, 4, 2, 64, 16)
        plan.update(lengths)
    with pytest.raises(
        RuntimeError, match="^plan: expected a tensor that may be written in place, got one made in inf"
    ):
        plan.update(lengths)
