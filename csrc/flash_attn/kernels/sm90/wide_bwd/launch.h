// Launches of the wgmma backward of head dims above 256: softmax_d, the dK and dV kernel, the dQ kernel.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/sm90/bwd_tensor_maps.h"
#include "plan/bwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm90/wide_bwd/dkv_kernel.h"
#include "kernels/sm90/wide_bwd/dq_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm90 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype>
struct WideBwdConfig;
template <class Config>
__global__ void flash_bwd_wide_dkv_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {}
template <class Config>
__global__ void flash_bwd_wide_dq_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {}
#endif

}  // namespace sm90

template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_bwd_wgmma_(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  static_assert(kHeadDim == plan::kMaxHeadDim && kHeadDimV == kHeadDim);
  static std::atomic<uint64_t> dkv_devices{0}, dq_devices{0};
  using Config = sm90::WideBwdConfig<kDtype>;
  sm90::BwdTwoPassLaunch launch{};
  launch.params = params;
  launch.grid = plan.order;
  cudaError_t status = sm90::make_tensor_maps(launch, plan.dtype);
  if (status == cudaSuccess) status = run_softmax_d(params, plan.dtype, stream);
  if (status == cudaSuccess) {
    status = launch_dependent(sm90::flash_bwd_wide_dkv_kernel<Config>, plan.grid, plan.threads, plan.smem_bytes, launch,
                              params.device, stream, dkv_devices);
  }
  if (status != cudaSuccess) return status;
  return launch_dependent(sm90::flash_bwd_wide_dq_kernel<Config>, plan.dq_grid, plan.dq_threads, plan.dq_smem_bytes,
                          launch, params.device, stream, dq_devices);
}

}  // namespace flash
