"""Backward of the Triton comparator, from the forward's log-sum-exp.

Three launches: the terms of each row, computed once for both of the others; dK and dV by tiles of keys; dQ by tiles of
queries. The probabilities are recomputed in both, so there are seven products instead of five, but nothing is summed in
memory: the gradients are bitwise reproducible, and no temporary is larger than the log-sum-exp. Without SHARED_DELTA
there is no launch for the terms of a row: both kernels compute delta = rowsum(dO * O) of the rows that they visit, as
FlashAttention's first backward does, the one of dK and dV again for every tile of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton_common import LOG2_E, Launch, keys_of_tile, load_tile, outer_strides, padded_head_dim, store_tile
from triton_variants import Tile

# The row terms are padded to a multiple of every BLOCK_M, so that they are read without a mask.
ROW_ALIGNMENT = 128
DELTA_ROWS = 64

# By padded head dim, tuned at run time among these. All fit an H200; docs/tuning/triton.md has their resources.
DKDV_TILES = {
    16: (Tile(64, 64, 4, 2),),
    32: (Tile(64, 128, 8, 2),),
    64: (Tile(64, 128, 8, 3), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    128: (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
    256: (Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
}
DQ_TILES = {
    16: (Tile(64, 64, 4, 2),),
    32: (Tile(128, 64, 4, 2),),
    64: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
    128: (Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    256: (Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
}


@triton.jit
def row_terms_kernel(
    out_ptr, dout_ptr, lse_ptr, lse_log2_ptr, delta_ptr, nheads, seqlen_q, padded_q, head_dim, out_strides,
    dout_strides, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) and the log-sum-exp in units of log2, both fp32 (b, h, padded_q).

    Rows beyond the end get delta 0 and log-sum-exp +inf: their probabilities come out as 0. Grid: (tiles, b * h).
    """
    start = tl.program_id(0) * ROWS
    batch_head = tl.program_id(1)
    batch = batch_head // nheads
    head = batch_head % nheads
    out = load_tile(out_ptr, out_strides, batch, head, start, seqlen_q, head_dim, ROWS, BLOCK_D, False)
    dout = load_tile(dout_ptr, dout_strides, batch, head, start, seqlen_q, head_dim, ROWS, BLOCK_D, False)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    rows = start + tl.arange(0, ROWS)
    source = lse_ptr + batch_head.to(tl.int64) * seqlen_q + rows
    lse = tl.load(source, mask=rows < seqlen_q, other=float("inf"))
    target = batch_head.to(tl.int64) * padded_q + rows
    tl.store(lse_log2_ptr + target, lse * 1.4426950408889634)
    tl.store(delta_ptr + target, delta)


@triton.jit
def load_lse_log2(lse, rows, seqlen_q, SHARED_DELTA: tl.constexpr):
    """Log-sum-exp of the rows in units of log2, from row_terms if SHARED_DELTA, else from the forward's; +inf beyond
    the end. lse: pointer to that of the head's first row."""
    if SHARED_DELTA:
        lse_log2 = tl.load(lse + rows)
    else:
        lse_log2 = tl.load(lse + rows, mask=rows < seqlen_q, other=float("inf")) * 1.4426950408889634
    return lse_log2


@triton.jit
def load_delta(
    source, out_strides, dout, batch, head, rows, start, seqlen_q, head_dim, SHARED_DELTA: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """rowsum(dO * O) of `rows`, start .. start + ROWS, of one head.

    source: pointer to that of the head's first row if SHARED_DELTA, else the output, as load_tile takes it.
    """
    if SHARED_DELTA:
        delta = tl.load(source + rows)
    else:
        out = load_tile(source, out_strides, batch, head, start, seqlen_q, head_dim, ROWS, BLOCK_D, USE_TMA)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    return delta


@triton.jit
def add_dkdv(
    dk, dv, k, v, q_source, q_strides, dout_source, dout_strides, lse, delta, out_strides, batch, head, columns,
    first, last, seqlen_q, seqlen_k, head_dim, scale_log2, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr, SHARED_DELTA: tl.constexpr,
):  # fmt: skip
    """(dk, dv), both (BLOCK_N, BLOCK_D) fp32, plus what the queries first .. last of one head add.

    first and last are multiples of BLOCK_M. Scores are held as (keys, queries). dk lacks the softmax scale. With
    MASKED, keys after the query's own position are masked. lse and delta: as load_lse_log2 and load_delta take them.
    """
    for start in tl.range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_source, q_strides, batch, head, start, seqlen_q, head_dim, BLOCK_M, BLOCK_D, USE_TMA)
        scores = tl.dot(k, tl.trans(q)) * scale_log2 - load_lse_log2(lse, rows, seqlen_q, SHARED_DELTA)[None, :]
        if MASKED:
            visible = columns[:, None] <= (rows + seqlen_k - seqlen_q)[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        probs = tl.exp2(scores)
        dout = load_tile(dout_source, dout_strides, batch, head, start, seqlen_q, head_dim, BLOCK_M, BLOCK_D, USE_TMA)
        dv = tl.dot(probs.to(dout.dtype), dout, dv)
        dprobs = tl.dot(v, tl.trans(dout))
        terms = load_delta(
            delta, out_strides, dout, batch, head, rows, start, seqlen_q, head_dim,
            SHARED_DELTA, BLOCK_M, BLOCK_D, USE_TMA,
        )  # fmt: skip
        dscores = probs * (dprobs - terms[None, :])
        dk = tl.dot(dscores.to(q.dtype), q, dk)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_source, dout_source, delta_source, k_ptr, v_ptr, lse_ptr, dk_ptr, dv_ptr, nheads, group, seqlen_q, padded_q,
    seqlen_k, head_dim, scale, scale_log2, q_strides, dout_strides, k_strides, v_strides, out_strides, dk_strides,
    dv_strides, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr, SHARED_DELTA: tl.constexpr = True,
):  # fmt: skip
    """dK and dV. Grid: one block per (batch, K/V head, tile of BLOCK_N keys), the tiles of a head side by side.

    A block visits the queries of all heads of its group.
    q_source, dout_source: tensor descriptors if USE_TMA, else pointers; strides: those of (b, s, h).
    delta_source: pointer to what row_terms computed if SHARED_DELTA, else the output, as q_source. lse_ptr: the
    log-sum-exp of row_terms, or the forward's. padded_q: the rows that it has a head.
    """
    tiles = tl.cdiv(seqlen_k, BLOCK_N)
    # under a causal mask the first keys are seen by most queries: start with them
    tile = tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    nheads_k = nheads // group
    batch = batch_head // nheads_k
    head_k = batch_head % nheads_k
    begin = tile * BLOCK_N
    columns = begin + tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, k_strides, batch, head_k, begin, seqlen_k, head_dim, BLOCK_N, BLOCK_D, False)
    v = load_tile(v_ptr, v_strides, batch, head_k, begin, seqlen_k, head_dim, BLOCK_N, BLOCK_D, False)
    dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)

    # the keys beyond the end are not masked: what they give stays in rows that are not stored
    first = 0
    unmasked = 0
    if CAUSAL:
        diagonal = begin + seqlen_q - seqlen_k
        first = tl.maximum(0, diagonal) // BLOCK_M * BLOCK_M
        unmasked = tl.minimum(padded_q, tl.cdiv(tl.maximum(0, diagonal + BLOCK_N - 1), BLOCK_M) * BLOCK_M)
    for member in range(group):
        head = head_k * group + member
        terms = (batch * nheads + head).to(tl.int64) * padded_q
        delta = delta_source
        if SHARED_DELTA:
            delta += terms
        if CAUSAL:
            dk, dv = add_dkdv(
                dk, dv, k, v, q_source, q_strides, dout_source, dout_strides, lse_ptr + terms, delta, out_strides,
                batch, head, columns, first, unmasked, seqlen_q, seqlen_k, head_dim, scale_log2,
                True, BLOCK_M, BLOCK_D, USE_TMA, SHARED_DELTA,
            )  # fmt: skip
        dk, dv = add_dkdv(
            dk, dv, k, v, q_source, q_strides, dout_source, dout_strides, lse_ptr + terms, delta, out_strides,
            batch, head, columns, unmasked, seqlen_q, seqlen_q, seqlen_k, head_dim, scale_log2,
            False, BLOCK_M, BLOCK_D, USE_TMA, SHARED_DELTA,
        )  # fmt: skip
    store_tile(dk_ptr, dk_strides, batch, head_k, begin, seqlen_k, head_dim, dk * scale, BLOCK_N, BLOCK_D)
    store_tile(dv_ptr, dv_strides, batch, head_k, begin, seqlen_k, head_dim, dv, BLOCK_N, BLOCK_D)


@triton.jit
def add_dq(
    dq, q, dout, lse_log2, delta, k_source, k_strides, v_source, v_strides, batch, head_k, rows, first, last,
    seqlen_q, seqlen_k, head_dim, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """dq (BLOCK_M, BLOCK_D) fp32, without the softmax scale, plus what the keys first .. last add.

    first and last are multiples of BLOCK_N; lse_log2, delta (BLOCK_M). With MASKED, keys beyond the end and, if CAUSAL,
    after the query's own position are masked.
    """
    for start in tl.range(first, last, BLOCK_N):
        k = load_tile(k_source, k_strides, batch, head_k, start, seqlen_k, head_dim, BLOCK_N, BLOCK_D, USE_TMA)
        scores = tl.dot(q, tl.trans(k)) * scale_log2 - lse_log2[:, None]
        v = load_tile(v_source, v_strides, batch, head_k, start, seqlen_k, head_dim, BLOCK_N, BLOCK_D, USE_TMA)
        dprobs = tl.dot(dout, tl.trans(v))
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            visible = (columns < seqlen_k)[None, :]
            if CAUSAL:
                visible &= columns[None, :] <= (rows + seqlen_k - seqlen_q)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
        dscores = tl.exp2(scores) * (dprobs - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq)
    return dq


@triton.jit
def dq_kernel(
    k_source, v_source, q_ptr, dout_ptr, delta_ptr, lse_ptr, dq_ptr, nheads, group, seqlen_q, padded_q, seqlen_k,
    head_dim, scale, scale_log2, q_strides, dout_strides, k_strides, v_strides, out_strides, dq_strides,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
    SHARED_DELTA: tl.constexpr = True,
):  # fmt: skip
    """dQ. Grid: one block per (batch, head, tile of BLOCK_M queries), the tiles of a head side by side.

    k_source, v_source: tensor descriptors if USE_TMA, else pointers; strides: those of (b, s, h). delta_ptr: what
    row_terms computed if SHARED_DELTA, else the output. lse_ptr, padded_q: as those of dkdv_kernel.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    # under a causal mask the last queries see most keys: start with them
    tile = tiles - 1 - tl.program_id(0) % tiles
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // nheads
    head = batch_head % nheads
    begin = tile * BLOCK_M
    rows = begin + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, q_strides, batch, head, begin, seqlen_q, head_dim, BLOCK_M, BLOCK_D, False)
    dout = load_tile(dout_ptr, dout_strides, batch, head, begin, seqlen_q, head_dim, BLOCK_M, BLOCK_D, False)
    terms = batch_head.to(tl.int64) * padded_q
    lse_log2 = load_lse_log2(lse_ptr + terms, rows, seqlen_q, SHARED_DELTA)
    delta = delta_ptr + terms if SHARED_DELTA else delta_ptr
    delta = load_delta(
        delta, out_strides, dout, batch, head, rows, begin, seqlen_q, head_dim, SHARED_DELTA, BLOCK_M, BLOCK_D, False
    )
    dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)

    unmasked_end, end = keys_of_tile(tile, seqlen_q, seqlen_k, CAUSAL, BLOCK_M, BLOCK_N)
    dq = add_dq(
        dq, q, dout, lse_log2, delta, k_source, k_strides, v_source, v_strides, batch, head // group, rows,
        0, unmasked_end, seqlen_q, seqlen_k, head_dim, scale_log2, False, CAUSAL, BLOCK_N, BLOCK_D, USE_TMA,
    )  # fmt: skip
    dq = add_dq(
        dq, q, dout, lse_log2, delta, k_source, k_strides, v_source, v_strides, batch, head // group, rows,
        unmasked_end, end, seqlen_q, seqlen_k, head_dim, scale_log2, True, CAUSAL, BLOCK_N, BLOCK_D, USE_TMA,
    )  # fmt: skip
    store_tile(dq_ptr, dq_strides, batch, head, begin, seqlen_q, head_dim, dq * scale, BLOCK_M, BLOCK_D)


def row_terms(out, dout, lse):
    """(log-sum-exp in units of log2, rowsum(dO * O)), both fp32 (b, h, sq rounded up to ROW_ALIGNMENT).

    out, dout (b, sq, h, d) with a contiguous last dimension; lse fp32 (b, h, sq), natural logarithm.
    """
    batch, seqlen_q, nheads, head_dim = out.shape
    padded_q = triton.cdiv(seqlen_q, ROW_ALIGNMENT) * ROW_ALIGNMENT
    lse_log2, delta = torch.empty((2, batch, nheads, padded_q), dtype=torch.float32, device=out.device)
    row_terms_kernel[(padded_q // DELTA_ROWS, batch * nheads)](
        out, dout, lse, lse_log2, delta, nheads, seqlen_q, padded_q, head_dim, outer_strides(out), outer_strides(dout),
        ROWS=DELTA_ROWS, BLOCK_D=padded_head_dim(head_dim),
    )  # fmt: skip
    return lse_log2, delta


def backward_launches(q, k, v, dout, terms, gradients, causal, softmax_scale, use_tma, **constants):
    """The launches for (dK and dV, dQ). q, dout (b, sq, h, d), k, v (b, sk, h_k, d); gradients (dq, dk, dv), as q, k,
    v. terms: of row_terms, or with SHARED_DELTA=False among the constants the forward's (lse, out)."""
    dq, dk, dv = gradients
    lse, delta = terms
    shared = constants.get("SHARED_DELTA", True)
    out_strides = (0, 0, 0) if shared else outer_strides(delta)
    numbers = (
        q.shape[2], q.shape[2] // k.shape[2], q.shape[1], lse.shape[2], k.shape[1], q.shape[3],
        softmax_scale, softmax_scale * LOG2_E, *map(outer_strides, (q, dout, k, v)), out_strides,
    )  # fmt: skip
    visited = ((q, "m"), (dout, "m")) + (() if shared else ((delta, "m"),))
    dkdv_arguments = (*((delta,) if shared else ()), k, v, lse, dk, dv, *numbers, *map(outer_strides, (dk, dv)))
    dq_arguments = (q, dout, delta, lse, dq, *numbers, outer_strides(dq))
    return (
        Launch(dkdv_kernel, visited, dkdv_arguments, (k, "n"), causal, use_tma, **constants),
        Launch(dq_kernel, ((k, "n"), (v, "n")), dq_arguments, (q, "m"), causal, use_tma, **constants),
    )
