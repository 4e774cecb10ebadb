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
template <Dtype kDtype, int kHeadDim>
struct JvpFwdConfig;
template <class Config>
__global__ void flash_fwd_jvp_kernel(const __grid_constant__ Flash_fwd_jvp_params params) {}
#endif

}  // namespace sm80

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_jvp_(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch_dependent(sm80::flash_fwd_jvp_kernel<sm80::JvpFwdConfig<kDtype, kHeadDim>>, plan.grid, plan.threads,
                          plan.smem_bytes, params, params.device, stream, configured_devices);
}

}  // namespace flash
