// The work of a thread block of the MLA decode kernels, and where its results go.
#pragma once

#include "core/block_range.h"
#include "core/kv_schedule.h"
#include "kernels/common/paged_kv.h"
#include "kernels/common/partial.h"
#include "kernels/common/sequence.h"
#include "params/mla.h"

namespace flash {
namespace mla {

// What a thread block computes: a tile of a request's rows, over a split of the keys that they see.
struct MlaWork {
  int request = 0, split;           // request: of the block_table
  int matrix = 0, first_token = 0;  // of q, o and the LSE, where the request's tokens are
  int tokens, first_row, rows;      // rows of the request: tokens x heads
  int begin = 0, end = 0;           // keys of the request
  int seen;                         // keys before this one are visible to some row of the tile
  int from, to;                     // steps of the split
  bool is_valid;

  // All lanes of a warp together.
  __device__ __forceinline__ MlaWork(const Flash_mla_params& params, int tile_rows, int step_keys) {
    // Causal queries see the more keys the later they are: the longest tiles first, so that short ones end the grid.
    const int block = static_cast<int>(params.is_causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    const int tile = block / params.splits;
    split = block - tile * params.splits;
    if (params.segments_q != nullptr) {
      set_packed(params, tile, tile_rows);
    } else {
      set_dense(params, tile, tile_rows);
    }
    const int last_row = min(first_row + tile_rows, rows) - 1;
    seen = is_valid && last_row >= first_row ? max(key_end(params, last_row), begin) : begin;
    const int first_step = begin / step_keys;
    const int steps = seen == begin ? 0 : (seen + step_keys - 1) / step_keys - first_step;
    const int split_steps = (steps + params.splits - 1) / params.splits;
    from = first_step + min(split * split_steps, steps);
    to = first_step + min((split + 1) * split_steps, steps);
  }

  __device__ __forceinline__ void set_dense(const Flash_mla_params& params, int tile, int tile_rows) {
    request = matrix = tile / params.row_tiles;
    tokens = params.seqlen_q;
    first_row = (tile - request * params.row_tiles) * tile_rows;
    rows = tokens * params.h;
    const int64_t keys = static_cast<int64_t>(params.paged.pages_per_sequence) * params.paged.page_size.divisor;
    const int capacity = static_cast<int>(min(keys, int64_t{kMaxLength}));
    const int leftpad = params.leftpad_k == nullptr ? 0 : params.leftpad_k[request];
    const int length = params.seqlens_k == nullptr ? capacity : params.seqlens_k[request];
    const KvLengths lengths = kv_lengths(length, leftpad, 0, capacity);
    is_valid = lengths.fits;
    if (!is_valid) return;
    begin = lengths.first_row;
    end = begin + lengths.seqlen_k;
  }

  __device__ __forceinline__ void set_packed(const Flash_mla_params& params, int tile, int tile_rows) {
    const int segment = find_segment(params.segments_q, params.b, tile, tile_rows, params.h);
    first_token = params.segments_q[segment];
    tokens = params.segments_q[segment + 1] - first_token;
    first_row = (tile - varlen_first_slot(first_token * params.h, segment, tile_rows)) * tile_rows;
    rows = tokens * params.h;
    is_valid = segment >= 1 && segment <= params.b;
    if (!is_valid) return;
    request = segment - 1;
    begin = params.key_ranges[2 * request];
    end = begin + params.key_ranges[2 * request + 1];
  }

  // Keys before this one are visible to a row.
  __device__ __forceinline__ int key_end(const Flash_mla_params& params, int row) const {
    if (row >= rows) return 0;
    return params.is_causal ? end - tokens + params.heads.divide(row) + 1 : end;
  }

  __device__ __forceinline__ const int* table(const Flash_mla_params& params) const {
    return params.paged.block_table + request * params.paged.block_table_stride;
  }

  // The block_table entry for key `key` of step `step`, not checked; -1 for a key outside of the work.
  __device__ __forceinline__ int find_page(const Flash_mla_params& params, int key, int step) const {
    return page_row(params.paged, table(params), key, step < to && key >= begin && key < end).page;
  }

  // Whether `page`, which find_page() returned, is none that exists although the request needs it.
  __device__ __forceinline__ bool lacks_page(const Flash_mla_params& params, int key, int step, int page) const {
    const bool exists = static_cast<unsigned>(page) < static_cast<unsigned>(params.paged.num_pages);
    return params.segments_q == nullptr && !exists && step < to && key >= begin && key < end;
  }

  // Whether the block_table lacks one of the pages `thread`, thread + threads, ... of keys from `first` on that this
  // split answers for: those before `own_end`, and the last split for all that causal queries of other tiles see.
  __device__ __forceinline__ bool lacks_pages(const Flash_mla_params& params, int first, int own_end, int thread,
                                              int threads) const {
    const int checked = split + 1 < params.splits ? min(own_end, end) : end;
    if (params.segments_q != nullptr || checked <= first) return false;
    const int* const pages = table(params);
    constexpr int kReads = 8;  // in flight; beyond the end the last one again
    unsigned largest = 0;
    const int last = params.paged.page_size.divide(checked - 1);
#pragma unroll 1
    for (int slot = params.paged.page_size.divide(first) + thread; slot <= last; slot += kReads * threads) {
#pragma unroll
      for (int i = 0; i < kReads; ++i) {
        largest = max(largest, static_cast<unsigned>(pages[min(slot + i * threads, last)]));
      }
    }
    return largest >= static_cast<unsigned>(params.paged.num_pages);
  }

  // Elements of q or qv.
  __device__ __forceinline__ int64_t query_offset(const Flash_mla_params& params, const MatrixStrides& strides,
                                                  int row) const {
    const int token = params.heads.divide(row), head = row - token * params.h;
    return matrix * strides.batch + (first_token + token) * strides.row + head * strides.head;
  }
};

// The end of a row: the factor of its output, and where this goes. Writes the LSE.
template <class Element>
struct MlaRowEnd {
  bool has_keys;
  float scale = 0.0f;
  float* partial = nullptr;  // of split keys
  Element* out = nullptr;    // otherwise

  __device__ __forceinline__ MlaRowEnd(const Flash_mla_params& params, const MlaWork& work, int row,
                                       const RowStats& stats, bool writes_lse) {
    const bool is_split = params.splits > 1;
    const int token = params.heads.divide(row), head = row - token * params.h;
    const float sink = is_split || params.sinks_ptr == nullptr ? -INFINITY : params.sinks_ptr[head];
    const RowEnd end(stats, params.softmax_scale_log2, sink);
    has_keys = end.has_keys();
    if (has_keys) scale = end.o_scale();
    const int at_token = work.first_token + token;
    const int64_t at = (static_cast<int64_t>(work.matrix) * params.h + head) * params.seqlen_q + at_token;
    const int64_t matrices = params.segments_q == nullptr ? params.b : 1, rows = matrices * params.h * params.seqlen_q;
    if (writes_lse) {
      const float lse = end.lse();
      const bool is_empty = is_split && lse == INFINITY && !stats.invalid();  // ptxas spills for !has_keys
      (is_split ? params.partial_lse + work.split * rows : params.softmax_lse_ptr)[at] = is_empty ? -INFINITY : lse;
    }
    if (is_split) {
      const int64_t slot =
          work.split * rows + (static_cast<int64_t>(work.matrix) * params.seqlen_q + at_token) * params.h;
      partial = params.partial_o + (slot + head) * kMlaLatentDim;
    } else {
      out = static_cast<Element*>(params.o_ptr) + work.query_offset(params, params.o_strides, row);
    }
  }

  // 0 without keys: values of an invalid request may be NaN.
  __device__ __forceinline__ float scaled(float value) const { return has_keys ? value * scale : 0.0f; }
};

}  // namespace mla
}  // namespace flash
