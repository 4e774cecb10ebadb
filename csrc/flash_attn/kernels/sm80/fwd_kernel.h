// The mma.sync forward kernel: a thread block per (m_block, head).
#pragma once

#include "kernels/common/max_logit.h"
#include "kernels/common/pdl.h"
#include "kernels/sm80/fwd_epilogue.h"
#include "kernels/sm80/fwd_mainloop.h"

namespace flash {
namespace sm80 {

template <class Config>
__device__ __forceinline__ void compute_attn_1rowblock(const Flash_fwd_params& params, const WorkTile& block) {
  extern __shared__ __align__(128) char smem[];
  FwdMainloop<Config> mainloop(params, block, reinterpret_cast<typename Config::Element*>(smem));
  if (mainloop.range.count() > 0) {
    mainloop.prologue();
    mainloop.run_masked();
    mainloop.run_unmasked();
  }
  store_max_logit(mainloop.softmax, params, block, mainloop.coords, block.row_begin);
  store_o(mainloop);
  store_lse(mainloop.softmax, params, block, mainloop.coords, block.row_begin, row_sink(params, block));
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params) {
  wait_for_previous_kernel();
  store_rng_state(params.dropout);
  const WorkTile block = row_block(params, Config::kBlockM);
  if (!block.empty()) compute_attn_1rowblock<Config>(params, block);
}

}  // namespace sm80
}  // namespace flash
