// Launch of the mma.sync forward.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm80/fwd_launch_params.h"
#include "params/flash.h"
#include "plan/fwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm80/fwd_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm80 {

using plan::FwdVariant;

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim, FwdVariant kVariant>
struct FwdConfig;
template <class Config>
__global__ void flash_fwd_kernel(const __grid_constant__ Flash_fwd_params params) {}
template <class Config>
__global__ void flash_fwd_general_kernel(const __grid_constant__ Flash_fwd_general_params params) {}
#endif

template <class Config>
cudaError_t run_flash_fwd(const Flash_fwd_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch_dependent(flash_fwd_kernel<Config>, plan.grid, plan.threads, plan.smem_bytes, params, params.device,
                          stream, configured_devices);
}

template <class Config>
cudaError_t run_flash_fwd_general(const Flash_fwd_split_params& params, const plan::FwdPlan& plan,
                                  cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch_dependent(flash_fwd_general_kernel<Config>, plan.grid, plan.threads, plan.smem_bytes,
                          Flash_fwd_general_params{params, params.mask}, params.device, stream, configured_devices);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if (plan.variant == FwdVariant::kDropout) {
    return run_flash_fwd_general<FwdConfig<kDtype, kHeadDim, FwdVariant::kDropout>>(params, plan, stream);
  }
  if constexpr (plan::mma_sync_has_short(kHeadDim)) {
    if (plan.variant == FwdVariant::kShort) {
      return run_flash_fwd<FwdConfig<kDtype, kHeadDim, FwdVariant::kShort>>(params, plan, stream);
    }
  }
  return run_flash_fwd<FwdConfig<kDtype, kHeadDim, FwdVariant::kPlain>>(params, plan, stream);
}

}  // namespace sm80

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm80::run_mha_fwd<kDtype, kHeadDim>(params, plan, stream);
}

}  // namespace flash
