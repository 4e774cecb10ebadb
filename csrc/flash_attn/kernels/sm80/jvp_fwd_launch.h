// Launch of the mma.sync forward with tangents.
#pragma once

#include "kernels/common/launch.h"
#include "params/jvp.h"
#include "plan/jvp_fwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm80/jvp_fwd_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm80 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim, bool kSmallTile>
struct JvpFwdConfig;
template <class Config>
__global__ void flash_fwd_jvp_kernel(const __grid_constant__ Flash_fwd_jvp_params params) {}
#endif

template <class Config>
cudaError_t run_flash_fwd_jvp(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch_dependent(flash_fwd_jvp_kernel<Config>, plan.grid, plan.threads, plan.smem_bytes, params, params.device,
                          stream, configured_devices);
}

}  // namespace sm80

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_jvp_(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  using sm80::JvpFwdConfig;
  if constexpr (plan::has_small_jvp_fwd_tile(kHeadDim)) {
    if (plan.small_tile) return sm80::run_flash_fwd_jvp<JvpFwdConfig<kDtype, kHeadDim, true>>(params, plan, stream);
  }
  return sm80::run_flash_fwd_jvp<JvpFwdConfig<kDtype, kHeadDim, false>>(params, plan, stream);
}

}  // namespace flash
