"""The Triton kernel of `apply_rotary`. Imported only where it is launched, for it needs triton."""

import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    out_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    cu_seqlens_ptr,
    offsets_ptr,
    rows,
    seqlen,
    heads,
    half_dim,
    batch,
    seqlen_rotary,
    offset,
    out_stride_batch,
    out_stride_row,
    out_stride_head,
    x_stride_batch,
    x_stride_row,
    x_stride_head,
    IS_VARLEN: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate BLOCK_ROWS rows of BLOCK_HEADS heads. Rows count through the batch; varlen is one batch of all rows."""
    row = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    pair = tl.arange(0, BLOCK_HALF)
    in_rows = row < rows
    batch_of_row = row // seqlen
    row_in_batch = row - batch_of_row * seqlen

    # The position of each row; rows outside of all sequences get an impossible one.
    sequence = batch_of_row
    position = row_in_batch + offset
    if IS_VARLEN:
        # Binary search for the last sequence that starts at or before the row.
        first = tl.zeros([BLOCK_ROWS], dtype=tl.int64)
        last = tl.zeros([BLOCK_ROWS], dtype=tl.int64) + batch
        for _ in tl.static_range(SEARCH_STEPS):
            middle = (first + last) // 2
            after = tl.load(cu_seqlens_ptr + middle).to(tl.int64) > row
            last = tl.where(after, middle, last)
            first = tl.where(after, first, middle)
        start = tl.load(cu_seqlens_ptr + first).to(tl.int64)
        inside = (row >= start) & (row < tl.load(cu_seqlens_ptr + batch).to(tl.int64))
        sequence = first
        position = tl.where(inside, row - start + offset, -1)
    if HAS_OFFSETS:
        shift = tl.load(offsets_ptr + sequence, mask=in_rows & (position >= 0), other=0).to(tl.int64)
        position = tl.where(position >= 0, position + shift, -1)

    # Positions without a row in the table are not rotated.
    table = position[:, None] * half_dim + pair[None, :]
    table_mask = ((position >= 0) & (position < seqlen_rotary) & in_rows)[:, None] & (pair < half_dim)[None, :]
    cos = tl.load(cos_ptr + table, mask=table_mask, other=1.0).to(tl.float32)[:, None, :]
    sin = tl.load(sin_ptr + table, mask=table_mask, other=0.0).to(tl.float32)[:, None, :]
    if CONJUGATE:
        sin = -sin

    x_base = x_ptr + batch_of_row * x_stride_batch + row_in_batch * x_stride_row
    x_base = x_base[:, None, None] + (head.to(tl.int64) * x_stride_head)[None, :, None]
    out_base = out_ptr + batch_of_row * out_stride_batch + row_in_batch * out_stride_row
    out_base = out_base[:, None, None] + (head.to(tl.int64) * out_stride_head)[None, :, None]
    in_block = in_rows[:, None, None] & (head < heads)[None, :, None]
    if INTERLEAVED:
        dim = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        mask = in_block & (dim < 2 * half_dim)
        x = tl.load(x_base + dim, mask=mask, other=0.0).to(tl.float32)
        x0, x1 = tl.split(tl.reshape(x, [BLOCK_ROWS, BLOCK_HEADS, BLOCK_HALF, 2]))
        rotated = tl.join(x0 * cos - x1 * sin, x0 * sin + x1 * cos)
        rotated = tl.reshape(rotated, [BLOCK_ROWS, BLOCK_HEADS, 2 * BLOCK_HALF])
        tl.store(out_base + dim, rotated, mask=mask)
    else:
        dim = pair[None, None, :]
        mask = in_block & (dim < half_dim)
        x0 = tl.load(x_base + dim, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(x_base + half_dim + dim, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_base + dim, x0 * cos - x1 * sin, mask=mask)
        tl.store(out_base + half_dim + dim, x0 * sin + x1 * cos, mask=mask)
