// KV block order of a work tile: the same for producer and consumers, except for the rotation of the unmasked blocks of
// a window.
#pragma once

#include "core/block_range.h"
#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/fwd_config.h"
#include "kernels/sm90/fwd_launch_params.h"

namespace flash {
namespace sm90 {

// With score modifiers the first block is near the diagonal: under ALiBi its scores are the highest, and a row max that
// starts low would be updated in nearly every block. If the right side is masked, it is the block with the diagonal of
// the first row: a masked block, which all rows see except those that a window keeps from it. It takes the
// non-speculative path like any first block.
template <class Config>
__device__ __forceinline__ typename Config::Order kv_block_order(const FwdLaunch& launch, const WorkTile& tile,
                                                                 int split = 0, int splits = 1) {
  const Flash_fwd_params& params = launch.params;
  if constexpr (Config::kListed) {
    if (Config::kBiased && launch.mask.lists.entries == nullptr) {
      const BlockRange range =
          block_range(mask_of<Config>(params, tile), tile.row_begin, tile.row_end, Config::kBlockN);
      return {nullptr, range.unmasked_end, range.end};
    }
    return {block_list(launch.mask.lists, list_index(params, launch.mask, tile, Config::kBlockM))};
  } else {
    if constexpr (Config::kCluster > 1) {
      const int blocks = tile.seqlen_k / Config::kBlockN;
      return KvBlockOrder{BlockRange{0, blocks, 0, blocks}};
    }
    const MaskOf<Config> visibility = mask_of<Config>(params, tile);
    KvBlockOrder order{block_range(visibility, tile.row_begin, tile.row_end, Config::kBlockN)};
    if constexpr (Config::kSplitKv) order.range = split_range(order.range, split, splits);
    if constexpr (Config::kHasScoreMod) {
      if (order.count() == 0) return order;
      const int row = tile.row_begin + (visibility.may_mask_right() ? 0 : Config::kBlockM / 2);
      order.start_at(min(max(visibility.diagonal(row) / Config::kBlockN, order.range.begin), order.range.end - 1));
    } else if constexpr (Config::kAlignUnmasked) {
      order.align_unmasked(launch.unmasked_blocks);
    }
    return order;
  }
}

// The n_block to load at a step.
template <class Config>
__device__ __forceinline__ int block_to_load(const typename Config::Order& order, int step) {
  if constexpr (Config::kListed) {
    return order.at(step).block();
  } else if constexpr (Config::kCluster > 1) {
    return step;
  } else if constexpr (Config::kDescending) {
    return order.range.end - 1 - step;
  } else {
    return Config::kAlignUnmasked ? order.block_to_load(step) : order.block(step);
  }
}

}  // namespace sm90
}  // namespace flash
