"""batch_invariant=True: the bits of a row depend on the row and its keys alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kvcache_harness import KvCase, check_call, get_rows, make_problem, put_rows, run

from flash_attn import flash_attn_with_kvcache

FEATURES = ({}, {"window": (300, 0)}, {"softcap": 5.0}, {"alibi": True}, {"rotary_dim": 32, "head_dim": 128},
            {"sinks": True})  # fmt: skip
LENGTHS = (1100, 0, 37, 700, -1, 255, 256)


def invariant(problem, **overrides):
    return run(problem, batch_invariant=True, **overrides)


def taken(problem, indices):
    """The same sequences alone, or in another order, in the same cache."""
    part = problem.clone()
    rows = torch.tensor(indices, device=problem.q.device)
    part.case = None
    for name in ("q", "k", "v", "lengths", "rows", "table", "leftpad", "slopes"):
        if getattr(problem, name) is not None:
            setattr(part, name, getattr(problem, name)[rows])
    return part


def run_like(problem, part, **overrides):
    """Call a part of a problem with the problem's options."""
    part.case = problem.case
    return invariant(part, **overrides)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("page_size", (0, 16))
def test_accuracy(device, features, page_size):
    for seqlen_q in (1, 5):
        case = KvCase(LENGTHS, seqlen_q, seqlen_q, 1200, page_size=page_size, causal=True, **features)
        check_call(case, device, batch_invariant=True)
    check_call(KvCase((90, 3), 65, 65, 200, page_size=page_size, causal=True), device, batch_invariant=True)


@pytest.mark.each
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("seqlen_q", (1, 3))
def test_other_sequences_do_not_matter(device, features, page_size, seqlen_q):
    case = KvCase(LENGTHS, seqlen_q, seqlen_q, 1200, page_size=page_size, causal=True, **features)
    problem = make_problem(case, device)
    out, lse = invariant(problem.clone())
    order = [6, 3, 0, 2]
    for indices in ([0], [3], [6], order):
        part = run_like(problem, taken(problem, indices))
        assert torch.equal(part[0], out[indices]) and torch.equal(part[1], lse[indices])


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_number_of_splits_does_not_matter(device, features):
    problem = make_problem(KvCase(LENGTHS, 2, 2, 1200, causal=True, nheads=8, **features), device)
    out, lse = invariant(problem.clone())
    for num_splits in (1, 2, 7, 100):
        result = invariant(problem.clone(), num_splits=num_splits)
        assert torch.equal(result[0], out) and torch.equal(result[1], lse)


@pytest.mark.parametrize("page_size", (0, 16))
def test_many_runs(device, page_size):
    """More runs of keys than the GPU holds thread blocks, so that each computes several runs of a sequence."""
    longest = 20000 if device == "cuda" else 1100
    case = KvCase((longest, 33, longest - 111, 0), 1, None, longest, nheads=16, nheads_k=8, page_size=page_size)
    check_call(case, device, batch_invariant=True)
    problem = make_problem(case, device)
    out, lse = invariant(problem)
    result = invariant(problem, num_splits=1)
    assert torch.equal(result[0], out) and torch.equal(result[1], lse)
    for index in range(len(case.lengths)):
        part = run_like(problem, taken(problem, [index]))
        assert torch.equal(part[0], out[[index]]) and torch.equal(part[1], lse[[index]])


@pytest.mark.each
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("page_size", (1, 3, 16, 17, 256))
def test_pages_do_not_matter(device, features, page_size):
    """The same keys dense, in pages, and in a larger cache."""
    case = KvCase(LENGTHS, 2, None, 1200, causal=True, **{**features, "rotary_dim": 0})
    dense = make_problem(case, device)
    out, lse = invariant(dense)
    for capacity, other_size in ((1200, page_size), (5000, page_size), (2500, 0)):
        other = make_problem(dataclasses.replace(case, capacity=capacity, page_size=other_size), device)
        other.q, other.slopes, other.sinks = dense.q, dense.slopes, dense.sinks
        for i, n in enumerate(LENGTHS):
            for name in ("k_cache", "v_cache"):
                put_rows(other, getattr(other, name), i, 0, get_rows(dense, getattr(dense, name), i, 0, n))
        result = invariant(other)
        assert torch.equal(result[0], out) and torch.equal(result[1], lse)


def decoded(q, k, v, chunk, page_size, **options):
    """All tokens (1, n, ...) through a new cache, `chunk` at a time -> (out, lse)."""
    n = q.shape[1]
    shape = (-(-n // page_size) if page_size else 1, page_size or n, *k.shape[2:])
    caches = [torch.full(shape, float("nan"), device=q.device, dtype=q.dtype) for _ in "kv"]
    table = torch.arange(shape[0], device=q.device, dtype=torch.int32)[None] if page_size else None
    parts = []
    for first in range(0, n, chunk):
        rows = slice(first, min(first + chunk, n))
        parts.append(
            flash_attn_with_kvcache(
                q[:, rows], *caches, k[:, rows], v[:, rows], cache_seqlens=first, block_table=table,
                causal=True, return_softmax_lse=True, batch_invariant=True, **options,
            )
        )  # fmt: skip
    return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)


@pytest.mark.each
@pytest.mark.parametrize("head_dim,heads", ((64, (4, 2)), (128, (8, 1)), (37, (2, 2))))
@pytest.mark.parametrize("features", ("plain", "window", "softcap", "rotary", "sinks"))
def test_decode_equals_prefill(device, head_dim, heads, features):
    """A token has the same result decoded alone, in chunks of any size, and in the whole prompt."""
    n, dtype = 150, torch.bfloat16

    def tensor(count):
        return torch.randn(1, n, count, head_dim, device=device, dtype=dtype)

    q, k, v = tensor(heads[0]), tensor(heads[1]), tensor(heads[1])
    angles = torch.rand(n, 8, device=device)
    options = {
        "plain": {}, "window": {"window_size": (40, 0)}, "softcap": {"softcap": 3.0},
        "rotary": {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)},
        "sinks": {"sinks": torch.linspace(-2, 4, heads[0], device=device)},
    }[features]  # fmt: skip
    out, lse = decoded(q, k, v, n, 0, **options)
    for chunk, page_size in ((1, 0), (1, 16), (7, 0), (64, 17), (65, 0), (n, 16)):
        part = decoded(q, k, v, chunk, page_size, **options)
        assert torch.equal(part[0], out) and torch.equal(part[1], lse), f"chunks of {chunk}, page size {page_size}"


def test_the_layout_of_the_cache_does_not_matter(device):
    torch.manual_seed(11)
    problem = make_problem(KvCase(LENGTHS, 2, None, 1200, causal=True), device)
    out, lse = invariant(problem)
    for layout in ("permuted", "heads_first", "sliced", "unaligned"):
        other = make_problem(KvCase(LENGTHS, 2, None, 1200, causal=True, layout=layout), device)
        other.q, other.rows = problem.q, problem.rows
        other.k_cache.copy_(problem.k_cache)
        other.v_cache.copy_(problem.v_cache)
        result = invariant(other)
        assert torch.equal(result[0], out) and torch.equal(result[1], lse)
