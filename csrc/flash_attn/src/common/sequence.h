// From a thread block's index to its rows: which sequence, which head, which query rows, which keys.
#pragma once

#include "common/block_range.h"
#include "flash.h"

namespace flash {

struct RowBlock {
  int batch = 0;  // sequence index; 0 for rows that belong to no sequence, which have seqlen_k = 0
  int head = 0;
  int q_begin = 0;  // first row of the sequence in the packed tensor; 0 for dense batches
  int seqlen_q = 0;
  int k_begin = 0;  // first key row: in the packed tensor, or within the pages of the sequence
  int seqlen_k = 0;
  int row_begin = 0;  // of this block, within the sequence
  int row_end = 0;    // <= seqlen_q; the block has no rows when row_end <= row_begin

  __device__ __forceinline__ bool empty() const { return row_end <= row_begin; }
};

__device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

// First row of a segment (see varlen_first_slot); segment batch + 2 is the end.
__device__ __forceinline__ int segment_begin(const int* cu_seqlens, int batch, int total_rows, int segment) {
  if (segment == 0) return 0;
  return segment <= batch + 1 ? clamp(cu_seqlens[segment - 1], 0, total_rows) : total_rows;
}

// The segment that owns a slot, found by all lanes of a warp together: 32 probes a round, so that up to 30 sequences
// cost one memory latency.
__device__ __forceinline__ int find_segment(const int* cu_seqlens, int batch, int total_rows, int slot, int block_m) {
  const int lane = threadIdx.x % 32;
  int low = 0, count = batch + 2;
  while (count > 1) {
    const int stride = (count + 31) / 32;
    const int probe = lane * stride;
    const bool reached = probe < count && varlen_first_slot(segment_begin(cu_seqlens, batch, total_rows, low + probe),
                                                            low + probe, block_m) <= slot;
    const int reached_probes = max(__popc(__ballot_sync(0xffffffffu, reached)), 1);
    low += (reached_probes - 1) * stride;
    count = min(stride, count - (reached_probes - 1) * stride);
  }
  return low;
}

__device__ __forceinline__ void set_key_range(RowBlock& block, const Flash_fwd_params& params) {
  const Varlen& varlen = params.varlen;
  const bool paged = params.paged.block_table != nullptr;
  const int begin = varlen.cu_seqlens_k[block.batch];
  const int length = max(varlen.cu_seqlens_k[block.batch + 1] - begin, 0);
  const int64_t table = static_cast<int64_t>(params.paged.pages_per_sequence) * params.paged.page_size.divisor;
  const int capacity = paged ? static_cast<int>(min(table, int64_t{kMaxLength}))
                             : min(length, params.seqlen_k - clamp(begin, 0, params.seqlen_k));
  const int used = varlen.seqused_k != nullptr ? varlen.seqused_k[block.batch] : length;
  const int leftpad = varlen.leftpad_k != nullptr ? max(varlen.leftpad_k[block.batch], 0) : 0;
  block.k_begin = (paged ? 0 : clamp(begin, 0, params.seqlen_k)) + leftpad;
  block.seqlen_k = max(clamp(used, 0, capacity) - leftpad, 0);
}

__device__ __forceinline__ RowBlock varlen_row_block(const Flash_fwd_params& params, int block_m) {
  const int slots = varlen_slot_count(params.seqlen_q, params.b, block_m);
  const int slot = blockIdx.x % slots;
  const int* cu_seqlens_q = params.varlen.cu_seqlens_q;
  const int segment = find_segment(cu_seqlens_q, params.b, params.seqlen_q, slot, block_m);
  RowBlock block;
  block.head = blockIdx.x / slots;
  block.q_begin = segment_begin(cu_seqlens_q, params.b, params.seqlen_q, segment);
  block.seqlen_q = max(segment_begin(cu_seqlens_q, params.b, params.seqlen_q, segment + 1) - block.q_begin, 0);
  if (segment >= 1 && segment <= params.b) {
    block.batch = segment - 1;
    set_key_range(block, params);
  }
  // The last rows of a sequence see the most keys under a causal mask: they go first.
  const int first_slot = varlen_first_slot(block.q_begin, segment, block_m);
  const int row_blocks = (block.seqlen_q + block_m - 1) / block_m;
  block.row_begin = (row_blocks - 1 - (slot - first_slot)) * block_m;
  block.row_end = block.row_begin < 0 ? block.row_begin : min(block.row_begin + block_m, block.seqlen_q);
  return block;
}

__device__ __forceinline__ RowBlock dense_row_block(const Flash_fwd_params& params, int block_m) {
  const int row_blocks = (params.seqlen_q + block_m - 1) / block_m;
  const int batch_head = blockIdx.x / row_blocks;
  RowBlock block;
  block.head = batch_head % params.h;
  block.batch = batch_head / params.h;
  block.seqlen_q = params.seqlen_q;
  block.seqlen_k = params.seqlen_k;
  block.row_begin = (row_blocks - 1 - blockIdx.x % row_blocks) * block_m;
  block.row_end = min(block.row_begin + block_m, block.seqlen_q);
  return block;
}

__device__ __forceinline__ RowBlock row_block(const Flash_fwd_params& params, int block_m) {
  return params.varlen.cu_seqlens_q != nullptr ? varlen_row_block(params, block_m) : dense_row_block(params, block_m);
}

// Element offset of (sequence, head) in Q or O. Packed tensors have a batch stride of 0.
__device__ __forceinline__ int64_t q_offset(const RowBlock& block, const MatrixStrides& strides) {
  const int64_t batch = strides.batch == 0 ? 0 : block.batch * strides.batch;
  return batch + block.q_begin * strides.row + block.head * strides.head;
}

__device__ __forceinline__ int64_t lse_offset(const RowBlock& block, const Flash_fwd_params& params) {
  const int64_t head =
      params.varlen.cu_seqlens_q != nullptr ? block.head : static_cast<int64_t>(block.batch) * params.h + block.head;
  return head * params.seqlen_q + block.q_begin;
}

}  // namespace flash
