// Tensor maps and launch of the e4m3 forward.
#pragma once

#include "core/e4m3.h"
#include "kernels/common/launch.h"
#include "kernels/sm90/fp8_fwd_launch_params.h"
#include "kernels/tma/tensor_map.h"
#include "plan/fp8_fwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm90/fp8_fwd_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm90 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kOut, int kHeadDim, bool kExpBits, bool kTransposesV>
struct Fp8FwdConfig;
template <class Config>
__global__ void flash_fwd_fp8_kernel(const __grid_constant__ Fp8FwdLaunch launch) {}
#endif

// A matrix for each K/V head, with a row for each column of V.
inline cudaError_t make_vt_map(CUtensorMap& map, const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan) {
  MatrixStrides strides;
  strides.row = params.vt_keys;
  strides.head = params.d_v * strides.row;
  strides.batch = params.h_k * strides.head;
  const tma::TensorMapSource source{params.vt_ptr,
                                    strides,
                                    false,
                                    params.is_varlen() ? 1 : params.b,
                                    params.d_v,
                                    params.h_k,
                                    static_cast<int>(params.vt_keys)};
  return tma::make_tensor_map(map, source, Dtype::kE4m3, {plan.block_n, plan.head_dim_v});
}

inline cudaError_t make_fp8_tensor_maps(FwdLaunch& launch, const Flash_fwd_fp8_params& params,
                                        const plan::FwdPlan& plan) {
  const auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, bool is_query, Dtype dtype,
                        tma::TensorMapBox box, int head_dim) {
    return tma::make_tensor_map(map, tma::tensor_map_source(params, data, strides, is_query, head_dim), dtype, box);
  };
  const int atom_cols = plan::fp8_atom_cols(plan.head_dim), out_atom_cols = plan::swizzle_atom_cols(plan.head_dim_v);
  cudaError_t status =
      make(launch.q_map, params.q_ptr, params.q_strides, true, Dtype::kE4m3, {atom_cols, 64}, params.d);
  if (status == cudaSuccess) {
    status = make(launch.o_map, params.o_ptr, params.o_strides, true, plan.dtype, {out_atom_cols, 16}, params.d_v);
  }
  if (status != cudaSuccess || params.seqlen_k == 0) return status;  // no key is ever loaded
  status = make(launch.k_map, params.k_ptr, params.k_strides, false, Dtype::kE4m3, {atom_cols, plan.block_n}, params.d);
  if (status != cudaSuccess) return status;
  if (plan.vt_keys > 0) return make_vt_map(launch.v_map, params, plan);
  return make(launch.v_map, params.v_ptr, params.v_strides, false, Dtype::kE4m3, {atom_cols, plan.block_n}, params.d_v);
}

template <class Config>
cudaError_t run_flash_fwd_fp8(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  Fp8FwdLaunch launch{};
  launch.params = params;
  launch.tiles = static_cast<int>(plan.num_work_tiles);
  launch.short_tiles = plan.short_tiles;
  launch.sort_varlen_tiles = plan.sort_varlen_tiles;
  launch.order = plan.order;
  launch.heads_of_batch = FastDiv(params.h);
  launch.unmasked_blocks = FastDiv(plan.unmasked_blocks);
  launch.group = FastDiv(params.h_h_k_ratio);
  launch.tile_count_semaphore = plan.is_dynamic ? params.tile_count_semaphore : nullptr;
  launch.params.softmax_scale_log2 = 1.0f;  // row_max is the maximum of scaled scores
  launch.q_descale = params.q_descale;
  launch.k_descale = params.k_descale;
  launch.v_descale = params.v_descale;
  launch.bits_shift = e4m3::twice(e4m3::kBitsShift);
  const cudaError_t status = make_fp8_tensor_maps(launch, params, plan);
  if (status != cudaSuccess) return status;
  return launch_dependent(flash_fwd_fp8_kernel<Config>, plan.grid, plan.threads, plan.smem_bytes, launch, params.device,
                          stream, configured_devices);
}

template <Dtype kOut, int kHeadDim, bool kTransposesV>
cudaError_t run_mha_fwd_fp8_exp(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::fp8_has_exp_bits(kHeadDim)) {
    if (params.exp_bits) {
      return run_flash_fwd_fp8<Fp8FwdConfig<kOut, kHeadDim, true, kTransposesV>>(params, plan, stream);
    }
  }
  return run_flash_fwd_fp8<Fp8FwdConfig<kOut, kHeadDim, false, kTransposesV>>(params, plan, stream);
}

template <Dtype kOut, int kHeadDim>
cudaError_t run_mha_fwd_fp8(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::sm90_fp8_fwd_tile(kHeadDim, true).head_dim > 0) {
    if (plan.vt_keys == 0) return run_mha_fwd_fp8_exp<kOut, kHeadDim, true>(params, plan, stream);
  }
  return run_mha_fwd_fp8_exp<kOut, kHeadDim, false>(params, plan, stream);
}

}  // namespace sm90

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_fp8_wgmma_(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_fwd_fp8<kDtype, kHeadDim>(params, plan, stream);
}

}  // namespace flash
