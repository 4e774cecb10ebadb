// A split tile, as the combine finds it: by its index, by a CTA boundary inside it, or by its fixed splits.
#pragma once

#include "kernels/decode/cta_work.h"

namespace flash {
namespace decode {

// A tile with several partial results.
struct SplitTile {
  KvQueries queries;
  int head = 0;
  int first_row = 0;  // packed row
  int rows = 0;       // 0: nothing to combine
  BlockRange range;
  int64_t tile_begin = 0, share = 1;
  int64_t tile = 0;         // index of the tile, for the slots of its fixed splits
  int first = 0, last = 0;  // CTAs, or fixed splits, that left a partial result; some CTAs between may have none
};

// Workspace slot of CTA `index`'s partial result of the tile; -1: it has none.
__device__ __forceinline__ int slot_of_part(const Flash_kvcache_params& params, const SplitTile& tile, int index) {
  const BlockSpan segment =
      block_span(params.split_points, tile.range.begin, kv_count(tile.range), tile.tile_begin, tile.share, index);
  return segment.empty() ? -1 : kv_slot(index, segment);
}

__device__ __forceinline__ void set_item(const Flash_kvcache_params& params, int item, SplitTile& tile) {
  KvItem at;
  if (params.is_varlen()) {
    at = packed_item(params, item);
  } else {
    at = {kv_request(params, item / params.row_tiles), item % params.row_tiles};
  }
  tile.queries = kv_queries<true>(params, at.request.index);
  tile.range = kv_range(params, tile.queries, at.row_tile, at.request.seqlen_k);
  tile.first_row = at.row_tile * params.tile_rows;
}

__device__ __forceinline__ int tile_rows(const Flash_kvcache_params& params, const SplitTile& tile) {
  return min(kv_rows(params, tile.queries) - tile.first_row, params.tile_rows);
}

// The partial results of a tile whose offset in the linearised work is known; `rows` stays 0 if it was not split.
__device__ __forceinline__ void find_parts(const Flash_kvcache_params& params, int first, SplitTile& tile) {
  const int count = kv_count(tile.range);
  const int64_t last = (tile.tile_begin + count - 1) / tile.share;
  tile.first = first;
  tile.last = static_cast<int>(min(last, static_cast<int64_t>(params.thread_blocks) - 1));
  const BlockSpan segment =
      block_span(params.split_points, tile.range.begin, count, tile.tile_begin, tile.share, first);
  const bool has_pair = params.in_clusters && kv_is_cluster_half(segment, count, tile.share, first);
  if (segment.to < count && !has_pair) tile.rows = tile_rows(params, tile);
}

// The tile that CTA boundary `index` splits, if no earlier boundary does.
__device__ __forceinline__ SplitTile tile_split_before(const Flash_kvcache_params& params, int index,
                                                       int64_t* scratch) {
  SplitTile tile;
  CtaWork start = find_cta_work(params, index, scratch);
  if (start.item >= kv_items(params)) return tile;
  set_item(params, start.item, tile);
  const int count = kv_count(tile.range);
  if (start.share == 0) start = cta_work_of_one(params, index, static_cast<int64_t>(params.h_k) * count);
  if (start.item >= kv_items(params)) return tile;
  const KvPlace place = kv_state(start, index, count);
  tile.share = start.share;
  tile.tile_begin = place.tile_begin;
  tile.head = place.head;
  const bool first_inside = index * start.share > place.tile_begin && (index - 1) * start.share <= place.tile_begin;
  if (place.head < params.h_k && first_inside) find_parts(params, index - 1, tile);
  return tile;
}

// Tile `index` of all; the threads add up the n_blocks before it.
__device__ __forceinline__ SplitTile tile_at(const Flash_kvcache_params& params, int index, int64_t* scratch) {
  SplitTile tile;
  const int items = kv_items(params), item = index / params.h_k;
  set_item(params, item, tile);
  const int count = kv_count(tile.range);
  tile.head = index - item * params.h_k;
  int64_t total = static_cast<int64_t>(params.h_k) * count, item_begin = 0;
  if (items > 1) {
    const KvItems own(items, threadIdx.x, 32 * kCombineWarps);
    int64_t before = 0, work = 0;
    for (int i = own.begin; i < own.end; ++i) {
      if (i == item) before = work;
      work += kv_item_work(params, i);
    }
    const int64_t end = block_prefix_sum(work, scratch, total);
    if (own.begin <= item && item < own.end) scratch[kCombineWarps] = end - work + before;
    __syncthreads();
    item_begin = scratch[kCombineWarps];
  }
  tile.share = params.schedule != nullptr ? max(params.schedule->share, int64_t{1})
                                          : blocks_per_cta(total, params.thread_blocks, params.min_blocks_per_cta);
  tile.tile_begin = item_begin + static_cast<int64_t>(tile.head) * count;
  const int64_t first = tile.tile_begin / tile.share;
  if (first < params.thread_blocks) find_parts(params, static_cast<int>(first), tile);
  return tile;
}

__device__ __forceinline__ SplitTile tile_of_runs(const Flash_kvcache_params& params, int64_t index) {
  SplitTile tile;
  set_item(params, static_cast<int>(index / params.h_k), tile);
  tile.tile = index;
  tile.head = static_cast<int>(index % params.h_k);
  if (tile.range.count() <= 0) return tile;
  tile.first = tile.range.begin / params.run_blocks;
  tile.last = (tile.range.end - 1) / params.run_blocks;
  if (tile.last > tile.first) tile.rows = tile_rows(params, tile);
  return tile;
}

}  // namespace decode
}  // namespace flash
