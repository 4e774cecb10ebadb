// Tensor maps and launch of the forward with tangents.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm90/jvp_fwd_launch_params.h"
#include "kernels/tma/tensor_map.h"
#include "plan/jvp_fwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm90/jvp_fwd_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm90 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim>
struct JvpFwdConfig;
template <class Config>
__global__ void flash_fwd_jvp_kernel(const __grid_constant__ JvpFwdLaunch launch) {}
#endif

// Without a tensor there is no map.
inline cudaError_t make_jvp_tensor_maps(JvpFwdLaunch& launch, const Flash_fwd_jvp_params& params,
                                        const plan::FwdPlan& plan) {
  cudaError_t status = cudaSuccess;
  const auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, bool is_query, int rows,
                        int head_dim) {
    if (status != cudaSuccess || data == nullptr) return;
    const tma::TensorMapBox box{plan::swizzle_atom_cols(plan.head_dim), rows};
    status =
        tma::make_tensor_map(map, tma::tensor_map_source(params, data, strides, is_query, head_dim), plan.dtype, box);
  };
  make(launch.q_map, params.q_ptr, params.q_strides, true, 64, params.d);
  make(launch.tq_map, params.tq_ptr, params.tq_strides, true, 64, params.d);
  make(launch.k_map, params.k_ptr, params.k_strides, false, plan.block_n, params.d);
  make(launch.tk_map, params.tk_ptr, params.tk_strides, false, plan.block_n, params.d);
  make(launch.v_map, params.v_ptr, params.v_strides, false, plan.block_n, params.d_v);
  make(launch.tv_map, params.tv_ptr, params.tv_strides, false, plan.block_n, params.d_v);
  make(launch.o_map, params.o_ptr, params.o_strides, true, 16, params.d_v);
  make(launch.to_map, params.to_ptr, params.to_strides, true, 16, params.d_v);
  return status;
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_jvp(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  JvpFwdLaunch launch{};
  launch.params = params;
  launch.tiles = static_cast<int>(plan.num_work_tiles);
  launch.short_tiles = plan.short_tiles;
  launch.sort_varlen_tiles = plan.sort_varlen_tiles;
  launch.order = plan.order;
  launch.heads_of_batch = FastDiv(params.h);
  launch.unmasked_blocks = FastDiv(plan.unmasked_blocks);
  launch.group = FastDiv(params.h_h_k_ratio);
  launch.tile_count_semaphore = plan.is_dynamic ? params.tile_count_semaphore : nullptr;
  launch.has_tq = params.tq_ptr != nullptr;
  launch.has_tk = params.tk_ptr != nullptr;
  launch.has_tv = params.tv_ptr != nullptr;
  launch.to_ptr = params.to_ptr;
  launch.t_lse_ptr = params.t_lse_ptr;
  launch.to_strides = params.to_strides;
  const cudaError_t status = make_jvp_tensor_maps(launch, params, plan);
  if (status != cudaSuccess) return status;
  void (*const kernel)(JvpFwdLaunch) = flash_fwd_jvp_kernel<JvpFwdConfig<kDtype, kHeadDim>>;
  if (plan.pdl) {
    return launch_dependent(kernel, plan.grid, plan.threads, plan.smem_bytes, launch, params.device, stream,
                            configured_devices);
  }
  return flash::launch(kernel, plan.grid, plan.threads, plan.smem_bytes, launch, params.device, stream,
                       configured_devices);
}

}  // namespace sm90

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_jvp_wgmma_(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_fwd_jvp<kDtype, kHeadDim>(params, plan, stream);
}

}  // namespace flash
