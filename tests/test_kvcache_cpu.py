"""flash_attn_with_kvcache on CPU tensors: append, rotary, pages, lengths, and refusals."""

from __future__ import annotations

import pytest
import torch
from reference import assert_accurate, attention

from flash_attn import flash_attn_with_kvcache

DTYPE = torch.bfloat16
B, H, HK, D, CAPACITY = 4, 4, 2, 32, 96
NAN = float("nan")
LENGTHS = [40, 0, 96 - 5, 17]


@pytest.fixture
def device():
    return "cpu"


def normal(*shape):
    return torch.randn(*shape).to(DTYPE)


def make_cache(lengths, page_size=0, extra_rows=2):
    """A cache whose rows beyond the lengths are NaN -> (k, v, cache_batch_idx, block_table)."""
    if page_size == 0:
        k, v = (torch.full((len(lengths) + extra_rows, CAPACITY, HK, D), NAN, dtype=DTYPE) for _ in "kv")
        index = torch.randperm(len(k))[: len(lengths)].int()
        for row, n in zip(index.tolist(), lengths):
            k[row, : max(n, 0)], v[row, : max(n, 0)] = normal(max(n, 0), HK, D), normal(max(n, 0), HK, D)
        return k, v, index, None
    per_sequence = -(-CAPACITY // page_size)
    pool = torch.randperm(len(lengths) * per_sequence + extra_rows)
    table = pool[: len(lengths) * per_sequence].view(len(lengths), per_sequence).int()
    k, v = (torch.full((len(pool), page_size, HK, D), NAN, dtype=DTYPE) for _ in "kv")
    for row, n in zip(table, lengths):
        for j in range(max(n, 0)):
            page, slot = row[j // page_size], j % page_size
            k[page, slot], v[page, slot] = normal(HK, D), normal(HK, D)
    return k, v, None, table


def rows_of(cache, i, index, table, n):
    if table is None:
        return cache[i if index is None else index[i], :n]
    return cache[table[i].long()].flatten(0, 1)[:n]


def rotated(x, cos, sin, positions, interleaved):
    """Rotary embedding of x (rows, heads, d) in float64 by complex multiplication."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    x, rest = x.double()[..., : 2 * half], x.double()[..., 2 * half :]
    pairs = torch.stack([x[..., 0::2], x[..., 1::2]], -1) if interleaved else torch.stack(x.split(half, -1), -1)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    both = turned.flatten(-2) if interleaved else torch.cat([turned[..., 0], turned[..., 1]], -1)
    return torch.cat([both, rest], -1)


def check(out, lse, i, q, k, v, **options):
    reference, plain = attention(q, k, v, **options), attention(q, k, v, **options, dtype=DTYPE)
    assert_accurate(out[i : i + 1], reference.out, plain.out)
    assert_accurate(lse[i : i + 1], reference.lse, plain.lse, "lse")


@pytest.mark.parametrize("page_size", (0, 1, 7, 16))
@pytest.mark.parametrize("seqlen_q", (1, 3, 5))
@pytest.mark.parametrize("features", ({}, {"causal": True}, {"window_size": (20, 0)}, {"softcap": 4.0, "causal": True}),
                         ids=str)  # fmt: skip
def test_append_and_attend(page_size, seqlen_q, features):
    k_cache, v_cache, index, table = make_cache(LENGTHS, page_size)
    q, k, v = normal(B, seqlen_q, H, D), normal(B, 5, HK, D), normal(B, 5, HK, D)
    before_k, before_v = k_cache.clone(), v_cache.clone()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_batch_idx=index,
                                       block_table=table, return_softmax_lse=True, **features)  # fmt: skip
    options = {("window" if name == "window_size" else name): value for name, value in features.items()}
    for i, n in enumerate(LENGTHS):
        keys, values = (rows_of(x, i, index, table, n + 5) for x in (k_cache, v_cache))
        assert torch.equal(keys[n:], k[i]) and torch.equal(values[n:], v[i])
        assert torch.equal(keys[:n], rows_of(before_k, i, index, table, n))
        check(out, lse, i, q[i : i + 1], keys[None], values[None], **options)
    for after, before in ((k_cache, before_k), (v_cache, before_v)):
        assert after.isnan().sum() == before.isnan().sum() - B * 5 * HK * D, "rows beside the new ones were written"


@pytest.mark.parametrize("page_size", (0, 16))
@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("rotary_dim", (16, 32))
@pytest.mark.parametrize("causal", (False, True))
def test_rotary(page_size, interleaved, rotary_dim, causal):
    k_cache, v_cache, index, table = make_cache(LENGTHS, page_size)
    q, k, v = normal(B, 3, H, D), normal(B, 5, HK, D), normal(B, 5, HK, D)
    angles = torch.rand(CAPACITY + 8, rotary_dim // 2) * 6
    cos, sin = angles.cos().to(DTYPE), angles.sin().to(DTYPE)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=torch.tensor(LENGTHS).int(),
        cache_batch_idx=index, block_table=table, causal=causal, rotary_interleaved=interleaved,
        return_softmax_lse=True,
    )  # fmt: skip
    for i, n in enumerate(LENGTHS):
        keys, values = (rows_of(x, i, index, table, n + 5) for x in (k_cache, v_cache))
        new = rotated(k[i], cos, sin, torch.arange(n, n + 5), interleaved)
        assert torch.equal(keys[n:], new.to(DTYPE)) or (keys[n:].double() - new).abs().max() <= 2**-8 * new.abs().max()
        positions = torch.arange(n, n + 3) if causal else torch.full((3,), n)
        queries = rotated(q[i], cos, sin, positions, interleaved).to(DTYPE)[None]
        check(out, lse, i, queries, keys[None], values[None], causal=causal)


@pytest.mark.parametrize("page_size", (0, 16))
def test_lengths_zero_full_and_skipped(page_size):
    """0: nothing seen; capacity: all rows; -1: neither read nor written, also with an invalid table row."""
    lengths = [0, CAPACITY, -1, 50]
    k_cache, v_cache, index, table = make_cache(lengths, page_size)
    if table is not None:
        table[2] = -1
    q, k, v = normal(B, 2, H, D), normal(B, 0, HK, D), normal(B, 0, HK, D)
    for new in ((None, None), (k, v)):
        before = k_cache.clone()
        out, lse = flash_attn_with_kvcache(
            q, k_cache, v_cache, *new, cache_seqlens=torch.tensor(lengths).int(), cache_batch_idx=index,
            block_table=table, return_softmax_lse=True,
        )  # fmt: skip
        assert torch.equal(k_cache.nan_to_num(7), before.nan_to_num(7))
        for i in (0, 2):
            assert (out[i] == 0).all() and torch.isposinf(lse[i]).all()
        for i in (1, 3):
            keys, values = (rows_of(x, i, index, table, lengths[i]) for x in (k_cache, v_cache))
            check(out, lse, i, q[i : i + 1], keys[None], values[None])


@pytest.mark.parametrize("page_size", (0, 16))
def test_skipped_entry_with_new_keys_is_not_written(page_size):
    lengths = [10, -1, 20, -1]
    k_cache, v_cache, index, table = make_cache(lengths, page_size)
    if table is not None:
        table[1] = table[3] = -1
    before = k_cache.isnan().sum()
    out = flash_attn_with_kvcache(normal(B, 1, H, D), k_cache, v_cache, normal(B, 1, HK, D), normal(B, 1, HK, D),
                                  cache_seqlens=torch.tensor(lengths).int(), cache_batch_idx=index,
                                  block_table=table)  # fmt: skip
    assert k_cache.isnan().sum() == before - 2 * HK * D
    assert (out[1] == 0).all() and (out[3] == 0).all() and torch.isfinite(out).all()


def test_lengths_as_int_and_default():
    k_cache, v_cache, _, _ = make_cache([CAPACITY] * B, extra_rows=0)
    q = normal(B, 2, H, D)
    as_int = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=33)
    as_tensor = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.full((B,), 33, dtype=torch.int32))
    as_long = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.full((B,), 33))
    assert torch.equal(as_int, as_tensor) and torch.equal(as_int, as_long)
    whole = flash_attn_with_kvcache(q, k_cache, v_cache)
    assert torch.equal(whole, flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=CAPACITY))


@pytest.mark.parametrize("page_size", (0, 16))
def test_left_padding(page_size):
    k_cache, v_cache, index, table = make_cache(LENGTHS, page_size)
    leftpad = [3, 0, 90, 17]
    q = normal(B, 2, H, D)
    for i, pad in enumerate(leftpad):
        if table is None:
            k_cache[index[i], : min(pad, LENGTHS[i])] = NAN
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS).int(),
                                       cache_batch_idx=index, block_table=table, causal=True,
                                       cache_leftpad=torch.tensor(leftpad).int(), return_softmax_lse=True)  # fmt: skip
    for i, (n, pad) in enumerate(zip(LENGTHS, leftpad)):
        keys, values = (rows_of(x, i, index, table, n)[pad:] for x in (k_cache, v_cache))
        check(out, lse, i, q[i : i + 1], keys[None], values[None], causal=True)


def test_permuted_cache_views_are_written_in_place():
    """megatron and mamba-ssm pass caches stored (seqlen, batch, heads, dim)."""
    store_k, store_v = torch.zeros(CAPACITY, B, HK, D, dtype=DTYPE), torch.zeros(CAPACITY, B, HK, D, dtype=DTYPE)
    k, v = normal(B, 2, HK, D), normal(B, 2, HK, D)
    flash_attn_with_kvcache(normal(B, 2, H, D), store_k.transpose(0, 1), store_v.transpose(0, 1), k, v, cache_seqlens=9)
    assert torch.equal(store_k[9:11].transpose(0, 1), k) and torch.equal(store_v[9:11].transpose(0, 1), v)
    assert store_k.count_nonzero() == k.count_nonzero()


def test_num_splits_does_not_change_the_result():
    k_cache, v_cache, index, _ = make_cache(LENGTHS)
    q, lengths = normal(B, 1, H, D), torch.tensor(LENGTHS).int()
    outs = [flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, cache_batch_idx=index, num_splits=n)
            for n in (0, 1, 5)]  # fmt: skip
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize("page_size", (0, 16))
def test_append_beyond_the_capacity_is_refused_and_writes_nothing(page_size):
    lengths = [10, CAPACITY - 1, 5, 0]
    k_cache, v_cache, index, table = make_cache(lengths, page_size)
    before = k_cache.clone()
    with pytest.raises(RuntimeError, match=r"seqlens.*: expected .*at most 96.*got 95 \+ 2"):
        flash_attn_with_kvcache(normal(B, 2, H, D), k_cache, v_cache, normal(B, 2, HK, D), normal(B, 2, HK, D),
                                cache_seqlens=torch.tensor(lengths).int(), cache_batch_idx=index,
                                block_table=table)  # fmt: skip
    assert torch.equal(k_cache.nan_to_num(7), before.nan_to_num(7))


def test_refusals_name_the_argument():
    k_cache, v_cache, _, _ = make_cache([50] * B, extra_rows=0)
    q, k, lengths = normal(B, 1, H, D), normal(B, 1, HK, D), torch.full((B,), 50, dtype=torch.int32)
    cos = normal(CAPACITY, 8)
    bad = [
        ("v: expected", {"k": k, "cache_seqlens": lengths}),
        (".*seqlens.*: expected", {"k": k, "v": k}),
        ("k: expected shape", {"k": k[:, :, :1], "v": k[:, :, :1], "cache_seqlens": lengths}),
        ("rotary_sin: expected", {"k": k, "v": k, "cache_seqlens": lengths, "rotary_cos": cos}),
        ("k: expected", {"cache_seqlens": lengths, "rotary_cos": cos, "rotary_sin": cos}),
        (
            "rotary_cos: expected at least 51 rows, got 50",
            {"k": k, "v": k, "cache_seqlens": lengths, "rotary_cos": cos[:50], "rotary_sin": cos[:50]},
        ),
        ("cache_batch_idx: expected entries in", {"cache_batch_idx": torch.tensor([0, 1, 2, 4]).int()}),
        (".*seqlens.*: expected shape", {"cache_seqlens": lengths[:2]}),
    ]
    before = k_cache.clone()
    for message, arguments in bad:
        with pytest.raises(RuntimeError, match="^" + message):
            flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    assert torch.equal(k_cache.nan_to_num(7), before.nan_to_num(7))


def test_messages_use_the_public_names():
    """The function's own parameter names, not those of the backend."""
    k_cache, v_cache, _, _ = make_cache([50] * B, extra_rows=0)
    q = normal(B, 1, H, D)
    for name, arguments in (("k_cache", {"k_cache": k_cache.half()}), ("v_cache", {"v_cache": v_cache[:, 1:]}),
                            ("cache_seqlens", {"cache_seqlens": torch.zeros(2, dtype=torch.int32)}),
                            ("cache_leftpad", {"cache_leftpad": torch.zeros(2, dtype=torch.int32)})):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^{name}: expected"):
            flash_attn_with_kvcache(**{"q": q, "k_cache": k_cache, "v_cache": v_cache, **arguments})
