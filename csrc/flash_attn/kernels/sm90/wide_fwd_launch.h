// Tensor maps and launch of the wgmma forward of head dims above 256.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm90/wide_fwd_launch_params.h"
#include "kernels/tma/tensor_map.h"
#include "plan/fwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm90/wide_fwd_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm90 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype>
struct WideFwdConfig;
template <class Config>
__global__ void flash_fwd_wide_kernel(const __grid_constant__ WideFwdLaunch launch) {}
#endif

inline cudaError_t make_wide_tensor_maps(WideFwdLaunch& launch, const plan::FwdPlan& plan) {
  const Flash_fwd_params& params = launch.params;
  cudaError_t status = cudaSuccess;
  const auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, bool is_query, int rows,
                        int head_dim) {
    if (status != cudaSuccess) return;
    status = tma::make_tensor_map(map, tma::tensor_map_source(params, data, strides, is_query, head_dim), plan.dtype,
                                  {plan::kSm90WideChunkCols, rows});
  };
  make(launch.q_map, params.q_ptr, params.q_strides, true, plan.block_m, params.d);
  make(launch.o_map, params.o_ptr, params.o_strides, true, 16, params.d_v);
  if (params.seqlen_k == 0) return status;  // no key is ever loaded
  make(launch.k_map, params.k_ptr, params.k_strides, false, plan.block_n, params.d);
  make(launch.v_map, params.v_ptr, params.v_strides, false, plan::kSm90WidePartKeys, params.d_v);
  return status;
}

}  // namespace sm90

template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_fwd_wgmma_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static_assert(kHeadDim == plan::kMaxHeadDim && kHeadDimV == kHeadDim);
  static std::atomic<uint64_t> configured_devices{0};
  sm90::WideFwdLaunch launch{};
  launch.params = params;
  launch.order = plan.order;
  launch.heads_of_batch = FastDiv(params.h);
  launch.group = FastDiv(params.h_h_k_ratio);
  const cudaError_t status = sm90::make_wide_tensor_maps(launch, plan);
  if (status != cudaSuccess) return status;
  return launch_dependent(sm90::flash_fwd_wide_kernel<sm90::WideFwdConfig<kDtype>>, plan.grid, plan.threads,
                          plan.smem_bytes, launch, params.device, stream, configured_devices);
}

}  // namespace flash
