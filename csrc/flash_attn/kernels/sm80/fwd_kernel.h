// The mma.sync forward kernel: a thread block per (m_block, head).
#pragma once

#include "kernels/common/max_logit.h"
#include "kernels/common/pdl.h"
#include "kernels/sm80/fwd_epilogue.h"
#include "kernels/sm80/fwd_mainloop.h"

namespace flash {
namespace sm80 {

template <class Config>
__device__ __forceinline__ void compute_attn_1rowblock(const typename Config::Params& params, const WorkTile& tile) {
  extern __shared__ __align__(128) char smem[];
  FwdMainloop<Config> mainloop(params, tile, reinterpret_cast<typename Config::Element*>(smem));
  if (mainloop.steps.count() > 0) {
    mainloop.prologue();
    mainloop.run_masked();
    mainloop.run_unmasked();
  }
  store_max_logit(mainloop.softmax, params, tile, mainloop.coords, tile.row_begin);
  if constexpr (Config::kColWarps > 1) mainloop.exchange().add_row_sums(mainloop.coords, mainloop.softmax.row_sum);
  store_o(mainloop);
  store_lse(mainloop.softmax, params, tile, mainloop.coords, tile.row_begin, row_sink(params, tile));
}

// The work tile of this thread block.
template <class Config>
__device__ __forceinline__ void compute_attn(const typename Config::Params& params) {
  const WorkTile tile = work_tile_at(params, Config::kBlockM, blockIdx.x);
  if (!tile.empty()) compute_attn_1rowblock<Config>(params, tile);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params) {
  wait_for_previous_kernel();
  store_rng_state(params.dropout);
  compute_attn<Config>(params);
}

// The same of kDropout.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    flash_fwd_general_kernel(const __grid_constant__ Flash_fwd_general_params params) {
  wait_for_previous_kernel();
  store_rng_state(params.dropout);
  compute_attn<Config>(params);
}

}  // namespace sm80
}  // namespace flash
