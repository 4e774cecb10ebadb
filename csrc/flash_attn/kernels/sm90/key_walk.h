// The order in which the key blocks of a row block are visited, the same for those who load and those who compute but
// for the interior behind a window.
#pragma once

#include "core/block_range.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/fwd_config.h"
#include "kernels/sm90/fwd_launch_params.h"

namespace flash {
namespace sm90 {

// With score modifiers the first block is one near the diagonal. Under ALiBi its scores are the highest, and references
// that start low would rise in nearly every block on the way to it. Where the right side is masked it is the diagonal's
// block of the first row, which all rows see but those that a window keeps from it: an edge, and edges go the long way,
// as the first block does.
template <class Config>
__device__ __forceinline__ KeyWalk key_walk(const FwdLaunch& launch, const RowBlock& block, int share = 0,
                                            int shares = 1) {
  const Flash_fwd_params& params = launch.params;
  const Visibility visibility{block.seqlen_q, block.seqlen_k, params.window};
  KeyWalk walk{block_range(visibility, block.row_begin, block.row_end, Config::kBlockN)};
  if constexpr (Config::kSharesKeys) walk.range = share_of(walk.range, share, shares);
  if constexpr (Config::kHasScoreMod) {
    if (walk.count() == 0) return walk;
    const int row = block.row_begin + (params.window.right == kUnbounded ? Config::kBlockM / 2 : 0);
    walk.begin_with(min(max(visibility.diagonal(row) / Config::kBlockN, walk.range.begin), walk.range.end - 1));
  } else if constexpr (Config::kAlignsInterior) {
    walk.align_interior(launch.interior_blocks);
  }
  return walk;
}

// The block to load for a step.
template <class Config>
__device__ __forceinline__ int loaded_block(const KeyWalk& walk, int step) {
  return Config::kAlignsInterior ? walk.loaded_block(step) : walk.block(step);
}

}  // namespace sm90
}  // namespace flash
