// Work tiles: from an index to sequence, head, query rows and keys; and element offsets of tensors that follow from it.
#pragma once

#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "params/flash.h"
#include "plan/grid.h"

namespace flash {

struct WorkTile {
  int batch = 0;  // sequence index; 0 for rows of no sequence, which have seqlen_k = 0
  int head = 0;
  int q_begin = 0;  // first row of the sequence in the packed tensor; 0 for dense batches
  int seqlen_q = 0;
  int k_begin = 0;  // first key row: in the packed tensor, or in the pages of the sequence
  int seqlen_k = 0;
  int row_begin = 0;  // of the m_block, within the sequence
  int row_end = 0;    // <= seqlen_q; the tile is empty when row_end <= row_begin
  int segment = 0;    // of a packed batch, see varlen_first_slot

  __device__ __forceinline__ bool empty() const { return row_end <= row_begin; }
};

// Whether the tile's rows belong to a sequence: packed tensors may have rows before the first sequence and after the
// last one.
__device__ __forceinline__ bool in_sequence(const Flash_fwd_params& params, const WorkTile& tile) {
  return !params.is_varlen() || (tile.segment >= 1 && tile.segment <= params.b);
}

// The sink logit of the tile's rows, base e; -inf: none.
__device__ __forceinline__ float row_sink(const Flash_fwd_params& params, const WorkTile& tile) {
  return params.sinks_ptr != nullptr && in_sequence(params, tile) ? params.sinks_ptr[tile.head] : -INFINITY;
}

// The LSE of a fully masked row: the sink, or +inf.
__device__ __forceinline__ float fully_masked_lse(const Flash_fwd_params& params, const WorkTile& tile) {
  const float sink = row_sink(params, tile);
  return sink == -INFINITY ? INFINITY : sink;
}

__device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

// The segment that owns a slot, found by all lanes of a warp: a 32-way search, so that up to 30 sequences cost one
// memory latency. `packed`: rows of a tile per row of the tensor (packed query heads).
__device__ __forceinline__ int find_segment(const int* segments, int batch, int slot, int block_m, int packed = 1) {
  const int lane = threadIdx.x % 32;
  int low = 0, count = batch + 2;
  while (count > 1) {
    const int stride = (count + 31) / 32;
    const int probe = lane * stride;
    const bool reached =
        probe < count && varlen_first_slot(packed * segments[low + probe], low + probe, block_m) <= slot;
    const int reached_probes = max(__popc(__ballot_sync(0xffffffffu, reached)), 1);
    low += (reached_probes - 1) * stride;
    count = min(stride, count - (reached_probes - 1) * stride);
  }
  return low;
}

__device__ __forceinline__ void set_key_range(WorkTile& tile, const Flash_fwd_params& params) {
  tile.k_begin = params.varlen.key_ranges[2 * tile.batch];
  tile.seqlen_k = params.varlen.key_ranges[2 * tile.batch + 1];
}

// Sets the rows of m_block `from_last`, counted from the last one of the sequence: under a causal mask the last rows
// see the most keys, so the longest work tile comes first.
__device__ __forceinline__ void set_rows(WorkTile& tile, int block_m, int from_last) {
  const int m_blocks = (tile.seqlen_q + block_m - 1) / block_m;
  tile.row_begin = (m_blocks - 1 - from_last) * block_m;
  tile.row_end = tile.row_begin < 0 ? tile.row_begin : min(tile.row_begin + block_m, tile.seqlen_q);
}

// The work tile of a segment, without head and rows.
__device__ __forceinline__ WorkTile varlen_segment(const Flash_fwd_params& params, int segment) {
  const int* segments = params.varlen.segments_q;
  WorkTile tile;
  tile.segment = segment;
  tile.q_begin = segments[segment];
  tile.seqlen_q = segments[segment + 1] - tile.q_begin;
  if (in_sequence(params, tile)) {
    tile.batch = segment - 1;
    set_key_range(tile, params);
  }
  return tile;
}

__device__ __forceinline__ WorkTile varlen_work_tile(const Flash_fwd_params& params, int block_m, int head, int slot) {
  const int segment = find_segment(params.varlen.segments_q, params.b, slot, block_m);
  WorkTile tile = varlen_segment(params, segment);
  tile.head = head;
  set_rows(tile, block_m, slot - varlen_first_slot(tile.q_begin, segment, block_m));
  return tile;
}

// `from_last`: m_block of the head, counted from the last one. All sequences have seqlen_k keys.
__device__ __forceinline__ WorkTile equal_work_tile(const Flash_fwd_params& params, int block_m, int batch, int head,
                                                    int from_last) {
  const int m_blocks = (params.seqlen_q + block_m - 1) / block_m;
  WorkTile tile;
  tile.head = head;
  tile.batch = batch;
  tile.seqlen_q = params.seqlen_q;
  tile.seqlen_k = params.seqlen_k;
  tile.row_begin = (m_blocks - 1 - from_last) * block_m;
  tile.row_end = min(tile.row_begin + block_m, tile.seqlen_q);
  return tile;
}

// The same where the device may know how many each has.
__device__ __forceinline__ WorkTile dense_work_tile(const Flash_fwd_params& params, int block_m, int batch, int head,
                                                    int from_last) {
  WorkTile tile = equal_work_tile(params, block_m, batch, head, from_last);
  if (params.varlen.key_ranges != nullptr) set_key_range(tile, params);
  return tile;
}

// Work tile `index` of plan::m_blocks() per head, by all lanes of a warp: head after head, in each the m_blocks in
// descending order.
__device__ __forceinline__ WorkTile work_tile_at(const Flash_fwd_params& params, int block_m, int index) {
  if (params.is_varlen()) {
    const int slots = varlen_slot_count(params.seqlen_q, params.b, block_m), head = index / slots;
    return varlen_work_tile(params, block_m, head, index - head * slots);
  }
  const int m_blocks = (params.seqlen_q + block_m - 1) / block_m;
  const int batch_head = index / m_blocks, batch = batch_head / params.h;
  return dense_work_tile(params, block_m, batch, batch_head - batch * params.h, index - batch_head * m_blocks);
}

// The same by divisions that the host has prepared, of sequences of the length given.
struct HeadTiles {
  FastDiv heads;          // of a sequence
  FastDiv tiles_of_head;  // m_blocks, or slots of packed sequences

  __device__ __forceinline__ WorkTile at(const Flash_fwd_params& params, int block_m, int index) const {
    const int head = tiles_of_head.divide(index), block = index - head * tiles_of_head.divisor;
    if (params.is_varlen()) return varlen_work_tile(params, block_m, head, block);
    const int batch = heads.divide(head);
    return equal_work_tile(params, block_m, batch, head - batch * heads.divisor, block);
  }
};

// For kernels before or after the main kernel, which visits heads in ascending order. In descending order a kernel
// before it ends with the heads that the main kernel begins with, and a kernel after it begins with those that the main
// kernel ended with, while they are in L2.
__device__ __forceinline__ int reversed_block() { return static_cast<int>(gridDim.x - 1 - blockIdx.x); }

// The work tile of the backward: one n_block of one K/V head, and the queries of its sequence.
struct BwdWorkTile {
  int batch = 0;
  int head_k = 0;
  int q_begin = 0;
  int seqlen_q = 0;  // 0 for keys of no sequence: their gradients are 0
  int k_begin = 0;
  int seqlen_k = 0;
  int n_block = 0;
  int q_segment = 0;  // of the queries, for varlen_first_slot

  __device__ __forceinline__ bool empty(int block_n) const { return n_block * block_n >= seqlen_k; }
};

__device__ __forceinline__ BwdWorkTile varlen_bwd_work_tile(const Flash_bwd_params& params, int block_n, HeadBlock at) {
  const int* segments_k = params.varlen.segments_k;
  const int* segments_q = params.varlen.segments_q;
  const int segment = find_segment(segments_k, params.b, at.block, block_n);
  BwdWorkTile tile;
  tile.head_k = at.head;
  tile.k_begin = segments_k[segment];
  tile.seqlen_k = segments_k[segment + 1] - tile.k_begin;
  tile.n_block = at.block - varlen_first_slot(tile.k_begin, segment, block_n);
  if (segment >= 1 && segment <= params.b) {
    tile.batch = segment - 1;
    tile.q_segment = segment;
    tile.q_begin = segments_q[segment];
    tile.seqlen_q = segments_q[segment + 1] - tile.q_begin;
  }
  return tile;
}

// Work tile `index` of plan::bwd_grid(), by all lanes of a warp.
__device__ __forceinline__ BwdWorkTile bwd_work_tile_at(const Flash_bwd_params& params, int block_n, int index,
                                                        const BwdGrid& grid) {
  const HeadBlock at = grid.order.at(index);
  if (params.is_varlen()) return varlen_bwd_work_tile(params, block_n, at);
  BwdWorkTile tile;
  tile.n_block = at.block;
  tile.batch = grid.heads_k.divide(at.head);
  tile.head_k = at.head - tile.batch * params.h_k;
  tile.seqlen_q = params.seqlen_q;
  tile.seqlen_k = params.seqlen_k;
  return tile;
}

// Element offset of (sequence, row, head); `row` counts within the packed tensor if is_varlen.
__device__ __forceinline__ int64_t matrix_offset(const MatrixStrides& strides, bool is_varlen, int batch, int row,
                                                 int head) {
  return (is_varlen ? 0 : batch * strides.batch) + row * strides.row + head * strides.head;
}

// Index of the first fp32 dQ tile of (sequence, head): with packed sequences m_blocks are numbered by varlen slots.
__device__ __forceinline__ int64_t first_dq_tile(const Flash_fwd_params& params, int batch, int head, int q_begin,
                                                 int q_segment, int block_m) {
  if (params.is_varlen()) {
    return static_cast<int64_t>(head) * varlen_slot_count(params.seqlen_q, params.b, block_m) +
           varlen_first_slot(q_begin, q_segment, block_m);
  }
  const int m_blocks = (params.seqlen_q + block_m - 1) / block_m;
  return (static_cast<int64_t>(batch) * params.h + head) * m_blocks;
}

// Index of the dQ tile of a step.
__device__ __forceinline__ int64_t dq_tile_index(const Flash_bwd_params& params, const BwdWorkTile& tile,
                                                 const QStep& at, int block_m) {
  return first_dq_tile(params, tile.batch, at.head, tile.q_begin, tile.q_segment, block_m) + at.m_block;
}

// Element offset of (sequence, head) in Q or O. Packed tensors have a batch stride of 0.
__device__ __forceinline__ int64_t q_offset(const WorkTile& tile, const MatrixStrides& strides) {
  const int64_t batch = strides.batch == 0 ? 0 : tile.batch * strides.batch;
  return batch + tile.q_begin * strides.row + tile.head * strides.head;
}

// Rows of (sequence, head) in the LSE: (b, h, seqlen_q) or (h, total_q).
__device__ __forceinline__ int64_t lse_offset(const Flash_fwd_params& params, int batch, int head, int q_begin) {
  const int64_t matrix = params.is_varlen() ? head : static_cast<int64_t>(batch) * params.h + head;
  return matrix * params.seqlen_q + q_begin;
}

// The same in softmax_d, whose matrices have plan::softmax_d_rows() rows.
__device__ __forceinline__ int64_t softmax_d_offset(const Flash_bwd_params& params, int batch, int head, int q_begin) {
  if (!params.is_varlen()) return (static_cast<int64_t>(batch) * params.h + head) * params.d_rows;
  return head * params.d_rows + q_begin + plan::kSoftmaxDGap * batch;
}

__device__ __forceinline__ int64_t lse_offset(const WorkTile& tile, const Flash_fwd_params& params) {
  return lse_offset(params, tile.batch, tile.head, tile.q_begin);
}

}  // namespace flash
