// The order in which the key blocks of a row block are visited, the same for those who load and those who compute.
#pragma once

#include "common/block_range.h"
#include "common/sequence.h"
#include "sm90/fwd_config.h"

namespace flash {
namespace sm90 {

// Under ALiBi the block nearest to the diagonal is the first: its scores are the highest, and references that start low
// would rise in nearly every block on the way to it.
template <class Config>
__device__ __forceinline__ KeyWalk key_walk(const Flash_fwd_params& params, const RowBlock& block) {
  const Visibility visibility{block.seqlen_q, block.seqlen_k, params.window};
  KeyWalk walk{block_range(visibility, block.row_begin, block.row_end, Config::kBlockN)};
  if (Config::kHasScoreMod && params.alibi_slopes_ptr != nullptr && walk.interior() > 0) {
    const int nearest = visibility.diagonal(block.row_begin + Config::kBlockM / 2) / Config::kBlockN;
    walk.first = min(max(nearest - walk.range.interior_begin, 0), walk.interior() - 1);
  }
  return walk;
}

}  // namespace sm90
}  // namespace flash
