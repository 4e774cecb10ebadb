// LSE and softmax_d of the rows of a dQ kernel.
#pragma once

#include "core/visible_range.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bwd_launch_params.h"

namespace flash {
namespace sm90 {

// A thread's two rows.
struct DqRows {
  float lse_log2[2];  // +inf where the row is fully masked or beyond the sequence
  float softmax_d[2];

  template <class Config, class Coords>
  __device__ __forceinline__ static DqRows load(const BwdTwoPassLaunch& launch, const WorkTile& tile, int row_begin,
                                                const Coords& coords) {
    const Flash_bwd_params& params = launch.params;
    const float* const lse = params.softmax_lse_ptr + lse_offset(params, tile.batch, tile.head, tile.q_begin);
    const float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, tile.head, tile.q_begin);
    const int first_row = first_visible_row(mask_of<Config>(params, tile));
    DqRows rows;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int row = row_begin + coords.row(mi);
      bool valid = row >= first_row && row < tile.seqlen_q;
      if constexpr (Config::kListed) {
        const uint32_t* const seen = seen_rows(params, launch.mask, tile.batch, tile.head, tile.q_begin, tile.segment);
        valid = valid && is_seen(seen, row);
      }
      // Bypasses L1: this kernel may have started before the preceding one was complete.
      rows.lse_log2[mi] = valid ? lse_or_inf(__ldcg(lse + row)) * ScoreMod::kLog2e : INFINITY;
      rows.softmax_d[mi] = valid ? __ldcg(delta + row) : 0.0f;
    }
    return rows;
  }
};

}  // namespace sm90
}  // namespace flash
