"""The Triton comparator: our FlashAttention-2 forward in Triton, one of the peers of run.py.

Algorithm: Dao 2023 (FlashAttention-2), one thread block per tile of queries, online softmax over tiles of keys.
Tiles come from a short list per head dim (TILES) and are tuned once per head dim, mask and length class. Q, K and V
are read through TMA tensor descriptors where GPU and tensors allow it, else through pointers. The log-sum-exp of every
row is stored too: it is what a backward needs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

LONG_SEQUENCE = 2048
LOG2_E = math.log2(math.e)


class Tile(NamedTuple):
    """Queries and keys per tile, warps per thread block, stages of the load pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By padded head dim. A tile that needs more shared memory than the GPU has is left out when tuning.
TILES = {
    16: (Tile(64, 64, 4, 2),),
    32: (Tile(128, 64, 4, 3),),
    64: (Tile(128, 128, 8, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    256: (Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)),
}
INTERPRETER_TILE = Tile(32, 16, 4, 1)


@triton.jit
def load_tile(
    source,
    strides,
    batch,
    head,
    start,
    length,
    head_dim,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Rows start .. start + ROWS of one head of a (b, s, h, d) tensor, as (ROWS, BLOCK_D); zeros outside of it.

    source: a tensor descriptor if USE_TMA, else a pointer, to which `strides`, those of (b, s, h), belong.
    """
    if USE_TMA:
        tile = source.load([batch, start, head, 0]).reshape(ROWS, BLOCK_D)
    else:
        rows = start + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        base = source + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
        inside = (rows < length)[:, None] & (columns < head_dim)[None, :]
        tile = tl.load(base + rows.to(tl.int64)[:, None] * strides[1] + columns[None, :], mask=inside, other=0.0)
    return tile


@triton.jit
def attend(
    acc,
    row_sum,
    row_max,
    q,
    k_source,
    k_strides,
    v_source,
    v_strides,
    batch,
    head_k,
    rows,
    first,
    last,
    seqlen_q,
    seqlen_k,
    head_dim,
    scale_log2,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Online softmax over the keys first .. last (multiples of BLOCK_N): the new (acc, row_sum, row_max).

    acc (BLOCK_M, BLOCK_D), row_sum and row_max (BLOCK_M), all fp32; row_max is in units of log2. With MASKED, keys
    beyond the end and, if CAUSAL, keys after the query's own position are hidden.
    """
    for start in range(first, last, BLOCK_N):
        k = load_tile(k_source, k_strides, batch, head_k, start, seqlen_k, head_dim, BLOCK_N, BLOCK_D, USE_TMA)
        scores = tl.dot(q, tl.trans(k))
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            visible = (columns < seqlen_k)[None, :]
            if CAUSAL:
                visible &= columns[None, :] <= (rows + seqlen_k - seqlen_q)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        shift = new_max
        if MASKED:
            # a row that has seen no key yet keeps probabilities 0 instead of exp2(-inf + inf)
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores * scale_log2 - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = acc * rescale[:, None]
        v = load_tile(v_source, v_strides, batch, head_k, start, seqlen_k, head_dim, BLOCK_N, BLOCK_D, USE_TMA)
        acc = tl.dot(probs.to(v.dtype), v, acc)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def forward_kernel(
    q_source,
    k_source,
    v_source,
    out_ptr,
    lse_ptr,
    nheads,
    group,
    seqlen_q,
    seqlen_k,
    head_dim,
    scale_log2,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_ob,
    stride_os,
    stride_oh,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Grid: one block per (batch, head, tile of BLOCK_M queries), the tiles of a head side by side.

    q_source, k_source, v_source: tensor descriptors if USE_TMA, else pointers. lse fp32 (b, h, sq), contiguous.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    # under a causal mask the last queries see most keys: start with them
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // nheads
    head = batch_head % nheads
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)

    q_strides = (stride_qb, stride_qs, stride_qh)
    k_strides = (stride_kb, stride_ks, stride_kh)
    v_strides = (stride_vb, stride_vs, stride_vh)
    q = load_tile(q_source, q_strides, batch, head, tile * BLOCK_M, seqlen_q, head_dim, BLOCK_M, BLOCK_D, USE_TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)

    if CAUSAL:
        offset = seqlen_k - seqlen_q
        end = tl.maximum(0, tl.minimum(seqlen_k, (tile + 1) * BLOCK_M + offset))
        seen_by_all = tl.maximum(0, tl.minimum(seqlen_k, tile * BLOCK_M + 1 + offset))
    else:
        end = seqlen_k
        seen_by_all = seqlen_k
    unmasked_end = seen_by_all // BLOCK_N * BLOCK_N
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, q, k_source, k_strides, v_source, v_strides, batch, head // group, rows,
        0, unmasked_end, seqlen_q, seqlen_k, head_dim, scale_log2, False, CAUSAL, BLOCK_N, BLOCK_D, USE_TMA,
    )  # fmt: skip
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, q, k_source, k_strides, v_source, v_strides, batch, head // group, rows,
        unmasked_end, end, seqlen_q, seqlen_k, head_dim, scale_log2, True, CAUSAL, BLOCK_N, BLOCK_D, USE_TMA,
    )  # fmt: skip

    empty = row_sum == 0.0
    acc = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse = tl.where(empty, float("inf"), (row_max + tl.log2(row_sum)) * 0.6931471805599453)
    inside = rows < seqlen_q
    tl.store(lse_ptr + batch_head.to(tl.int64) * seqlen_q + rows, lse, mask=inside)
    columns = tl.arange(0, BLOCK_D)
    out_base = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    out_ptrs = out_base + rows.to(tl.int64)[:, None] * stride_os + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (columns < head_dim)[None, :])


def describable(tensor):
    """Whether a TMA descriptor can hold the tensor: 16-byte aligned base and strides, contiguous last dimension."""
    strides = tensor.stride()
    aligned = all(stride * tensor.element_size() % 16 == 0 for stride in strides[:-1])
    return tensor.data_ptr() % 16 == 0 and strides[-1] == 1 and aligned


def can_use_tma(*tensors):
    if TensorDescriptor is None or not all(describable(tensor) for tensor in tensors):
        return False
    device = tensors[0].device
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def padded_head_dim(head_dim):
    return max(16, triton.next_power_of_2(head_dim))


class Launch:
    """One forward of q (b, sq, h, d) over k, v (b, sk, h_k, d) into out (as q) and lse fp32 (b, h, sq)."""

    def __init__(self, q, k, v, out, lse, causal, softmax_scale, use_tma):
        self.inputs, self.out, self.lse = (q, k, v), out, lse
        self.causal, self.use_tma = causal, use_tma
        self.block_d = padded_head_dim(q.shape[-1])
        self.numbers = (
            q.shape[2], q.shape[2] // k.shape[2], q.shape[1], k.shape[1], q.shape[3], softmax_scale * LOG2_E,
            *(stride for tensor in (q, k, v, out) for stride in tensor.stride()[:3]),
        )  # fmt: skip

    def arguments(self, tile):
        rows = (tile.block_m, tile.block_n, tile.block_n)
        sources = self.inputs
        if self.use_tma:
            sources = [
                TensorDescriptor(x, list(x.shape), list(x.stride()), [1, n, 1, self.block_d])
                for x, n in zip(self.inputs, rows)
            ]
        options = {"CAUSAL": self.causal, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": self.block_d}
        options.update(USE_TMA=self.use_tma, num_warps=tile.num_warps, num_stages=tile.num_stages)
        return (*sources, self.out, self.lse, *self.numbers), options

    def grid(self, tile):
        batch, seqlen_q, nheads, _ = self.out.shape
        return (triton.cdiv(seqlen_q, tile.block_m) * batch * nheads,)

    def run(self, tile):
        arguments, options = self.arguments(tile)
        forward_kernel[self.grid(tile)](*arguments, **options)


_tuned = {}


def tuned_tile(launch):
    """The fastest tile for launches like this one: of the same device, dtype, padded head dim, mask, way of loading
    and length class."""
    q, k, _ = launch.inputs
    key = (q.device, q.dtype, launch.block_d, launch.causal, launch.use_tma, k.shape[1] > LONG_SEQUENCE)
    if key not in _tuned:
        tiles = TILES[launch.block_d]
        _tuned[key] = tiles[0] if len(tiles) == 1 else min(tiles, key=milliseconds(launch, tiles).get)
    return _tuned[key]


def milliseconds(launch, tiles):
    """{tile: median ms}; infinite for a tile that does not fit the GPU."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times = {}
    for tile in tiles:
        try:
            times[tile] = do_bench(lambda tile=tile: launch.run(tile), warmup=5, rep=20, return_mode="median")
        except OutOfResources:
            times[tile] = float("inf")
    return times


def interpreting():
    return type(forward_kernel).__name__ == "InterpretedFunction"


def triton_attention(q, k, v, causal=False, softmax_scale=None, tile=None, use_tma=None):
    """softmax(scale q k^T) v with bottom-right causal masking, forward only.

    q (b, sq, h, d), k and v (b, sk, h_k, d) with h divisible by h_k, d at most 256 and a contiguous last dimension;
    float16 or bfloat16 on CUDA (CPU tensors under Triton's interpreter). softmax_scale: 1/sqrt(d) by default. `tile`
    and `use_tma`: chosen where None. Returns out (b, sq, h, d) and lse fp32 (b, h, sq), natural logarithm; a row that
    sees no key has out 0 and lse +inf. ValueError for tensors it cannot take.
    """
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q: expected dtype float16 or bfloat16, got {q.dtype}")
    if q.shape[-1] > 256 or any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError(f"q, k, v: expected a contiguous head dim of at most 256, got {q.shape[-1]}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), lse.fill_(float("inf"))
    use_tma = can_use_tma(q, k, v) if use_tma is None else use_tma
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    launch = Launch(q, k, v, out, lse, causal, scale, use_tma)
    if tile is None:
        tile = INTERPRETER_TILE if interpreting() else tuned_tile(launch)
    launch.run(tile)
    return out, lse
