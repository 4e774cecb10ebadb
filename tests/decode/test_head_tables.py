"""flash_attn_with_kvcache with a block_table for each K/V head, as block-sparse attention selects pages."""

from __future__ import annotations

import pytest
import torch
from kvcache_harness import NO_PAGE, allocate
from reference import assert_accurate, attention

from flash_attn import KvCachePlan, flash_attn_with_kvcache
from flash_attn.ops import latent


class HeadTables:
    """A call in which each K/V head has separate pages and lengths. Rows that hold no key are NaN."""

    def __init__(self, device, page_size=16, layout="contiguous", seqlen_q=1, heads=(6, 3), dims=(64, 0)):
        (nheads, nheads_k), (head_dim, head_dim_v) = heads, dims
        self.lengths = torch.tensor([[40, 7, 33], [64, 0, 17]], dtype=torch.int32, device=device)[:, :nheads_k]
        slots = -(-64 // page_size)
        pages = 2 * nheads_k * slots + 3
        self.q, qv = (torch.randn(2, seqlen_q, nheads, dim, device=device).bfloat16() for dim in (head_dim, head_dim_v))
        self.qv = qv if head_dim_v else None
        self.table = torch.randperm(pages)[: 2 * nheads_k * slots].view(2, nheads_k, slots).int().to(device)
        self.k_cache, self.v_cache = (
            allocate(layout, (pages, page_size, nheads_k, dim), torch.bfloat16, device)
            for dim in (head_dim, head_dim_v or head_dim)
        )
        position = torch.arange(64, device=device)
        self.keys = {}
        for i in range(2):
            for head in range(nheads_k):
                at = position[: self.lengths[i, head]]
                page = self.table[i, head].long()[at // page_size]
                for cache in (self.k_cache, self.v_cache):
                    cache[page, at % page_size, head] = torch.randn(len(at), cache.shape[3], device=device).bfloat16()
                self.keys[i, head] = [cache[page, at % page_size, head] for cache in (self.k_cache, self.v_cache)]
                unused = self.table[i, head, -(-len(at) // page_size) :]
                unused[0::2], unused[1::2] = NO_PAGE

    def run(self, **options):
        options = {"block_table": self.table, "cache_seqlens": self.lengths, "qv": self.qv, **options}
        return flash_attn_with_kvcache(self.q, self.k_cache, self.v_cache, return_softmax_lse=True, **options)

    def check(self, out, lse, slopes=None, **options):
        group = self.q.shape[2] // self.k_cache.shape[2]
        for (i, head), (keys, values) in self.keys.items():
            heads = slice(head * group, (head + 1) * group)
            queries = self.q[i : i + 1, :, heads]
            if self.qv is not None:
                queries, keys = torch.cat([queries, self.qv[i : i + 1, :, heads]], -1), torch.cat([keys, values], -1)
            operands = (queries, keys[None, :, None], values[None, :, None])
            options["alibi_slopes"] = None if slopes is None else slopes[heads]
            reference, plain = attention(*operands, **options), attention(*operands, **options, dtype=torch.bfloat16)
            assert_accurate(out[i : i + 1, :, heads], reference.out, plain.out, f"out of {i}, {head}")
            assert_accurate(lse[i : i + 1, heads], reference.lse, plain.lse, f"lse of {i}, {head}")


@pytest.mark.parametrize("seqlen_q", (1, 3))
@pytest.mark.parametrize(
    "page_size,layout", ((1, "contiguous"), (16, "contiguous"), (16, "heads_first"), (16, "permuted"), (7, "sliced"))
)
def test_a_table_for_each_head(device, page_size, layout, seqlen_q):
    call = HeadTables(device, page_size, layout, seqlen_q)
    slopes = torch.rand(6, device=device)
    for options in ({"causal": True}, {"causal": True, "num_splits": 3, "batch_invariant": True}):
        call.check(*call.run(alibi_slopes=slopes, **options), slopes, causal=True)
    out = torch.empty_like(call.q)
    assert call.run(out=out, window_size=(9, 0))[0] is out
    call.check(*call.run(window_size=(9, 0)), window=(9, 0))


def test_a_table_for_each_head_with_many_queries(device):
    call = HeadTables(device, 32, seqlen_q=100)
    call.check(*call.run(causal=True), causal=True)


@pytest.mark.parametrize("heads", ((4, 1), (3, 3)))
def test_tables_of_single_heads_and_lengths_of_sequences(device, heads):
    """One head: what a table for each sequence gives, to the last bit. Padding requests take no part."""
    call = HeadTables(device, heads=heads)
    call.check(*call.run())
    if heads[1] == 1:
        expected = call.run(block_table=call.table[:, 0], cache_seqlens=call.lengths[:, 0])
        for lengths in (call.lengths[:, 0], call.lengths):
            assert all(torch.equal(a, b) for a, b in zip(call.run(cache_seqlens=lengths), expected))
    call.lengths[1] = -1
    out, lse = call.run()
    assert (out[1] == 0).all() and (lse[1] == float("inf")).all()


@pytest.mark.parametrize("eight_bit", (False, True))
def test_a_table_for_each_head_equals_calls_of_single_heads(device, eight_bit):
    """To the last bit where rows do not depend on the batch: lengths, padding, slopes and descales of each."""
    call = HeadTables(device, seqlen_q=2)
    of_heads = {"cache_leftpad": torch.tensor([[3, 7, 0], [64, 0, 9]], dtype=torch.int32, device=device)}
    if eight_bit:
        call.k_cache, call.v_cache = (x.to(torch.float8_e4m3fn) for x in (call.k_cache, call.v_cache))
        of_heads.update({f"{name}_descale": torch.rand(2, 3, device=device) + 0.5 for name in "kv"})
    options = {"causal": True, "batch_invariant": True}
    slopes = torch.rand(2, 6, device=device)
    out, lse = call.run(alibi_slopes=slopes, **of_heads, **options)
    for head in range(3):
        at, group = slice(head, head + 1), slice(2 * head, 2 * head + 2)
        own = {name: x[:, head] if name == "cache_leftpad" else x[:, at] for name, x in of_heads.items()}
        expected = flash_attn_with_kvcache(
            call.q[:, :, group], call.k_cache[:, :, at], call.v_cache[:, :, at], block_table=call.table[:, head],
            cache_seqlens=call.lengths[:, head], alibi_slopes=slopes[:, group], return_softmax_lse=True, **own,
            **options,
        )  # fmt: skip
        assert torch.equal(out[:, :, group], expected[0]) and torch.equal(lse[:, group], expected[1])


def test_no_sequences(device):
    call = HeadTables(device)
    none = {"block_table": call.table[:0], "cache_seqlens": call.lengths[:0, 0]}
    out, lse = flash_attn_with_kvcache(call.q[:0], call.k_cache, call.v_cache, return_softmax_lse=True, **none)
    assert out.shape == (0, 1, 6, 64) and lse.shape == (0, 6, 1)


@pytest.mark.devices("cpu")
def test_a_page_that_does_not_exist(device):
    call = HeadTables(device)
    call.table[0, 1, 0] = 99
    with pytest.raises(RuntimeError, match=rf"^block_table: expected entries in \[0, {len(call.k_cache)}\)"):
        call.run()


def test_a_table_for_each_head_with_qv(device):
    for dims in (latent.KERNEL_DIMS, (0, 24))[: 1 if device == "cuda" else 2]:  # CUDA has kernels for the first
        call = HeadTables(device, heads=(12, 3), dims=dims, seqlen_q=2)
        call.check(*call.run(causal=True), causal=True)


def test_a_plan_for_a_table_of_each_head(device):
    call = HeadTables(device)
    slots = call.table.shape[2] * call.k_cache.shape[1]
    call.check(*call.run(plan=KvCachePlan(call.lengths.flatten(), 1, 2, 1, 64, slots)))


def test_what_a_table_for_each_head_excludes(device):
    call = HeadTables(device)
    new = torch.zeros(2, 1, 3, 64, device=device, dtype=torch.bfloat16)
    per_row = torch.ones(*call.k_cache.shape[:3], device=device)
    for name, value in (
        ("k", new), ("sinks", torch.zeros(6, device=device)), ("v_descale_axis", "channel"),
        ("cache_batch_idx", call.lengths[:, 0]), ("rotary_cos", new),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"^{name}: expected None with a block_table of each K/V head"):
            call.run(**{name: value})
    with pytest.raises(
        NotImplementedError, match=r"^k_descale: expected a number or shape \[2, 3\] with a block_table"
    ):
        call.run(k_descale=per_row)
    with pytest.raises(TypeError, match="^qv: expected a Tensor, got int"):
        call.run(qv=1)
    for name, value, message in (
        ("alibi_slopes", torch.zeros(5, device=device), r"expected shape \[2, 6\], got \[5\]"),
        ("cache_leftpad", call.lengths.flatten(), r"expected shape \[2\] or \[2, 3\], got \[6\]"),
        ("qv", call.q[..., :8], r"expected shape \[2, 1, 6, 64\], got \[2, 1, 6, 8\]"),
        ("block_table", call.table[:, :2], r"expected shape \[2, 3, max_blocks\], got \[2, 2, 4\]"),
        ("cache_seqlens", call.lengths[:1], r"expected shape \[2\] or \[2, 3\], got \[1, 3\]"),
        ("out", call.q[:, :, :3], r"expected shape \[2, 1, 6, 64\], got \[2, 1, 3, 64\]"),
        ("out", call.q, "expected memory that does not overlap q, got elements of both"),
    ):
        with pytest.raises(RuntimeError, match=f"^{name}: {message}"):
            call.run(**{name: value})
    call.v_cache = call.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(NotImplementedError, match="^v_cache: expected pages and heads at the distances of k_cache's"):
        call.run()


@pytest.mark.parametrize("dynamic", (None, True))
def test_a_table_for_each_head_compiled(device, dynamic):
    call = HeadTables(device)
    torch._dynamo.reset()
    expected = call.run()
    with torch.device(device):
        result = torch.compile(call.run, fullgraph=True, backend="aot_eager", dynamic=dynamic)()
    assert all(torch.equal(a, b) for a, b in zip(result, expected))
