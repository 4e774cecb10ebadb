"""The Triton kernels of `layer_norm_fn`. Imported only where they are launched, for they need triton.

A program has tiles of ROWS x COLUMNS, COLUMNS a power of two that covers a row. Pointers that are None switch their
part off at compile time.
"""

import triton
import triton.language as tl


@triton.jit
def _load(ptr, row, stride, column, inside):
    """Tile of a matrix whose rows are contiguous, in float32, 0 outside."""
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, row, stride, column, inside, tile):
    tl.store(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], tile, mask=inside)


@triton.jit
def _weight(ptr, column, columns, ZERO_CENTERED: tl.constexpr):
    weight = tl.load(ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    return weight + 1.0 if ZERO_CENTERED else weight


@triton.jit
def _kept(seed_ptr, row, column, INPUT: tl.constexpr, dropout_p):
    """The dropout mask of x (INPUT 0) or x1 (INPUT 1), a function of the seed and the element alone: Philox4x32-7
    (Salmon, Moraes, Dror and Shaw, SC 2011)."""
    row = row[:, None] + tl.zeros_like(column)[None, :]
    column = column[None, :] + tl.zeros_like(row)
    word, _, _, _ = tl.philox(tl.load(seed_ptr), column, row, tl.zeros_like(row) + INPUT, tl.zeros_like(row), 7)
    return tl.uint_to_uniform_float(word) >= dropout_p


@triton.jit
def _normalise(total, inside, columns, eps, IS_RMS: tl.constexpr):
    """-> (the rows normalised, one over their standard deviation (rows, 1)); total and the result are 0 outside."""
    if not IS_RMS:
        total = tl.where(inside, total - (tl.sum(total, axis=1) / columns)[:, None], 0.0)
    rstd = (1.0 / tl.sqrt(tl.sum(total * total, axis=1) / columns + eps))[:, None]
    return tl.where(inside, total * rstd, 0.0), rstd


@triton.jit
def norm_forward_kernel(
    x_ptr,
    residual_ptr,
    x1_ptr,
    weight_ptr,
    bias_ptr,
    weight1_ptr,
    bias1_ptr,
    rowscale_ptr,
    seed_ptr,
    out_ptr,
    out1_ptr,
    sum_ptr,
    mask_ptr,
    mask1_ptr,
    rows,
    columns,
    x_stride,
    residual_stride,
    x1_stride,
    out_stride,
    out1_stride,
    sum_stride,
    eps,
    dropout_p,
    keep_scale,
    IS_RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """sum = dropout(rowscale * x) + dropout(x1) + residual; out = norm(sum) * weight + bias, out1 likewise."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    in_rows = row < rows
    inside = in_rows[:, None] & (column < columns)[None, :]

    total = _load(x_ptr, row, x_stride, column, inside)
    if rowscale_ptr is not None:
        total *= tl.load(rowscale_ptr + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    if seed_ptr is not None:
        kept = _kept(seed_ptr, row, column, 0, dropout_p)
        total = tl.where(kept, total * keep_scale, 0.0)
        if mask_ptr is not None:
            _store(mask_ptr, row, columns, column, inside, kept)
    if x1_ptr is not None:
        added = _load(x1_ptr, row, x1_stride, column, inside)
        if seed_ptr is not None:
            kept1 = _kept(seed_ptr, row, column, 1, dropout_p)
            added = tl.where(kept1, added * keep_scale, 0.0)
            if mask1_ptr is not None:
                _store(mask1_ptr, row, columns, column, inside, kept1)
        total += added
    if residual_ptr is not None:
        total += _load(residual_ptr, row, residual_stride, column, inside)
    if sum_ptr is not None:
        _store(sum_ptr, row, sum_stride, column, inside, total)

    normed, _ = _normalise(total, inside, columns, eps, IS_RMS)
    out = normed * _weight(weight_ptr, column, columns, ZERO_CENTERED)
    if bias_ptr is not None:
        out += _weight(bias_ptr, column, columns, False)
    _store(out_ptr, row, out_stride, column, inside, out)
    if weight1_ptr is not None:
        out1 = normed * _weight(weight1_ptr, column, columns, ZERO_CENTERED)
        if bias1_ptr is not None:
            out1 += _weight(bias1_ptr, column, columns, False)
        _store(out1_ptr, row, out1_stride, column, inside, out1)


@triton.jit
def norm_backward_kernel(
    dout_ptr,
    dout1_ptr,
    dsum_ptr,
    sum_ptr,
    weight_ptr,
    weight1_ptr,
    rowscale_ptr,
    seed_ptr,
    dx_ptr,
    dresidual_ptr,
    dx1_ptr,
    dweight_ptr,
    dbias_ptr,
    dweight1_ptr,
    dbias1_ptr,
    rows,
    columns,
    dout_stride,
    dout1_stride,
    dsum_stride,
    sum_stride,
    rows_per_program,
    eps,
    dropout_p,
    keep_scale,
    IS_RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The gradients of a run of rows, and what these rows add to the gradients of the weights and biases.

    Row p of dweight (programs, columns) belongs to program p alone, so that the sum over rows has one order.
    """
    column = tl.arange(0, COLUMNS)
    weight = _weight(weight_ptr, column, columns, ZERO_CENTERED)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    if dout1_ptr is not None:
        weight1 = _weight(weight1_ptr, column, columns, ZERO_CENTERED)
        dweight1 = tl.zeros([ROWS, COLUMNS], tl.float32)
        dbias1 = tl.zeros([ROWS, COLUMNS], tl.float32)

    first = tl.program_id(0) * rows_per_program
    for start in tl.range(first, tl.minimum(first + rows_per_program, rows), ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        in_rows = row < rows
        inside = in_rows[:, None] & (column < columns)[None, :]
        # Mean and deviation anew: those of the forward are of the sum before it was rounded to its dtype.
        normed, rstd = _normalise(_load(sum_ptr, row, sum_stride, column, inside), inside, columns, eps, IS_RMS)
        dout = _load(dout_ptr, row, dout_stride, column, inside)
        dnormed = dout * weight
        dweight += dout * normed
        if dbias_ptr is not None:
            dbias += dout
        if dout1_ptr is not None:
            dout1 = _load(dout1_ptr, row, dout1_stride, column, inside)
            dnormed += dout1 * weight1
            dweight1 += dout1 * normed
            if dbias1_ptr is not None:
                dbias1 += dout1

        dsum = dnormed - normed * (tl.sum(normed * dnormed, axis=1) / columns)[:, None]
        if not IS_RMS:
            dsum -= (tl.sum(dnormed, axis=1) / columns)[:, None]
        dsum *= rstd
        if dsum_ptr is not None:
            dsum += _load(dsum_ptr, row, dsum_stride, column, inside)
        if dresidual_ptr is not None:
            _store(dresidual_ptr, row, columns, column, inside, dsum)
        if dx1_ptr is not None:
            dx1 = dsum
            if seed_ptr is not None:
                dx1 = tl.where(_kept(seed_ptr, row, column, 1, dropout_p), dsum * keep_scale, 0.0)
            _store(dx1_ptr, row, columns, column, inside, dx1)
        if seed_ptr is not None:
            dsum = tl.where(_kept(seed_ptr, row, column, 0, dropout_p), dsum * keep_scale, 0.0)
        if rowscale_ptr is not None:
            dsum *= tl.load(rowscale_ptr + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        _store(dx_ptr, row, columns, column, inside, dsum)

    partial = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(dweight_ptr + partial, tl.sum(dweight, axis=0), mask=column < columns)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, tl.sum(dbias, axis=0), mask=column < columns)
    if dout1_ptr is not None:
        tl.store(dweight1_ptr + partial, tl.sum(dweight1, axis=0), mask=column < columns)
        if dbias1_ptr is not None:
            tl.store(dbias1_ptr + partial, tl.sum(dbias1, axis=0), mask=column < columns)
