"""The Triton kernels of `cross_entropy_loss`. Imported only where they are launched, for they need triton."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # finite: the difference of the maxima of two lanes without a logit must not be NaN


@triton.jit
def _add_scores(score, largest, total):
    """Take a tile of scores (lanes, VECTOR), in units of log 2, into the running maximum and sum of every lane.

    A tile's row lies in one thread, so that nothing here crosses threads.
    """
    new = tl.maximum(largest, tl.max(score, axis=1))
    return new, total * tl.exp2(largest - new) + tl.sum(tl.exp2(score - new[:, None]), axis=1)


@triton.jit
def cross_entropy_forward_kernel(
    losses_ptr,
    z_losses_ptr,
    lse_ptr,
    logits_ptr,
    labels_ptr,
    row_stride,
    columns,
    first_class,
    classes,
    ignore_index,
    logit_scale,
    smoothing,
    lse_square_scale,
    HAS_SMOOTHING: tl.constexpr,
    LSE_GIVEN: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row: its log-sum-exp and its loss. PARTIAL: the logits are a part of the vocabulary, and the loss is instead
    what the row's logits here subtract from the LSE of all parts. Ignored rows are not read."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * row_stride
    label = tl.load(labels_ptr + row).to(tl.int64)
    ignored = label == ignore_index

    logits_sum = 0.0
    if LSE_GIVEN:
        lse = tl.load(lse_ptr + row)
    else:
        # Tiles start at multiples of VECTOR, wherever rows do; the first and the last are masked, the others are not.
        end = begin + tl.where(ignored, 0, columns)
        start = begin // VECTOR * VECTOR
        tiles = ((end - start + BLOCK - 1) // BLOCK).to(tl.int32)
        offset = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        largest = tl.full([BLOCK // VECTOR], LOWEST, tl.float32)
        total = tl.zeros([BLOCK // VECTOR], tl.float32)
        plain_sum = tl.zeros([BLOCK // VECTOR], tl.float32)
        for edge in range(0, tl.minimum(tiles, 2)):
            index = start + edge * (tiles - 1) * BLOCK + offset
            inside = (index >= begin) & (index < end)
            logit = tl.load(logits_ptr + index, mask=inside, other=0.0).to(tl.float32)
            if HAS_SMOOTHING:
                plain_sum += tl.sum(logit, axis=1)
            score = tl.where(inside, logit * (logit_scale * LOG2_E), -float("inf"))
            largest, total = _add_scores(score, largest, total)
        for tile in tl.range(1, tiles - 1, num_stages=STAGES):
            logit = tl.load(logits_ptr + start + tile * BLOCK + offset).to(tl.float32)
            if HAS_SMOOTHING:
                plain_sum += tl.sum(logit, axis=1)
            largest, total = _add_scores(logit * (logit_scale * LOG2_E), largest, total)
        row_largest = tl.max(largest, axis=0)
        total = tl.sum(total * tl.exp2(largest - row_largest), axis=0)
        lse = row_largest * LN_2 + tl.log2(total) * LN_2
        logits_sum = tl.sum(plain_sum, axis=0) * logit_scale
        tl.store(lse_ptr + row, lse)

    column = label - first_class
    here = (column >= 0) & (column < columns) & (label != ignore_index)
    subtracted = tl.load(logits_ptr + begin + column, mask=here, other=0.0).to(tl.float32) * logit_scale
    if HAS_SMOOTHING:
        subtracted = (1.0 - smoothing) * subtracted + smoothing / classes * logits_sum
    if PARTIAL:
        tl.store(losses_ptr + row, subtracted)
    else:
        z_loss = lse_square_scale * lse * lse
        loss = tl.where((label >= 0) & (label < classes), lse - subtracted + z_loss, float("nan"))
        tl.store(losses_ptr + row, tl.where(ignored, 0.0, loss))
        tl.store(z_losses_ptr + row, tl.where(ignored, 0.0, z_loss))


@triton.jit
def cross_entropy_backward_kernel(
    dlogits_ptr,
    dlosses_ptr,
    logits_ptr,
    lse_ptr,
    labels_ptr,
    dlogits_row_stride,
    dlosses_stride,
    row_stride,
    columns,
    first_class,
    classes,
    ignore_index,
    logit_scale,
    smoothing,
    lse_square_scale,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row of the gradient. dlogits may be logits. Ignored rows are not read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    label = tl.load(labels_ptr + row).to(tl.int64)
    live = label != ignore_index
    lse = tl.load(lse_ptr + row)
    factor = tl.load(dlosses_ptr + row * dlosses_stride).to(tl.float32) * logit_scale
    factor = tl.where((label >= 0) & (label < classes), factor, float("nan"))
    wanted = column < tl.where(live, columns, 0)
    logit = tl.load(logits_ptr + row * row_stride + column, mask=wanted, other=0.0).to(tl.float32)
    grad = tl.exp2((logit * logit_scale - lse) * LOG2_E) * (1.0 + 2.0 * lse_square_scale * lse) - smoothing / classes
    grad = tl.where(column == label - first_class, grad - (1.0 - smoothing), grad)
    tl.store(dlogits_ptr + row * dlogits_row_stride + column, tl.where(live, grad * factor, 0.0), mask=inside)
