// A split tile, as the combine finds it: by its index, by a CTA boundary inside it, or by its fixed splits.
#pragma once

#include "kernels/decode/cta_work.h"

namespace flash {
namespace decode {

// A tile with several partial results.
struct SplitTile {
  KvQueries queries;
  int head_tile = 0;
  int first_row = 0;  // packed row
  int rows = 0;       // 0: nothing to combine
  BlockRange range;
  int64_t tile_begin = 0, cta_blocks = 1;
  int64_t tile = 0;         // index of the tile, for the slots of its fixed splits
  int first = 0, last = 0;  // CTAs, or fixed splits, that left a partial result; some CTAs between them may have none
};

// Workspace slot of CTA `index`'s partial result of the tile; -1: it has none.
__device__ __forceinline__ int partial_slot(const Flash_kvcache_params& params, const SplitTile& tile, int index) {
  const BlockSpan span =
      block_span(params.split_points, tile.range.begin, kv_count(tile.range), tile.tile_begin, tile.cta_blocks, index);
  return span.empty() ? -1 : kv_slot(index, span);
}

__device__ __forceinline__ void set_work_item(const Flash_kvcache_params& params, int work_item, SplitTile& tile) {
  WorkItem at;
  if (params.is_varlen()) {
    at = packed_work_item(params, work_item);
  } else {
    at = {kv_request(params, work_item / params.row_tiles), work_item % params.row_tiles};
  }
  tile.queries = kv_queries<true>(params, at.request.index);
  tile.range = kv_range(params, tile.queries, at.row_tile, at.request.seqlen_k);
  tile.first_row = at.row_tile * params.tile_rows;
}

__device__ __forceinline__ int tile_rows(const Flash_kvcache_params& params, const SplitTile& tile) {
  return min(kv_rows(params, tile.queries) - tile.first_row, params.tile_rows);
}

// The partial results of a tile whose offset in the linearised work is known; `rows` stays 0 if it was not split.
__device__ __forceinline__ void find_partials(const Flash_kvcache_params& params, int first, SplitTile& tile) {
  const int count = kv_count(tile.range);
  const int64_t last = (tile.tile_begin + count - 1) / tile.cta_blocks;
  tile.first = first;
  tile.last = static_cast<int>(min(last, static_cast<int64_t>(params.thread_blocks) - 1));
  const BlockSpan span =
      block_span(params.split_points, tile.range.begin, count, tile.tile_begin, tile.cta_blocks, first);
  const bool is_half = params.in_clusters && kv_is_cluster_half(span, count, tile.cta_blocks, first);
  if (span.to < count && !is_half) tile.rows = tile_rows(params, tile);
}

// The tile that CTA boundary `index` splits, if no earlier boundary does.
__device__ __forceinline__ SplitTile tile_split_before(const Flash_kvcache_params& params, int index,
                                                       int64_t* scratch) {
  SplitTile tile;
  CtaWork cta_work = find_cta_work(params, index, scratch);
  if (cta_work.work_item >= num_work_items(params)) return tile;
  set_work_item(params, cta_work.work_item, tile);
  const int count = kv_count(tile.range);
  if (cta_work.cta_blocks == 0)
    cta_work = single_item_cta_work(params, index, static_cast<int64_t>(params.head_tiles) * count);
  if (cta_work.work_item >= num_work_items(params)) return tile;
  const TilePosition position = first_tile_position(cta_work, index, count);
  tile.cta_blocks = cta_work.cta_blocks;
  tile.tile_begin = position.tile_begin;
  tile.head_tile = position.head_tile;
  const bool first_inside =
      index * cta_work.cta_blocks > position.tile_begin && (index - 1) * cta_work.cta_blocks <= position.tile_begin;
  if (position.head_tile < params.head_tiles && first_inside) find_partials(params, index - 1, tile);
  return tile;
}

// Tile `index` of all; the threads add up the n_blocks before it.
__device__ __forceinline__ SplitTile tile_at(const Flash_kvcache_params& params, int index, int64_t* scratch) {
  SplitTile tile;
  const int work_items = num_work_items(params), work_item = index / params.head_tiles;
  set_work_item(params, work_item, tile);
  const int count = kv_count(tile.range);
  tile.head_tile = index - work_item * params.head_tiles;
  int64_t total = static_cast<int64_t>(params.head_tiles) * count, work_item_begin = 0;
  if (work_items > 1) {
    const WorkItemRange own(work_items, threadIdx.x, 32 * kCombineWarps);
    int64_t before = 0, work = 0;
    for (int i = own.begin; i < own.end; ++i) {
      if (i == work_item) before = work;
      work += work_item_blocks(params, i);
    }
    const int64_t end = block_prefix_sum(work, scratch, total);
    if (own.begin <= work_item && work_item < own.end) scratch[kCombineWarps] = end - work + before;
    __syncthreads();
    work_item_begin = scratch[kCombineWarps];
  }
  tile.cta_blocks = params.schedule != nullptr ? max(params.schedule->cta_blocks, int64_t{1})
                                               : blocks_per_cta(total, params.thread_blocks, params.min_blocks_per_cta);
  tile.tile_begin = work_item_begin + static_cast<int64_t>(tile.head_tile) * count;
  const int64_t first = tile.tile_begin / tile.cta_blocks;
  if (first < params.thread_blocks) find_partials(params, static_cast<int>(first), tile);
  return tile;
}

__device__ __forceinline__ SplitTile tile_of_fixed_splits(const Flash_kvcache_params& params, int64_t index) {
  SplitTile tile;
  set_work_item(params, static_cast<int>(index / params.head_tiles), tile);
  tile.tile = index;
  tile.head_tile = static_cast<int>(index % params.head_tiles);
  if (tile.range.count() <= 0) return tile;
  tile.first = tile.range.begin / params.split_blocks;
  tile.last = (tile.range.end - 1) / params.split_blocks;
  if (tile.last > tile.first) tile.rows = tile_rows(params, tile);
  return tile;
}

}  // namespace decode
}  // namespace flash
