"""Decoding over a KV cache that is divided among ranks, against one cache: shards, masks, pages."""

import pytest
import torch

from flash_attn import flash_attn_with_kvcache
from flash_attn.context_parallel import CpCache, LocalGroup, flash_attn_cp_kvcache

BATCH, CAPACITY, HEADS, HEADS_K, DIM = 5, 50, 4, 2, 16
LENGTHS = (50, 1, 0, 37, -1)  # a full cache, fewer keys than ranks, no key, an inactive request


def problem(device, seqlen_q):
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    q = torch.randn(BATCH, seqlen_q, HEADS, DIM, device=device, dtype=dtype)
    k, v = (torch.randn(BATCH, CAPACITY, HEADS_K, DIM, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, torch.tensor(LENGTHS, dtype=torch.int32, device=device)


def shard(shards, cache, lengths, rows):
    """This rank's rows of a cache; rows without a position are NaN."""
    own = torch.full((BATCH, rows, *cache.shape[2:]), float("nan"), device=cache.device, dtype=cache.dtype)
    for entry, length in enumerate(lengths.tolist()):
        targets = shards.rows(torch.arange(max(0, length), device=cache.device))
        is_own = targets >= 0
        assert int(is_own.sum()) == max(0, shards.local_lengths(length))
        own[entry, targets[is_own]] = cache[entry, : max(0, length)][is_own]
    return own


def paged(cache, page):
    """(pages, block table) of a cache (batch, rows, ...), the pages in reverse order."""
    pages = cache.unflatten(1, (-1, page)).flatten(0, 1).flip(0).contiguous()
    table = torch.arange(pages.shape[0], dtype=torch.int32, device=cache.device).flip(0).view(BATCH, -1).contiguous()
    return pages, table


def close(ours, theirs, device):
    tolerance = 1e-12 if device == "cpu" else 2e-2
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


SHARDS = [(1, 1, 0), (3, 1, 0), (4, 4, 4), (2, 25, 0), (3, 2, 6), (2, 64, 0)]
MASKS = [
    {}, {"causal": True}, {"causal": True, "window_size": (6, -1)}, {"window_size": (9, 1)}, {"window_size": (-1, 2)},
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("ranks, interleave, page", SHARDS)
def test_results_equal_those_of_one_cache(device, mask, seqlen_q, ranks, interleave, page):
    q, k, v, lengths = problem(device, seqlen_q)
    sinks = torch.randn(HEADS, device=device)
    options = {**mask, "softcap": 9.0, "sinks": sinks, "return_softmax_lse": True}
    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)
    rows = 64 if interleave == 64 else 48 if page else 52

    def run(rank):
        shards = CpCache(group=rank, interleave=interleave)
        keys, values, table = shard(shards, k, lengths, rows), shard(shards, v, lengths, rows), None
        if page:
            (keys, table), (values, _) = paged(keys, page), paged(values, page)
        return flash_attn_cp_kvcache(q, keys, values, lengths, block_table=table, shards=shards, **options)

    results = LocalGroup(ranks).run(run)
    for out, lse in results:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
        close(out, expected[0], device)
        close(lse, expected[1], device)


@pytest.mark.parametrize("convention", ["fa3", "flashinfer"])
def test_conventions_and_rows_of_the_cache(device, convention):
    """An int as length, cache_batch_idx with several queries, LSE conventions of other libraries."""
    q, k, v, _ = problem(device, 2)
    index = torch.tensor([3, 0, 4, 4, 1], dtype=torch.int32, device=device)
    options = {"causal": True, "return_softmax_lse": True, "lse_convention": convention, "cache_batch_idx": index}
    expected = flash_attn_with_kvcache(q, k, v, cache_seqlens=20, **options)

    def run(rank):
        shards = CpCache(group=rank, interleave=3)
        own = [shard(shards, x, torch.full((BATCH,), 20), 12) for x in (k, v)]
        return flash_attn_cp_kvcache(q, *own, 20, shards=shards, **options)

    for found in LocalGroup(2).run(run):
        for ours, theirs in zip(found, expected):
            close(ours, theirs, device)


@pytest.mark.parametrize("interleave", [1, 3, 16])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_position_has_one_row(interleave, size):
    """Rows of a rank have no gaps and the order of positions."""
    positions = torch.arange(100)

    def run(rank):
        shards = CpCache(group=rank, interleave=interleave)
        rows = shards.rows(positions)
        counts = torch.tensor([shards.local_lengths(n) for n in range(100)])
        assert torch.equal(counts, shards.local_lengths(positions))
        own = rows[rows >= 0]
        assert torch.equal(own, torch.arange(len(own))) and torch.equal(own, counts[rows >= 0])
        assert shards.local_lengths(-1) == -1 and shards.rows(torch.tensor([-1])).item() == -1
        return rows >= 0

    assert torch.equal(torch.stack(LocalGroup(size).run(run)).sum(0), torch.ones(100, dtype=torch.int64))


BAD = [
    ({"cache_seqlens": -2}, "cache_seqlens: expected a value >= -1"),
    ({"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, r"cache_seqlens: expected shape \[5\]"),
    ({"cache_seqlens": 151}, "cache_seqlens: expected lengths of which no rank has more than its 50 rows, got 151"),
    ({"cache_seqlens": torch.full((5,), 151)}, "cache_seqlens: expected lengths of which no rank has more than its 50"),
    ({"window_size": 3}, "window_size: expected a pair"),
    ({"lse_convention": "fa4"}, "lse_convention: expected one of"),
    ({"softcap": -1.0}, "softcap: expected a value >= 0"),
    ({"q": torch.zeros(5, 1, 4, 8)}, "k_cache"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(i) for i in range(len(BAD))])
def test_bad_calls_raise_on_all_ranks(bad, message):
    """Errors on one rank, also if only its cache is too small, and on all."""
    q, k, v, _ = problem("cpu", 1)

    def run(rank, everywhere):
        shards = CpCache(group=rank)
        call = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": 3, "shards": shards}
        own = everywhere or rank.rank == 1
        expected = message if own else r"flash_attn_cp_kvcache: expected valid arguments .* \[1\]"
        with pytest.raises((RuntimeError, TypeError, ValueError), match=expected):
            flash_attn_cp_kvcache(**{**call, **(bad if own else {})})
        return flash_attn_cp_kvcache(**call).shape == q.shape

    for everywhere in (False, True):
        assert LocalGroup(3).run(lambda rank, e=everywhere: run(rank, e)) == [True] * 3


@pytest.mark.devices("cuda")
def test_a_length_beyond_the_rows_is_inactive_on_all_ranks(device):
    """If it were inactive on one rank only, the others would give a part of the result."""
    q, k, v, lengths = problem(device, 1)
    lengths = lengths.clamp(min=1, max=20)
    lengths[1] = 101  # 51 on rank 0, 50 on rank 1

    def run(rank):
        return flash_attn_cp_kvcache(q, k, v, lengths, return_softmax_lse=True, shards=CpCache(group=rank))

    for out, lse in LocalGroup(2).run(run):
        assert out[1].abs().sum() == 0 and (lse[1] == float("inf")).all() and lse[0].isfinite().all()


def test_different_caches_and_calls_raise_on_all_ranks():
    q, k, v, _ = problem("cpu", 2)

    def run(rank):
        with pytest.raises(RuntimeError, match="CpCache: expected the same on every rank"):
            CpCache(group=rank, interleave=1 + rank.rank)
        with pytest.raises(RuntimeError, match="interleave: expected a value >= 1"):
            CpCache(group=rank, interleave=0)
        shards = CpCache(group=rank)
        with pytest.raises(RuntimeError, match="flash_attn_cp_kvcache: expected the same on every rank"):
            flash_attn_cp_kvcache(q, k, v, 3, causal=rank.rank == 0, shards=shards)
        with pytest.raises(TypeError, match="shards: expected a CpCache, got None"):
            flash_attn_cp_kvcache(q, k, v, 3, shards=None)
        return True

    assert LocalGroup(2).run(run) == [True] * 2
