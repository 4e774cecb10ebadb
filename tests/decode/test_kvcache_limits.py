"""Extreme arguments of the KV cache: numbers of splits, rows of the rotary tables, rows that sequences share."""

from __future__ import annotations

import pytest
import torch
from kvcache_harness import KvCase, check_append, check_attention, check_call, make_problem, plan_for, run, storage_bits

from flash_attn import KvCachePlan, backends
from flash_attn.limits import MAX_HEAD_DIM

SPLITS = (0, 1, 3, 128, 2**30, 2**31 - 1, 2**31, 2**40, 2**63 - 1)
LENGTHS = (3000, 0, -1, 1, 511)
SPLIT_CASES = (
    KvCase(LENGTHS, capacity=3001, seqlen_new=1),
    KvCase(LENGTHS, capacity=3003, seqlen_q=3, seqlen_new=3, causal=True, page_size=16),
    KvCase(LENGTHS, capacity=3000, seqlen_q=2, window=(900, 0), page_size=17, head_dim=128),
)


@pytest.mark.parametrize("kv_case", SPLIT_CASES, ids=str)
def test_any_number_of_splits(device, kv_case):
    """More than there are key blocks are as many as there are, with a plan and without one."""
    problem = make_problem(kv_case, device)
    results = {}
    for num_splits in SPLITS:
        layers = [problem.clone() for _ in range(2)]
        plan = plan_for(problem, num_splits=num_splits)
        own, planned = run(layers[0], num_splits=num_splits), run(layers[1], num_splits=num_splits, plan=plan)
        for layer, (out, lse) in zip(layers, (own, planned)):
            check_append(layer, problem)
            check_attention(layer, out, lse)
        assert torch.equal(own[0], planned[0]) and torch.equal(own[1], planned[1])
        results[num_splits] = own
    for num_splits in SPLITS[4:]:
        assert all(torch.equal(x, y) for x, y in zip(results[num_splits], results[2**30]))


@pytest.mark.parametrize("num_splits", (1, 2**31 - 1))
def test_splits_of_the_batch_invariant_mode(device, num_splits):
    problem = make_problem(KvCase((3000, 700), capacity=3000), device)
    expected = run(problem, batch_invariant=True)
    out, lse = run(problem, batch_invariant=True, num_splits=num_splits)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("window", ((2**31 - 1, 2**31 - 1), (2**40, 2**40), (2**62, -1)), ids=str)
def test_windows_wider_than_32_bits_are_unbounded(device, window):
    """With a plan too; and the queries use one row of the rotary tables, as without a window."""
    problem = make_problem(KvCase(seqlen_q=3, seqlen_new=3, rotary_dim=32), device)
    expected = run(problem.clone())
    for options in ({}, {"plan": plan_for(problem, window_size=window)}):
        out, lse = run(problem.clone(), window_size=window, **options)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize(
    "sizes,message",
    [
        ((1, 4, 2, 64, -1), "seqlen_cache: expected a size in .0, 2.31., got -1"),
        ((-3, 4, 2, 64, 96), "seqlen_q: expected a size in .0, 2.31., got -3"),
        ((1, 2**31, 2, 64, 96), "nheads: expected a size in .0, 2.31., got 2147483648"),
        ((1, 4, 2**31, 64, 96), "nheads_k: expected a size in .0, 2.31., got 2147483648"),
        ((1, 4, 3, 64, 96), "nheads: expected a head count divisible by the K/V head count 3, got 4"),
        ((1, 4, 2, 0, 96), "head_dim: expected a value from 1 to {most}, got 0"),
        ((1, 4, 2, 513, 96), "head_dim: expected a value from 1 to {most}, got 513"),
        ((2**29, 4, 2, 64, 96), "seqlen_q: expected at most 1073741823 rows for each K/V head, got 1073741824"),
    ],
    ids=str,
)
def test_sizes_of_a_plan(device, sizes, message):
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    seqlen_q, heads, heads_k, head_dim, seqlen_cache = sizes
    message = message.replace("{most}", str(MAX_HEAD_DIM))

    def backend_plan():
        return backends.get(device).kvcache_plan(
            lengths, None, 3, seqlen_q, 0, heads, heads_k, head_dim, seqlen_cache, False, -1, -1, 0, False
        )

    with pytest.raises(RuntimeError, match="^" + message):
        backend_plan()


@pytest.mark.devices("cuda")
def test_plan_of_too_many_tiles(device):
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    with pytest.raises(RuntimeError, match="^q: expected at most 2147483647 tiles of .* rows, got"):
        KvCachePlan(lengths, 2**20, 2**20, 2**20, 64, 96)


ROTARY_CASES = (
    KvCase(seqlen_q=7, seqlen_new=2, rotary_dim=32),
    KvCase(seqlen_q=7, seqlen_new=0, rotary_dim=32, interleaved=True),
    KvCase(seqlen_q=130, seqlen_new=5, rotary_dim=32, page_size=16),
    KvCase(seqlen_q=7, seqlen_new=2, rotary_dim=32, causal=True, lengths=(40, 0, 89, 17)),
    KvCase(seqlen_q=3, seqlen_new=5, rotary_dim=32, window=(30, 4)),
)


def with_rows(problem, rows):
    """The problem with tables of so many rows, beyond which their memory holds NaN."""
    for name in ("cos", "sin"):
        table = getattr(problem, name).clone()
        table[rows:] = float("nan")
        setattr(problem, name, table[:rows])
    return problem


@pytest.mark.parametrize("kv_case", ROTARY_CASES, ids=str)
def test_rows_of_the_rotary_tables(device, kv_case):
    """Without a mask all queries of a sequence take one row: the longest sequence needs no more than its new keys."""
    masked = kv_case.causal or kv_case.window != (-1, -1)
    needed = max(kv_case.lengths) + max(kv_case.seqlen_q if masked else 1, kv_case.new)
    problem = with_rows(make_problem(kv_case, device), needed)
    before = problem.clone()
    for options in ({}, {"num_splits": 3}, {"batch_invariant": True}):
        step = problem.clone()
        out, lse = run(step, **options)
        check_append(step, before)
        check_attention(step, out, lse)
    short = with_rows(make_problem(kv_case, device), needed - 1)
    if device == "cpu":
        with pytest.raises(RuntimeError, match=f"^rotary_cos: expected at least {needed} rows, got {needed - 1}"):
            run(short)
    else:
        takes_part = [length < max(kv_case.lengths) for length in kv_case.lengths]
        before = short.clone()
        out, lse = run(short)
        check_append(short, before, takes_part)
        check_attention(short, out, lse, takes_part)


def test_tables_that_no_sequence_can_use(device):
    """What every sequence needs is refused on the host."""
    problem = with_rows(make_problem(KvCase(seqlen_q=7, seqlen_new=3, rotary_dim=32), device), 2)
    with pytest.raises(RuntimeError, match="^rotary_cos: expected at least [0-9]+ rows, got 2"):
        run(problem)


@pytest.mark.devices("cpu")
def test_new_rows_that_another_sequence_uses(device):
    """Refused where the host sees it: by cache rows and by pages, where both write and where one reads."""
    for page_size, name in ((0, "cache_batch_idx"), (16, "block_table")):
        problem = make_problem(KvCase((40, 40, 35, 17), seqlen_new=2, page_size=page_size), device)
        chosen = problem.table if page_size else problem.rows
        for pair in ((0, 1), (1, 2), (2, 0)):
            given = chosen.clone()
            given[pair[1]] = given[pair[0]]
            options = {"block_table" if page_size else "cache_batch_idx": given}
            before = problem.clone()
            message = (
                rf"^{name}: expected new rows that no other sequence uses, got rows of sequence \d that sequence \d"
            )
            with pytest.raises(RuntimeError, match=message):
                run(problem, **options)
            for cache in ("k_cache", "v_cache"):
                assert torch.equal(storage_bits(getattr(problem, cache)), storage_bits(getattr(before, cache)))


def test_sequences_that_share_rows(device):
    """A prefix in common pages, one cache row that is only read, and one of which two sequences use different rows."""
    problem = check_call(KvCase((40, 35), seqlen_new=2, page_size=16), device)[0]
    problem.table[1, :2] = problem.table[0, :2]
    before = problem.clone()
    out, lse = run(problem)
    check_append(problem, before)
    check_attention(problem, out, lse)
    problem = make_problem(KvCase((40, 40)), device)
    problem.rows[1] = problem.rows[0]
    check_attention(problem, *run(problem))
    problem = make_problem(KvCase((10, 40), seqlen_new=2, leftpad=(0, 12)), device)
    problem.rows[1] = problem.rows[0]
    for cache in (problem.k_cache, problem.v_cache):
        cache[problem.rows[0].item(), :40] = torch.randn_like(cache[0, :40])
    before = problem.clone()
    out, lse = run(problem)
    check_append(problem, before)
    check_attention(problem, out, lse)
