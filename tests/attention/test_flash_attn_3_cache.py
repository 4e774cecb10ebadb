"""FlashAttention-3's module over KV caches: packed queries in pages and rows, batches, new keys."""

from __future__ import annotations

import pytest
import torch
from flash_attn_3_harness import OPS, by_sequence, cache_problem, fa3
from reference import assert_accurate

import flash_attn
from flash_attn.ops import latent


@pytest.mark.parametrize("value_dim", (32, 16))
@pytest.mark.parametrize("sinks", (None, (0.5, -1.0, 3.0, 0.0)))
@pytest.mark.parametrize("form", ("pages", "rows", "rows by index"))
def test_packed_queries_over_a_cache(device, form, sinks, value_dim):
    """Prefill and decode in one call: FlashAttention-3's cu_seqlens_q with page_table, and with a cache in rows."""
    q, k, v, table, cu, lengths = cache_problem(device, value_dim)
    sinks = None if sinks is None else torch.tensor(sinks, device=device)
    (exact, exact_lse), (plain, plain_lse) = by_sequence(q, k, v, table, cu, lengths, sinks)
    where = {"page_table": table}
    if form != "pages":
        k, v = (x[table.long()].flatten(1, 2) for x in (k, v))
        where = {}
    if form == "rows by index":
        index = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
        k, v = (torch.empty_like(x).index_copy(0, index.long(), x) for x in (k, v))
        where = {"cache_batch_idx": index}
    options = {
        "cache_seqlens": lengths,
        "cu_seqlens_q": cu,
        "max_seqlen_q": 12,
        "causal": True,
        "sinks": sinks,
        **where,
    }
    out, lse, *scratch = fa3.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    assert_accurate(out, exact, plain, "out")
    assert_accurate(lse, exact_lse, plain_lse, "lse")
    assert [x.shape for x in scratch] == [(0,), (0,)]
    given = torch.empty_like(out)
    assert fa3.flash_attn_with_kvcache(q, k, v, out=given, **options) is given
    assert torch.equal(given, out)
    if sinks is None:
        options = (None, None, None, None, cu, None, None, None, lengths, 12, None, where.get("page_table"))
        result = OPS.fwd(q, k, v, *options, where.get("cache_batch_idx"), is_causal=True)
        assert torch.equal(result[0], out) and torch.equal(result[1], lse)


def test_batches_over_a_cache(device):
    """The same rows as a batch: flash_attn's own KV cache function, and with sinks or a length for all."""
    q, k, v, table, *_, lengths = cache_problem(device)
    q = q[:9].view(3, 3, 4, 32)
    options = {"cache_seqlens": lengths, "causal": True}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, page_table=table, return_softmax_lse=True, **options)
    expected, expected_lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, block_table=table, return_softmax_lse=True, **options
    )
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    arguments = (None, None, None, None, None, None, None, None, lengths, None, None, table)
    result = OPS.fwd(q, k, v, *arguments, is_causal=True)
    assert torch.equal(result[0], out) and torch.equal(result[1], lse)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    sunk, sunk_lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, page_table=table, return_softmax_lse=True, learnable_sink=sinks, **options
    )
    expected, expected_lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, block_table=table, return_softmax_lse=True, sinks=sinks, **options
    )
    assert torch.equal(sunk, expected) and torch.equal(sunk_lse, expected_lse) and not torch.equal(sunk, out)
    packed, packed_lse, *_ = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), k, v, page_table=table, return_softmax_lse=True, s_aux=sinks, **options,
        cu_seqlens_q=torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=device),
    )  # fmt: skip
    assert torch.allclose(packed.view_as(sunk).float(), sunk.float(), atol=2e-2)
    assert torch.allclose(packed_lse.view(4, 3, 3).transpose(0, 1), sunk_lse, atol=1e-4)
    one, one_lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, page_table=table, causal=True, cache_seqlens=20, sinks=sinks, return_softmax_lse=True
    )
    same, same_lse = flash_attn.flash_attn_with_kvcache(
        q, k, v, block_table=table, causal=True, cache_seqlens=20, sinks=sinks, return_softmax_lse=True
    )
    assert torch.equal(one, same) and torch.equal(one_lse, same_lse)


@pytest.mark.parametrize("name", ("sinks", "s_aux", "learnable_sink"))
def test_new_keys_with_sinks(device, name):
    """Decoding with sinks: the cache receives the new rows, and the sink is one more key."""
    q, k_cache, v_cache, table, _, lengths = cache_problem(device)
    q, new = q[:3, None], [torch.randn(3, 1, 2, 32, device=device, dtype=torch.bfloat16) for _ in "kv"]
    lengths = lengths - torch.tensor([1, 1, 20], dtype=torch.int32, device=device)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=device)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=lengths, page_table=table, causal=True, return_softmax_lse=True,
        **{name: sinks},
    )  # fmt: skip
    cu = torch.arange(4, dtype=torch.int32, device=device)
    (exact, exact_lse), (plain, plain_lse) = by_sequence(q[:, 0], k_cache, v_cache, table, cu, lengths + 1, sinks)
    assert_accurate(out[:, 0], exact, plain, "out")
    assert_accurate(lse[:, :, 0].T, exact_lse, plain_lse, "lse")
    with pytest.raises(TypeError, match="^s_aux: expected None, for sinks is given"):
        fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, *new, cache_seqlens=lengths, page_table=table, sinks=sinks, s_aux=sinks.clone()
        )  # fmt: skip


def test_rows_without_keys_have_the_sink(device):
    """A cache without keys: LSE the sink; an inactive request: -inf."""
    q, k, v, table, *_ = cache_problem(device)
    sinks = torch.tensor([0.5, -1.0, 3.0, -float("inf")], device=device)
    lengths = torch.tensor([0, -1, 20], dtype=torch.int32, device=device)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q[:3, None], k, v, cache_seqlens=lengths, page_table=table, return_softmax_lse=True, s_aux=sinks
    )
    assert (out[:2] == 0).all() and torch.equal(lse[0, :, 0], sinks) and torch.isneginf(lse[1]).all()
    assert torch.isfinite(lse[2]).all() and (out[2] != 0).any()


@pytest.mark.parametrize("through", ("function", "operator"))
def test_new_keys_are_appended(device, through):
    q = torch.randn(2, 3, 4, 32, device=device, dtype=torch.bfloat16)
    caches = [torch.randn(2, 40, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    copies = [x.clone() for x in caches]
    new = [torch.randn(2, 3, 2, 32, device=device, dtype=torch.bfloat16) for _ in range(2)]
    angles = [torch.randn(40, 8, device=device, dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.tensor([11, 37], dtype=torch.int32, device=device)
    options = {"cache_seqlens": lengths, "causal": True, "rotary_interleaved": True}
    expected = flash_attn.flash_attn_with_kvcache(
        q, *copies, *new, *angles, return_softmax_lse=True, **options
    )  # fmt: skip
    versions = [x._version for x in caches]
    if through == "function":
        result = fa3.flash_attn_with_kvcache(q, *caches, *new, None, *angles, return_softmax_lse=True, **options)
    else:
        middle = [None] * 5 + [lengths, None, None, None, None, None]
        result = OPS.fwd(q, *caches, *new, None, *middle, *angles, is_causal=True, is_rotary_interleaved=True)
    assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
    assert all(map(torch.equal, caches, copies))
    assert all(x._version > version for x, version in zip(caches, versions))
    with pytest.raises(NotImplementedError, match="^cu_seqlens_q: expected None with new keys"):
        cu = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
        fa3.flash_attn_with_kvcache(q.flatten(0, 1), *caches, *new, cu_seqlens_q=cu, cache_seqlens=lengths)


def test_queries_of_the_values(device):
    """qv, in batches and packed."""
    head_dim, value_dim = latent.KERNEL_DIMS
    q, k, v, table, cu, lengths = cache_problem(device, value_dim, head_dim=head_dim, nheads_k=1)
    qv = torch.randn(18, 4, value_dim, device=device, dtype=torch.bfloat16)
    options = {"cache_seqlens": lengths, "causal": True}
    batch = q[:9].view(3, 3, 4, head_dim), qv[:9].view(3, 3, 4, value_dim)
    out = fa3.flash_attn_with_kvcache(batch[0], k, v, qv=batch[1], page_table=table, **options)
    expected = flash_attn.flash_attn_with_kvcache(batch[0], k, v, qv=batch[1], block_table=table, **options)
    assert torch.equal(out, expected)
    packed = fa3.flash_attn_with_kvcache(q, k, v, qv=qv, page_table=table, cu_seqlens_q=cu, **options)
    whole = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    (exact, _), (plain, _) = by_sequence(*whole, v, table, cu, lengths)
    assert_accurate(packed, exact, plain, "out")
