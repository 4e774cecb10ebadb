// KV block order of a work tile: the same for producer and consumers but for the rotation of unmasked blocks behind a
// window.
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
// starts low would be updated in nearly every block. Where the right side is masked, it is the diagonal's block of the
// first row, which all rows see but those a window keeps from it; it is a masked block, which takes the non-speculative
// path as any first block does.
template <class Config>
__device__ __forceinline__ typename Config::Order kv_block_order(const FwdLaunch& launch, const WorkTile& tile,
                                                                 int split = 0, int splits = 1) {
  const Flash_fwd_params& params = launch.params;
  if constexpr (Config::kListed) {
    return block_list(launch.mask.lists, list_index(params, launch.mask, tile, Config::kBlockM));
  } else {
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
  } else if constexpr (Config::kDescending) {
    return order.range.end - 1 - step;
  } else {
    return Config::kAlignUnmasked ? order.block_to_load(step) : order.block(step);
  }
}

}  // namespace sm90
}  // namespace flash
