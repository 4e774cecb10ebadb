"""The Triton kernel of `selected_table`. Imported only where it is launched, for it needs triton."""

import triton
import triton.language as tl


@triton.jit
def selected_table_kernel(
    table_ptr,
    counts_ptr,
    indices_ptr,
    lengths_ptr,
    seqlen_q,
    topk,
    rows,
    page_size,
    page_step,
    row_step,
    batch_stride,
    query_stride,
    index_stride,
    HAS_LENGTHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The entries of one query: those of rows that exist, in order, and how many they are."""
    query = tl.program_id(0).to(tl.int64)
    batch = query // seqlen_q
    first = indices_ptr + batch * batch_stride + (query - batch * seqlen_q) * query_stride
    end = topk
    if HAS_LENGTHS:
        end = tl.minimum(tl.load(lengths_ptr + batch), topk).to(tl.int32)
    count = 0
    for start in range(0, topk, BLOCK):
        place = start + tl.arange(0, BLOCK)
        index = tl.load(first + place.to(tl.int64) * index_stride, mask=place < end, other=-1).to(tl.int64)
        exists = (index >= 0) & (index < rows)
        rank = tl.cumsum(exists.to(tl.int32), 0)
        page = index // page_size
        entry = page * page_step + (index - page * page_size) * row_step
        tl.store(table_ptr + query * topk + count + rank - 1, entry.to(tl.int32), mask=exists)
        count += tl.sum(exists.to(tl.int32), 0)
    tl.store(counts_ptr + query, count)
