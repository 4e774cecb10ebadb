"""The distribution flash_mla against float64: dense and sparse decoding, FP8 rows, sparse prefill."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path

import pytest
import torch
from interpreted import run_interpreted
from reference import assert_accurate, attention
from signatures import plain_signature
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "flash_mla"))

import flash_mla
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

SIGNATURES = {
    "get_mla_metadata": "(*args, **kwargs)",
    "flash_mla_with_kvcache": "(q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, "
    "num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, "
    "extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None)",
    "flash_mla_sparse_fwd": "(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    function = getattr(flash_mla, name)
    assert plain_signature(function) == SIGNATURES[name]
    explained = function.__doc__.replace(",", ":")
    assert all(f" {p}:" in explained for p in inspect.signature(function).parameters if p not in ("args", "kwargs"))
    meta, none = get_mla_metadata(1, head=2)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta) and not meta.have_initialized and none is None


def normal(device, *shape):
    return torch.randn(*shape, device=device).bfloat16()


def int32(device, values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def decode(q, k_cache, *args, head_dim_v=512, **options):
    return flash_mla_with_kvcache(q, k_cache, *(args or (None, None)), head_dim_v, get_mla_metadata()[0], **options)


def expected(q, rows, scale=None, sink=None, causal=False, head_dim_v=512):
    """(reference, plain) pairs of out (sq, h, d_v) and lse (h, sq) of q (sq, h, d) over rows (keys, d)."""
    results = []
    for dtype in (torch.float64, q.dtype):
        one = attention(q[None], rows[None, :, None], rows[None, :, None, :head_dim_v], scale=scale, causal=causal,
                        dtype=dtype)  # fmt: skip
        share = 1.0 if sink is None else torch.sigmoid(one.lse.double() - sink.double()[:, None]).nan_to_num(0.0)
        share = share if sink is None else share.transpose(1, 2)[..., None]
        results.append(((one.out * share)[0], one.lse[0]))
    return results


def check(out, lse, q, rows, name="", **options):
    reference, plain = expected(q, rows, **options)
    assert_accurate(out, reference[0], plain[0].to(out.dtype), f"out {name}")
    assert_accurate(lse, reference[1], plain[1], f"lse {name}")


@pytest.mark.parametrize(
    "nheads,seqlen_q,page_size,head_dim,causal",
    ((16, 1, 64, 576, False), (20, 3, 16, 576, True), (8, 2, 64, 512, True)),
)
def test_dense_decoding(device, nheads, seqlen_q, page_size, head_dim, causal):
    lengths, slots = [130, 0, 65], 4 * 64 // page_size
    cache = torch.full((3 * slots, page_size, 1, head_dim), float("nan"), device=device, dtype=torch.bfloat16)
    table = torch.randperm(3 * slots).view(3, slots).int().to(device)
    keys = [normal(device, n, head_dim) for n in lengths]
    for i, rows in enumerate(keys):
        at = torch.arange(len(rows), device=device)
        cache[table[i].long()[at // page_size], at % page_size, 0] = rows
    q = normal(device, 3, seqlen_q, nheads, head_dim)
    out, lse = decode(q, cache, table, int32(device, lengths), causal=causal)
    assert out.shape == (3, seqlen_q, nheads, 512) and lse.shape == (3, nheads, seqlen_q)
    for i, rows in enumerate(keys):
        check(out[i], lse[i], q[i], rows, f"of sequence {i}", causal=causal)
    scaled, _ = decode(q, cache, table, int32(device, lengths), softmax_scale=0.1, attn_sink=lse[0, :, 0].float())
    check(scaled[0], decode(q, cache, table, int32(device, lengths), softmax_scale=0.1)[1][0], q[0], keys[0], scale=0.1,
          sink=lse[0, :, 0])  # fmt: skip


def fp8_cache(numbers, row_bytes):
    """(pages of FP8 rows of these numbers (pages, page_size, d), the numbers that they hold): bytes by FlashMLA's
    layouts. Scales are powers of two; a gap follows each page."""
    pages, size, _ = numbers.shape
    columns, group = (512, 128) if row_bytes == 656 else (448, 64)
    parts = numbers[..., :columns].float().unflatten(-1, (-1, group))
    exponent = (parts.abs().amax(-1) / 448).log2().ceil().clamp(-126, 127)
    stored = (parts / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn)
    values = stored.flatten(-2).view(torch.uint8)
    rope = numbers[..., columns:].bfloat16().contiguous().view(torch.uint8)
    if row_bytes == 656:
        scales = torch.exp2(exponent).contiguous().view(torch.uint8)
        content = torch.cat([values, scales, rope], -1).flatten(1)
    else:
        scales = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1), value=255)
        content = torch.cat([torch.cat([values, rope], -1).flatten(1), scales.flatten(1)], 1)
    memory = torch.full((pages, size * row_bytes + 64), 255, dtype=torch.uint8, device=numbers.device)
    memory[:, : size * row_bytes] = content
    cache = memory[:, : size * row_bytes].view(pages, size, 1, row_bytes).view(torch.float8_e4m3fn)
    held = (stored.float() * torch.exp2(exponent)[..., None]).flatten(-2).bfloat16()
    return cache, torch.cat([held, numbers[..., columns:].bfloat16()], -1)


def selection(indices, length=None):
    """The rows that count, by their indices (topk,)."""
    indices = indices if length is None else indices[:length]
    return indices[indices >= 0].long()


@pytest.mark.parametrize("row_bytes", (0, 656, 584))
@pytest.mark.parametrize("has_extra", (False, True))
def test_sparse_decoding(device, row_bytes, has_extra):
    """Indices in any order, some invalid, some twice; rows that none names are NaN."""
    pages, size, nheads, dim = 5, 16, 8, 512 if row_bytes == 584 else 576
    kinds, queries = [], normal(device, 2, 3, nheads, dim)
    for topk, lengths in ((24, [20, 0]), (10, [10, 7])):
        numbers = normal(device, pages, size, dim)
        indices = torch.randint(-1, pages * size - 5, (2, 3, topk), device=device).int()
        indices[:, :, 3:6], indices[0, 1] = indices[:, :, 7:8], -1
        cache, held = (numbers.unsqueeze(2), numbers) if not row_bytes else fp8_cache(numbers, row_bytes)
        if not row_bytes:
            cache[-1, -5:] = float("nan")
        kinds.append((cache, held.flatten(0, 1), indices, lengths))
    if not has_extra:
        kinds.pop()
    sink = torch.tensor([math.inf, -math.inf, 0, 1, 2, 3, 4, 5.0], device=device)
    options = {"is_fp8_kvcache": row_bytes > 0, "indices": kinds[0][2]}
    if has_extra:
        options.update(extra_k_cache=kinds[1][0], extra_indices_in_kvcache=kinds[1][2])
    counts = {"topk_length": int32(device, kinds[0][3])}
    if has_extra:
        counts["extra_topk_length"] = int32(device, kinds[1][3])
    for extra_options, by_length in (({}, False), ({**counts, "attn_sink": sink}, True)):
        out, lse = decode(queries, kinds[0][0], **options, **extra_options)
        assert out.shape == (2, 3, nheads, 512) and lse.shape == (2, nheads, 3)
        for i in range(2):
            for j in range(3):
                rows = torch.cat(
                    [held[selection(index[i, j], n[i] if by_length else None)] for _, held, index, n in kinds]
                )
                check(out[i, j : j + 1], lse[i, :, j : j + 1], queries[i, j : j + 1], rows, f"of {i}, {j}",
                      sink=sink if by_length else None)  # fmt: skip


@pytest.mark.parametrize("row_bytes", (656, 584))
def test_dense_decoding_over_fp8_rows(device, row_bytes):
    cache, held = fp8_cache(normal(device, 4, 16, 512 if row_bytes == 584 else 576), row_bytes)
    q, table = normal(device, 1, 2, 16, held.shape[-1]), int32(device, [[2, 0, 3]])
    out, lse = decode(q, cache.view(torch.int8), table, int32(device, [40]), causal=True, is_fp8_kvcache=True)
    check(out[0], lse[0], q[0], held[table[0].long()].flatten(0, 1)[:40], causal=True)


@pytest.mark.parametrize("page_size", (1, 64))
def test_fp8_rows_are_their_numbers(device, page_size, monkeypatch):
    """Bit by bit, where the kernel converts them too."""
    monkeypatch.setenv("FLASH_ATTN_FAMILY", "wgmma")
    cache, held = fp8_cache(normal(device, 384 // page_size, page_size, 576), 656)
    q, lengths = normal(device, 2, 3, 20, 576), int32(device, [150, 31])
    table = torch.arange(384 // page_size, device=device).flip(0).int().view(2, -1)
    kinds = (cache, True), (held.unsqueeze(2), False)
    results = [decode(q, rows, table, lengths, causal=True, is_fp8_kvcache=is_fp8) for rows, is_fp8 in kinds]
    assert all(torch.equal(ours, expected) for ours, expected in zip(*results))


def test_sparse_prefill(device):
    q, kv, sink = normal(device, 6, 12, 576), normal(device, 50, 1, 576), torch.randn(12, device=device)
    indices = torch.randint(-1, 45, (6, 1, 20), device=device).int()
    indices[0], indices[1, 0, :7], indices[2, 0, 5] = 50, 10**6, indices[2, 0, 6]
    kv[45:] = float("nan")
    lengths = [20, 20, 13, 0, 1, 20]
    for options in ({}, {"topk_length": int32(device, lengths), "attn_sink": sink}):
        out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 0.05, **options)
        assert out.shape == (6, 12, 512) and max_logits.shape == lse.shape == (6, 12)
        for i in range(6):
            index = indices[i, 0, : lengths[i] if options else None]
            rows = kv[index[(index >= 0) & (index < 50)].long(), 0]
            check(out[i : i + 1], lse[i, :, None], q[i : i + 1], rows, f"of {i}", scale=0.05,
                  sink=options.get("attn_sink"))  # fmt: skip
            scores = 0.05 * q[i].double() @ rows.double().T
            largest = scores.amax(-1) if len(rows) else torch.full_like(lse[i], -math.inf).double()
            assert torch.allclose(max_logits[i].double(), largest, atol=1e-5)


INTERPRETED = """
sys.path.insert(0, PATH)
from flash_mla._selection import launch_selected_table, selected_table

torch.manual_seed(0)
for batch, seqlen_q, topk, count, page, steps, dtype, bounded in CALLS:
    indices = torch.randint(-2, count + 3, (seqlen_q, batch, topk), dtype=dtype).transpose(0, 1)
    length = torch.randint(-1, topk + 2, (batch,), dtype=torch.int32) if bounded else None
    table, counts = launch_selected_table(indices, length, count, page, *steps)
    expected, expected_counts = selected_table(indices, length, count, page, *steps)
    exists = torch.arange(topk) < counts[:, None]
    assert torch.equal(counts, expected_counts) and counts.dtype == table.dtype == torch.int32
    assert torch.equal(table[exists], expected[exists]) and table.shape == expected.shape
print("equal")
"""


def test_selection_kernel_under_the_interpreter():
    """The kernel's own code without a GPU: Triton's interpreter against the PyTorch composition."""
    pytest.importorskip("triton")
    calls = "(2, 3, 70, 90, 16, (32, 2), torch.int32, True), (1, 2, 3000, 40, 7, (7, 1), torch.int64, False)"
    more = "(3, 1, 2048, 1 << 29, 64, (64, 1), torch.int32, False), (2, 1, 0, 5, 1, (1, 1), torch.int32, True)"
    run_interpreted(f"import torch\nPATH = {flash_mla.__path__[0]!r} + '/..'\nCALLS = [{calls}, {more}]\n{INTERPRETED}")


def test_metadata_of_other_calls(device):
    q, cache, table, lengths = normal(device, 1, 1, 4, 576), normal(device, 2, 16, 1, 576), [[0, 1]], [20]
    meta, _ = get_mla_metadata()
    arguments = (cache, int32(device, table), int32(device, lengths), 512, meta)
    flash_mla_with_kvcache(q, *arguments)
    flash_mla_with_kvcache(q, *arguments)
    assert meta.have_initialized
    with pytest.raises(
        RuntimeError, match="^tile_scheduler_metadata: expected one of calls with nheads 2, got one with"
    ):
        flash_mla_with_kvcache(q[:, :, :2], *arguments)
    with pytest.raises(RuntimeError, match="^tile_scheduler_metadata: expected one of calls with causal True, got one"):
        flash_mla_with_kvcache(q, *arguments, causal=True)


def test_errors(device):
    q, cache = normal(device, 1, 1, 4, 40), normal(device, 2, 16, 1, 40)
    table, lengths, indices = int32(device, [[0, 1]]), int32(device, [20]), int32(device, [[[0, 1]]])

    def fails(message, *args, error=RuntimeError, **options):
        with pytest.raises(error, match="^" + message):
            decode(*(args or (q, cache, table, lengths)), **{"head_dim_v": 32, **options})

    fails("num_splits: expected None, got 1", num_splits=1)
    fails("block_table: expected a tensor without indices, got None", q, cache)
    fails("topk_length: expected None without indices", topk_length=lengths)
    fails("causal: expected False with indices", causal=True, indices=indices)
    fails(r"indices: expected shape \[1, 1, 'topk'\]", indices=indices[0])
    fails(r"k_cache: expected rows of q's head dim \(40\), got 30", q, cache[..., :30], table, lengths)
    fails(r"k_cache: expected FP8 rows \(pages", q, cache.view(torch.uint8), table, lengths, is_fp8_kvcache=True)
    fails("k_cache: expected dtype float8_e4m3fn, int8 or uint8", is_fp8_kvcache=True)
    fails(r"k_cache: expected the dtype of q", q, cache.half(), indices=indices)
    fails("head_dim_v: expected a value from 1 to 40, got 41", head_dim_v=41)
    fails(r"attn_sink: expected shape \[4\]", attn_sink=torch.zeros(3, device=device))
    fails("extra_indices_in_kvcache: expected to be given exactly with", indices=indices, extra_k_cache=cache)
    with pytest.raises(TypeError, match="^tile_scheduler_metadata: expected a FlashMLASchedMeta, got NoneType"):
        flash_mla_with_kvcache(q, cache, table, lengths, 32, None)
    with pytest.raises(RuntimeError, match=r"^kv: expected shape \(seqlen_kv, 1, head_dim\), got"):
        flash_mla_sparse_fwd(q[0], normal(device, 5, 2, 40), indices[0], 1.0, 32)


@pytest.mark.devices("cpu")
@pytest.mark.needs_torch((2, 11), "has no fake CUDA tensors without a driver")
def test_sizes_on_cuda(device):
    """Those without kernels are refused by the names of these functions, before the metadata takes them."""
    with FakeTensorMode():
        q, cache, meta = normal("cuda", 1, 1, 4, 576), normal("cuda", 2, 16, 1, 576), get_mla_metadata()[0]
        table, lengths, indices = int32("cuda", [[0, 1]]), int32("cuda", [20]), int32("cuda", [[[0, 1]]])
        for message, heads_k, head_dim_v, scale in (
            ("q: expected head dim 512 or 576 with head_dim_v 512 on cuda, got 576 with head_dim_v 500", 1, 500, 1.0),
            ("k_cache: expected one K/V head on cuda, got 2", 2, 512, 1.0),
            ("softmax_scale: expected a number above 0 on cuda, got -1.0", 1, 512, -1.0),
        ):
            with pytest.raises(NotImplementedError, match=f"^{message}"):
                rows = cache.expand(-1, -1, heads_k, -1)
                flash_mla_with_kvcache(q, rows, table, lengths, head_dim_v, meta, softmax_scale=scale)
        assert not meta.have_initialized
        out, lse = flash_mla_with_kvcache(q[..., :512], cache[..., :512], table, lengths, 512, meta)
        assert out.shape == (1, 1, 4, 512) and lse.shape == (1, 4, 1)
        for message, d_v, scale in (
            ("q: expected head dim 512 or 576 with d_v 512 on cuda, got 576 with d_v 64", 64, 1.0),
            ("sm_scale: expected a number above 0 on cuda, got 0.0", 512, 0.0),
        ):
            with pytest.raises(NotImplementedError, match=f"^{message}"):
                flash_mla_sparse_fwd(q[0], cache[0], indices, scale, d_v)
