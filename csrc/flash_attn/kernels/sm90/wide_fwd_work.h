// The work of a thread block of the wgmma forward of head dims above 256.
#pragma once

#include "core/block_range.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/wide_fwd_launch_params.h"
#include "kernels/sm90/wide_fwd_storage.h"

namespace flash {
namespace sm90 {

struct WideFwdWork {
  WorkTile tile;
  Visibility visibility;
  BlockRange range;

  // All lanes of a warp together.
  __device__ __forceinline__ WideFwdWork(const WideFwdLaunch& launch, int index, int block_m, int block_n) {
    const Flash_fwd_params& params = launch.params;
    const HeadBlock at = launch.order.at(index);
    if (params.is_varlen()) {
      tile = varlen_work_tile(params, block_m, at.head, at.block);
    } else {
      const int batch = launch.heads_of_batch.divide(at.head);
      tile = dense_work_tile(params, block_m, batch, at.head - batch * launch.heads_of_batch.divisor, at.block);
    }
    visibility = {tile.seqlen_q, tile.seqlen_k, params.window};
    if (!tile.empty()) range = block_range(visibility, tile.row_begin, tile.row_end, block_n);
  }

  __device__ __forceinline__ int count() const { return range.count(); }
  __device__ __forceinline__ int block(int step) const { return range.block_unmasked_first(step); }
  __device__ __forceinline__ bool is_masked(int step) const {
    return step >= range.unmasked_end - range.unmasked_begin;
  }
};

}  // namespace sm90
}  // namespace flash
