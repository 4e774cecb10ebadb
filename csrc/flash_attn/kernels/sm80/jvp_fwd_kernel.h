// The mma.sync forward with tangents: a thread block per (m_block, head).
#pragma once

#include "kernels/common/dropout.h"
#include "kernels/common/pdl.h"
#include "kernels/sm80/jvp_fwd_tile.h"

namespace flash {
namespace sm80 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    flash_fwd_jvp_kernel(const __grid_constant__ Flash_fwd_jvp_params params) {
  using Storage = JvpFwdStorage<Config>;
  static_assert(sizeof(Storage) == plan::jvp_fwd_smem_bytes(Config::kTile, Config::kDtype), "plan and kernel agree");
  extern __shared__ __align__(128) char smem[];
  wait_for_previous_kernel();
  store_rng_state(params.dropout);
  const WorkTile tile = work_tile_at(params, Config::kBlockM, blockIdx.x);
  if (!tile.empty()) JvpFwdTile<Config>(params, tile, *reinterpret_cast<Storage*>(smem)).run();
}

}  // namespace sm80
}  // namespace flash
