"""flash_attn_with_kvcache on the GPU apart from its results: CUDA graphs, streams, memory, synchronisation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from harness import no_synchronisation
from kvcache_harness import KvCase, check_append, check_attention, make_problem, plan_for, run

from flash_attn import KvCachePlan, flash_attn_combine, flash_attn_with_kvcache

pytestmark = pytest.mark.devices("cuda")  # nothing of this exists on the CPU

CAPACITY = 2048
STEPS = ((40, 0, 1900, 17), (41, 1, 1901, 18), (-1, 2000, -1, 5), (0, 0, 0, 0), (2040, 2040, 2040, 2040), (-1,) * 4)


def captured(call):
    """Warm up on a side stream and capture there, in thread-local mode -> (graph, the call's results)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            results = call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, results


def fill(static, problem):
    """Write the tensors of a problem into those of another, which a graph refers to."""
    for field in dataclasses.fields(static):
        target, source = getattr(static, field.name), getattr(problem, field.name)
        if isinstance(target, torch.Tensor):
            target.copy_(source)
    static.case = problem.case


@pytest.mark.parametrize("page_size", (0, 16, 256))
@pytest.mark.parametrize("seqlen_q,causal", ((1, False), (4, True)))
@pytest.mark.parametrize("planned", (False, True))
@pytest.mark.parametrize("num_splits", (0, 3))
def test_replay_with_other_lengths_and_tables(device, page_size, seqlen_q, causal, planned, num_splits):
    case = KvCase(STEPS[0], seqlen_q, seqlen_q, CAPACITY, page_size=page_size, causal=causal, rotary_dim=32, nheads=8)
    static = make_problem(case, device)
    plan = plan_for(static, num_splits=num_splits) if planned else None
    out = torch.empty_like(static.q)

    def step():
        if planned:
            plan.update(static.lengths)
        return run(static, out=out, plan=plan, num_splits=num_splits)

    graph, (_, lse) = captured(step)
    for lengths in STEPS:
        problem = make_problem(dataclasses.replace(case, lengths=lengths), device)
        fill(static, problem)
        out.fill_(float("nan"))
        graph.replay()
        check_append(static, problem)
        check_attention(static, out, lse)


@pytest.mark.parametrize("head_dim,page_size", ((64, 0), (128, 256)))
@pytest.mark.parametrize("planned,sinks", ((False, False), (True, False), (False, True), (True, True)))
def test_replay_of_halved_tiles(device, head_dim, page_size, planned, sinks):
    """One tile for each multiprocessor: sequences of equal lengths are cut into halves, which on sm_90 pairs of thread
    blocks merge. Other lengths; then plans of other lengths, whose results mean nothing, but whose calls return."""
    batch = torch.cuda.get_device_properties(device).multi_processor_count
    equal = (2048,) * batch
    case = KvCase(equal, capacity=2048, nheads=4, nheads_k=1, head_dim=head_dim, page_size=page_size, sinks=sinks)
    static = make_problem(case, device)
    plan = plan_for(static) if planned else None
    out = torch.empty_like(static.q)

    def step():
        if planned:
            plan.update(static.lengths)
        return run(static, out=out, plan=plan)

    graph, (_, lse) = captured(step)
    steps = (equal, (2000,) * (batch - 1) + (1,), (0, -1) * (batch // 2) + (9,) * (batch % 2), (1536,) * batch, equal)
    for lengths in steps:
        fill(static, make_problem(dataclasses.replace(case, lengths=lengths), device))
        out.fill_(float("nan"))
        graph.replay()
        check_attention(static, out, lse)
    if planned:
        for lengths in steps[1:4]:
            other = torch.tensor(lengths, dtype=torch.int32, device=device)
            run(static, cache_seqlens=other, plan=plan)
            plan.update(other)
            run(static, plan=plan)
            plan.update(static.lengths)
        check_attention(static, *run(static, plan=plan))


def test_one_graph_of_many_layers(device):
    """A plan is updated once and read by all layers; their results are those of separate calls."""
    case = KvCase((1000, 3, 0, 1999), capacity=CAPACITY, nheads=8, page_size=16)
    layers = [make_problem(case, device) for _ in range(4)]
    pages = torch.randperm(len(layers[0].k_cache), device=device, dtype=torch.int32)
    for layer in layers:
        layer.table, layer.lengths = pages[: layers[0].table.numel()].view_as(layers[0].table), layers[0].lengths
        for cache in (layer.k_cache, layer.v_cache):
            cache.normal_()
    plan = plan_for(layers[0])

    def step():
        plan.update(layers[0].lengths)
        return [run(layer, plan=plan) for layer in layers]

    graph, results = captured(step)
    layers[0].lengths.copy_(torch.tensor([7, 2000, 1, 64]))
    expected = [run(layer) for layer in layers]
    graph.replay()
    for (out, lse), (eager_out, eager_lse) in zip(results, expected):
        assert torch.equal(out, eager_out) and torch.equal(lse, eager_lse)


def test_graph_of_combine(device):
    out_partial, lse_partial = torch.randn(5, 2, 3, 4, 64, device=device), torch.randn(5, 2, 3, 4, device=device)
    out = torch.empty(2, 3, 4, 64, device=device, dtype=torch.bfloat16)
    graph, (_, lse) = captured(lambda: flash_attn_combine(out_partial, lse_partial, out))
    out_partial.normal_()
    graph.replay()
    expected = flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def requested_bytes(call):
    """What a call asks of the allocator: (all of it, what its results still hold)."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    results = call()
    after = torch.cuda.memory_stats()
    total, kept = (
        after[f"requested_bytes.all.{x}"] - before[f"requested_bytes.all.{x}"] for x in ("allocated", "current")
    )
    del results
    return total, kept


@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("seqlen_new", (None, 1))
@pytest.mark.parametrize("num_splits", (0, 7))
def test_out_and_plan_leave_the_lse_to_allocate(device, page_size, seqlen_new, num_splits):
    case = KvCase((1000, 3, 0, 1999), 1, seqlen_new, CAPACITY, page_size=page_size, rotary_dim=32 if seqlen_new else 0)
    problem = make_problem(case, device)
    plan, out = plan_for(problem, num_splits=num_splits), torch.empty_like(problem.q)
    lse_bytes = 4 * 4 * 4
    total, kept = requested_bytes(lambda: run(problem, plan=plan, out=out))
    assert total <= (lse_bytes + 511) // 512 * 512 and kept >= lse_bytes
    assert requested_bytes(lambda: plan.update(problem.lengths))[0] == 0


@pytest.mark.parametrize("head_dim", (64, 37, 100))
@pytest.mark.parametrize("layout", ("contiguous", "unaligned", "permuted"))
@pytest.mark.parametrize("page_size", (0, 16))
def test_the_cache_is_never_copied(device, head_dim, layout, page_size):
    case = KvCase((1000, 3, 0, 1999), 1, 1, CAPACITY, head_dim=head_dim, layout=layout, page_size=page_size)
    problem = make_problem(case, device)
    total, _ = requested_bytes(lambda: run(problem, num_splits=1))
    assert total < problem.k_cache.numel() * problem.k_cache.element_size() / 8


@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("planned", (False, True))
def test_no_synchronisation(device, page_size, planned):
    case = KvCase((1000, 3, -1, 1999), 2, 2, CAPACITY, page_size=page_size, causal=True, rotary_dim=32, alibi=True)
    problem = make_problem(case, device)
    run(problem)
    before = problem.clone()
    lengths64 = problem.lengths.long()
    torch.cuda.synchronize()
    with no_synchronisation():
        plan = plan_for(problem) if planned else None
        out, lse = run(problem, plan=plan)
        run(problem, plan=plan, cache_seqlens=lengths64)
        if not page_size:
            flash_attn_with_kvcache(problem.q, problem.k_cache[:4], problem.v_cache[:4], cache_seqlens=7)
        flash_attn_combine(torch.stack([out, out]), torch.stack([lse, lse]).transpose(2, 3))
    check_append(problem, before)
    check_attention(problem, out, lse)


def test_side_stream(device):
    """The call runs on the current stream: its lengths are written there by a slow predecessor."""
    problem = make_problem(KvCase((1000, 3, 0, 1999), 1, 1, CAPACITY), device)
    lengths = problem.lengths.clone()
    problem.lengths.fill_(-1)
    plan = plan_for(problem)
    before = problem.clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        problem.lengths.copy_(lengths)
        plan.update(problem.lengths)
        out, lse = run(problem, plan=plan)
    torch.cuda.current_stream().wait_stream(stream)
    check_append(problem, before)
    check_attention(problem, out, lse)


def test_repeated_calls_give_the_same_bits(device):
    problem = make_problem(KvCase((1000, 3, 0, 1999), 2, None, CAPACITY, nheads=8, causal=True), device)
    results = [run(problem, num_splits=n) for n in (0, 5) for _ in range(10)]
    for index in (0, 10):
        for out, lse in results[index : index + 10]:
            assert torch.equal(out, results[index][0]) and torch.equal(lse, results[index][1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_device_that_is_not_the_current_one(device):
    with torch.cuda.device(0):
        problem = make_problem(KvCase((1000, 3, 0, 1999), 1, 1, CAPACITY), "cuda:1")
        plan = KvCachePlan(problem.lengths, 1, 4, 2, 64, CAPACITY, seqlen_new=1)
        before = problem.clone()
        out, lse = run(problem, plan=plan)
        assert out.device == plan.tensor.device == problem.q.device and torch.cuda.current_device() == 0
        check_append(problem, before)
        check_attention(problem, out, lse)
