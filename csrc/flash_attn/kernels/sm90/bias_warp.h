// The producer warp of the wgmma forward that loads boxes of attn_bias.
#pragma once

#include "kernels/sm90/bias_boxes.h"
#include "kernels/sm90/fwd_launch_params.h"
#include "kernels/sm90/fwd_storage.h"
#include "kernels/sm90/kv_block_order.h"

namespace flash {
namespace sm90 {

// Bias warp: loads the boxes of attn_bias of each block, one for each consumer, in the order of their columns. Without
// boxes the consumers read attn_bias.
template <class Config>
struct BiasWarp {
  const FwdLaunch& launch;
  FwdStorage<Config>& storage;

  __device__ __forceinline__ void run() const {
    const ScoreBias& bias = launch.mask.bias;
    WorkPipeline<Config> pipeline(storage);
    PipelineState<Config::kTile.bias_stages> state;
    for (FwdWork<Config> work = pipeline.wait_and_release(); work.exists(); work = pipeline.wait_and_release()) {
      if (!bias.loads_boxes) continue;
      const WorkTile& tile = work.tile;
      const BiasBoxes boxes(launch.bias_map, bias, launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q,
                            tile.head);
      for (int i = 0; i < work.order.count(); ++i) {
        const int key = block_to_load<Config>(work.order, i) * Config::kBlockN;
        for (int col = key; col < key + Config::kBlockN; col += boxes.cols()) {
          for (int group = 0; group < Config::kWarpGroups; ++group) {
            const int slot = state.stage * Config::kWarpGroups + group;
            storage.bias_empty[slot].wait(state.phase ^ 1);
            if (threadIdx.x % 32 == 0) {
              storage.bias_full[slot].arrive_and_expect(boxes.bytes(64));
              boxes.load(storage.bias_full[slot], storage.bias[slot], tile.row_begin + 64 * group, col);
            }
          }
          state.advance();
        }
      }
    }
  }
};

}  // namespace sm90
}  // namespace flash
