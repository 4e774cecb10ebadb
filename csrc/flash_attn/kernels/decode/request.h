// One request of a batch over a KV cache: where its rows lie, which keys it has, and whether it is valid.
#pragma once

#include "core/block_range.h"
#include "core/kv_schedule.h"
#include "kernels/common/sequence.h"
#include "params/kvcache.h"

namespace flash {
namespace decode {

struct KvRequest {
  int index = 0;      // in the batch, and row of the block table; a packed batch has rows before 0 and after b - 1
  int cache_row = 0;  // index in a cache that is not paged
  int first_row = 0;  // row of the cache that is key 0
  int seqlen_k = 0;   // keys, the appended ones included
  int cached = 0;     // rows before the appended ones, and the rotary position of the first query
  // The request does not fit, or part of it lies outside its tensor: it is computed without being read, and its result
  // is replaced. (Lengths alone decide the schedule, which may have been made before.)
  bool invalid = true;
  bool fits = false;  // false: inactive, lengths beyond the cache, or rows of no sequence; such a request has no keys

  __device__ __forceinline__ bool is_valid() const { return !invalid; }
};

// Rows cached before the call.
__device__ __forceinline__ int kv_cached(const Flash_kvcache_params& params, int index) {
  return params.seqlens_k != nullptr ? params.seqlens_k[index] : params.capacity - params.seqlen_new;
}

template <bool kMayRotate = true>
__device__ __forceinline__ KvRequest kv_request(const Flash_kvcache_params& params, int index, int cached) {
  KvRequest request;
  request.index = index;
  request.cached = cached;
  const int leftpad = params.leftpad_k != nullptr ? params.leftpad_k[index] : 0;
  const KvLengths lengths = kv_lengths(request.cached, leftpad, params.seqlen_new, params.capacity);
  request.first_row = lengths.first_row;
  request.seqlen_k = lengths.seqlen_k;
  request.fits = lengths.fits;
  request.invalid = !lengths.fits;
  if (params.paged.block_table == nullptr) {
    const int row = params.cache_batch_idx != nullptr ? params.cache_batch_idx[index] : index;
    const bool exists = static_cast<unsigned>(row) < static_cast<unsigned>(params.cache_batch);
    request.invalid |= !exists;
    request.cache_row = exists ? row : 0;
  }
  if (kMayRotate && params.rotary.cos_ptr != nullptr && request.fits) {
    const Rotary& rotary = params.rotary;
    request.invalid |=
        kv_rotary_rows(request.cached, params.seqlen_q, params.seqlen_new, rotary.one_position) > rotary.rows;
  }
  return request;
}

__device__ __forceinline__ KvRequest kv_request(const Flash_kvcache_params& params, int index) {
  return kv_request(params, index, kv_cached(params, index));
}

// A segment of a packed batch; those before the first and after the last sequence have queries but no keys.
__device__ __forceinline__ KvRequest packed_request(const Flash_kvcache_params& params, int segment) {
  KvRequest request;
  request.index = segment - 1;
  request.fits = segment >= 1 && segment <= params.b;
  request.invalid = !request.fits;
  if (request.invalid) return request;
  WorkTile block;
  block.batch = request.index;
  set_key_range(block, params);
  request.first_row = block.k_begin;
  request.seqlen_k = block.seqlen_k;
  return request;
}

// The queries of a request: rows [first, first + count) of matrix `batch` of q and out.
struct KvQueries {
  int batch = 0;
  int first = 0;
  int count = 0;
};

template <bool kMayBePacked>
__device__ __forceinline__ KvQueries kv_queries(const Flash_kvcache_params& params, int index) {
  if (!kMayBePacked || !params.is_varlen()) return {index, 0, params.seqlen_q};
  const int begin = params.varlen.segments_q[index + 1], end = params.varlen.segments_q[index + 2];
  return {0, begin, end - begin};
}

// Packed rows of one tile's K/V heads.
__device__ __forceinline__ int kv_rows(const Flash_kvcache_params& params, const KvQueries& queries) {
  return queries.count * params.tile_query_heads;
}

__device__ __forceinline__ KvTokens kv_tokens(const Flash_kvcache_params& params, const KvQueries& queries,
                                              int row_tile) {
  const int first = row_tile * params.tile_rows;
  const int last = min(first + params.tile_rows, kv_rows(params, queries)) - 1;
  return {params.tile_group.divide(first), params.tile_group.divide(last) + 1};
}

// n_blocks that a tile visits, masked or not; by lengths and sizes alone.
__device__ __forceinline__ BlockRange kv_range(const Flash_kvcache_params& params, const KvQueries& queries,
                                               int row_tile, int seqlen_k) {
  const int shift = __ffs(params.block_n) - 1;  // a power of two
  BlockRange range;
  if (queries.count == 1 && !params.window.may_mask_left()) {  // most of decoding, and little code
    range.end = (seqlen_k + params.block_n - 1) >> shift;
    return range;
  }
  const KvTokens tokens = kv_tokens(params, queries, row_tile);
  const Visibility visibility{queries.count, seqlen_k, params.window};
  range.begin = visibility.key_begin(tokens.begin) >> shift;
  range.end = (visibility.key_end(tokens.end - 1) + params.block_n - 1) >> shift;
  return range.end > range.begin ? range : BlockRange{};
}

// n_blocks of a row tile in the linearised work, of all heads.
__device__ __forceinline__ int64_t kv_work(const Flash_kvcache_params& params, const KvQueries& queries, int row_tile,
                                           int seqlen_k) {
  return static_cast<int64_t>(params.head_tiles) * kv_count(kv_range(params, queries, row_tile, seqlen_k));
}

// n_blocks of a work item of a dense batch.
__device__ __forceinline__ int64_t work_item_blocks(const Flash_kvcache_params& params, int work_item) {
  const int index = work_item / params.row_tiles;
  const KvRequest request = kv_request(params, index);
  return kv_work(params, kv_queries<false>(params, index), work_item - index * params.row_tiles, request.seqlen_k);
}

// The segments of a packed batch own the work items by varlen_first_slot() of their packed rows: at least as many as
// they have row tiles. Work items beyond these have no rows, and no n_block in the linearised work.
__device__ __forceinline__ int packed_first_work_item(const Flash_kvcache_params& params, const KvQueries& queries,
                                                      int segment) {
  return varlen_first_slot(queries.first * params.tile_query_heads, segment, params.tile_rows);
}

struct WorkItem {
  KvRequest request;
  int row_tile = 0;
};

// All lanes of a warp together.
__device__ __forceinline__ WorkItem packed_work_item(const Flash_kvcache_params& params, int work_item) {
  const int segment =
      find_segment(params.varlen.segments_q, params.b, work_item, params.tile_rows, params.tile_query_heads);
  const int first = packed_first_work_item(params, kv_queries<true>(params, segment - 1), segment);
  return {packed_request(params, segment), max(work_item - first, 0)};
}

// The pages of a request. `slot` is an index into its row of the block table.
struct KvPages {
  const int* table;
  const PagedKv& paged;

  __device__ __forceinline__ KvPages(const Flash_kvcache_params& params, int index)
      : table(params.paged.block_table + index * params.paged.block_table_stride), paged(params.paged) {}

  __device__ __forceinline__ bool in_pool(int page) const {
    return static_cast<unsigned>(page) < static_cast<unsigned>(paged.num_pages);
  }

  // Whether thread `thread` of `threads` finds an invalid page among those of rows [begin, end).
  __device__ __forceinline__ bool has_invalid_page(int begin, int end, int thread, int threads) const {
    if (end <= begin) return false;
    const int last = paged.page_size.divide(end - 1);
    bool invalid = false;
    for (int slot = paged.page_size.divide(begin) + thread; slot <= last; slot += threads) {
      invalid |= !in_pool(table[slot]);
    }
    return invalid;
  }
};

// The rows of the cache that some query of a dense request sees or that the call writes.
struct KvRows {
  int begin;
  int end;
};

__device__ __forceinline__ KvRows kv_required_rows(const Flash_kvcache_params& params, const KvRequest& request) {
  const Visibility visibility{params.seqlen_q, request.seqlen_k, params.window};
  KvRows rows{request.first_row + visibility.key_begin(0), request.first_row + visibility.key_end(params.seqlen_q - 1)};
  if (params.seqlen_new > 0) {
    rows.begin = min(rows.begin, request.cached);
    rows.end = request.first_row + request.seqlen_k;
  }
  return rows;
}

// Whether this thread of `threads` finds an invalid page among those that the request needs.
__device__ __forceinline__ bool needs_invalid_page(const Flash_kvcache_params& params, const KvRequest& request,
                                                   int threads) {
  const KvRows needed = kv_required_rows(params, request);
  return KvPages(params, request.index).has_invalid_page(needed.begin, needed.end, threadIdx.x, threads);
}

// Whether the request and all pages that it needs are valid. All threads of the block together.
__device__ __forceinline__ bool is_active(const Flash_kvcache_params& params, const KvRequest& request) {
  bool invalid = !request.is_valid();
  if (params.paged.block_table != nullptr && !invalid) invalid = needs_invalid_page(params, request, blockDim.x);
  return !__syncthreads_or(invalid);
}

}  // namespace decode
}  // namespace flash
