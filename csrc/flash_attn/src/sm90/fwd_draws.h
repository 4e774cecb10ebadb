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
  const int lane = threadIdx.x % 32;
  TileQueue<Config> queue(storage);
  uint32_t phase = 1;
  for (RowBlock block = queue.take(); !block.empty(); block = queue.take()) {
    const FwdTile<Config> tile(launch.params, block, group);
    const DropoutMask mask(launch.params.dropout, block.batch, block.head);
    LaneRows rows[4];  // of each warp of the consumer
#pragma unroll
    for (int warp = 0; warp < 4; ++warp) {
      rows[warp] = LaneRows(mask, block.row_begin + 64 * group + 16 * warp + lane / 4);
    }
    for (int i = 0; i < tile.count(); i = tile.after(i)) {
      const LaneColumns<kPairs> columns(mask.stream, tile.walk.block(i) * kPairs);
      storage.draws_empty[group].wait(phase);
      phase ^= 1;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
#pragma unroll
        for (int j = 0; j < kPairs / 8; ++j) {
          storage.draws[group].lanes[j][warp][lane] = {
              rows[warp].draw(columns, 4 * j), rows[warp].draw(columns, 4 * j + 1), rows[warp].draw(columns, 4 * j + 2),
              rows[warp].draw(columns, 4 * j + 3)};
        }
      }
      storage.draws_full[group].arrive();
    }
  }
}

}  // namespace sm90
}  // namespace flash
