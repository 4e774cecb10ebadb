"""Forward of the Triton comparator: one thread block per tile of queries, online softmax over tiles of keys."""

from __future__ import annotations

import triton
import triton.language as tl
from triton_common import LOG2_E, Launch, keys_of_tile, load_tile, outer_strides, store_tile
from triton_variants import Tile

# By padded head dim. A tile that needs more shared memory than the GPU has is left out when tuning.
TILES = {
    16: (Tile(64, 64, 4, 2),),
    32: (Tile(128, 64, 4, 3),),
    64: (Tile(128, 128, 8, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    256: (Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 2)),
}


@triton.jit
def attend(
    acc, row_sum, row_max, q, k_source, k_strides, v_source, v_strides, batch, head_k, rows, first, last, seqlen_q,
    seqlen_k, head_dim, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys first .. last (multiples of BLOCK_N): the new (acc, row_sum, row_max).

    acc (BLOCK_M, BLOCK_D), row_sum and row_max (BLOCK_M), all fp32; row_max is in units of log2. With MASKED, keys
    beyond the end and, if CAUSAL, keys after the query's own position are masked.
    """
    for start in tl.range(first, last, BLOCK_N):
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
    q_source, k_source, v_source, out_ptr, lse_ptr, nheads, group, seqlen_q, seqlen_k, head_dim, scale_log2,
    q_strides, k_strides, v_strides, out_strides, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Grid: one block per (batch, head, tile of BLOCK_M queries), the tiles of a head side by side.

    q_source, k_source, v_source: tensor descriptors if USE_TMA, else pointers; strides: those of (b, s, h).
    lse fp32 (b, h, sq), contiguous.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    # under a causal mask the last queries see most keys: start with them
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // nheads
    head = batch_head % nheads
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)

    q = load_tile(q_source, q_strides, batch, head, tile * BLOCK_M, seqlen_q, head_dim, BLOCK_M, BLOCK_D, USE_TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)

    unmasked_end, end = keys_of_tile(tile, seqlen_q, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)
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
    store_tile(out_ptr, out_strides, batch, head, tile * BLOCK_M, seqlen_q, head_dim, acc, BLOCK_M, BLOCK_D)


def forward_launch(q, k, v, out, lse, causal, softmax_scale, use_tma):
    """The forward of q (b, sq, h, d) over k, v (b, sk, h_k, d) into out (as q) and lse fp32 (b, h, sq)."""
    arguments = (
        out, lse, q.shape[2], q.shape[2] // v.shape[2], q.shape[1], v.shape[1], q.shape[3], softmax_scale * LOG2_E,
        *map(outer_strides, (q, k, v, out)),
    )  # fmt: skip
    return Launch(forward_kernel, ((q, "m"), (k, "n"), (v, "n")), arguments, (q, "m"), causal, use_tma)
