// Dropout in the wgmma forward: warps of warpgroup 0 draw, one for each consumer, a step ahead of it.
#pragma once

#include "common/dropout.h"
#include "sm90/fwd_mainloop.h"
#include "sm90/fwd_producer.h"

namespace flash {
namespace sm90 {

template <class Config>
__device__ __forceinline__ void run_draws(const FwdLaunch& launch, FwdStorage<Config>& storage, int group) {
  constexpr int kPairs = Config::kBlockN / 2;
  const Flash_fwd_params& params = launch.params;
  const int lane = threadIdx.x % 32;
  TileQueue<Config> queue(storage);
  uint32_t phase = 1;
  for (RowBlock block = queue.take(); !block.empty(); block = queue.take()) {
    const FwdTile<Config> tile(params, block, group);
    const DropoutMask mask(params.dropout, block.batch, block.head);
    const int first_row = block.row_begin + 64 * group + lane / 4;
    const RowDraws rows[4] = {{mask, first_row}, {mask, first_row + 16}, {mask, first_row + 32}, {mask, first_row + 48}};
    for (int i = 0; i < tile.count(); ++i) {
      const int first_pair = tile.walk.block(i) * kPairs;
      uint32_t own[2] = {dropout_column_pair(mask.stream, first_pair + lane)};
      if (kPairs > 32) own[1] = dropout_column_pair(mask.stream, first_pair + 32 + lane);
      uint32_t pairs[kPairs / 4];  // those of the lane's columns
#pragma unroll
      for (int n = 0; n < kPairs / 4; ++n) {
        pairs[n] = __shfl_sync(0xffffffffu, own[n / 8], n % 8 * 4 + lane % 4);
      }
      storage.draws_empty[group].wait(phase);
      phase ^= 1;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
#pragma unroll
        for (int j = 0; j < kPairs / 8; ++j) {
          storage.draws[group][j][warp][lane] = {rows[warp].draw(0, pairs[2 * j]), rows[warp].draw(1, pairs[2 * j]),
                                                 rows[warp].draw(0, pairs[2 * j + 1]),
                                                 rows[warp].draw(1, pairs[2 * j + 1])};
        }
      }
      storage.draws_full[group].arrive();
    }
  }
}

}  // namespace sm90
}  // namespace flash
