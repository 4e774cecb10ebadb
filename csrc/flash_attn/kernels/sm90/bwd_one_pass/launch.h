// Tensor maps and launches of the one-pass wgmma backward.
#pragma once

#include <type_traits>

#include "kernels/common/launch.h"
#include "kernels/sm90/bias_map.h"
#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/sm90/bwd_variant.h"
#include "kernels/tma/tensor_map.h"
#include "plan/bwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm90/bwd_one_pass/kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm90 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim, BwdVariant kVariant, DqLocation kDqLocation>
struct BwdOnePassConfig;
template <class Config>
__global__ void flash_bwd_kernel(const __grid_constant__ BwdLaunch launch) {}
template <class Config>
__global__ void flash_bwd_heads_kernel(const __grid_constant__ BwdLaunch launch) {}
template <class Config>
__global__ void flash_bwd_convert_dq_kernel(const __grid_constant__ Flash_bwd_params params) {}
#endif

inline cudaError_t make_tensor_maps(BwdLaunch& launch, const plan::BwdPlan& plan) {
  const Flash_bwd_params& params = launch.params;
  constexpr int kStoredRows = 16;  // of one warp
  constexpr int kAtomCols = 64;
  const int kv_rows = plan.block_n / plan::sm90_bwd_kv_parts(plan.head_dim, plan.block_m);
  struct Matrix {
    CUtensorMap& map;
    const void* data;
    const MatrixStrides& strides;
    bool is_query;
    int rows;
    int head_dim;
  };
  const Matrix matrices[] = {
      {launch.q_map, params.q_ptr, params.q_strides, true, plan.block_m, params.d},
      {launch.do_map, params.do_ptr, params.do_strides, true, plan.block_m, params.d_v},
      {launch.k_map, params.k_ptr, params.k_strides, false, kv_rows, params.d},
      {launch.v_map, params.v_ptr, params.v_strides, false, kv_rows, params.d_v},
      {launch.dk_map, params.dk_ptr, params.dk_strides, false, kStoredRows, params.d},
      {launch.dv_map, params.dv_ptr, params.dv_strides, false, kStoredRows, params.d_v},
  };
  for (const Matrix& matrix : matrices) {
    const cudaError_t status = tma::make_tensor_map(
        matrix.map, tma::tensor_map_source(params, matrix.data, matrix.strides, matrix.is_query, matrix.head_dim),
        plan.dtype, {kAtomCols, matrix.rows});
    if (status != cudaSuccess) return status;
  }
  if (!plan.dq_in_smem) return cudaSuccess;
  return tma::make_tensor_map(launch.dq_map,
                              tma::tensor_map_source(params, params.dq_ptr, params.dq_strides, true, params.d),
                              plan.dtype, {plan.head_dim, kStoredRows});
}

inline cudaError_t make_bias_maps(BwdLaunch& launch, const Flash_bwd_mask_params& params, const plan::BwdPlan& plan) {
  const cudaError_t status = make_bias_map(launch.bias_map, params, params.mask.bias, plan.block_m, false);
  if (params.ds.is_float) launch.float_ds = params.ds;
  launch.stores_ds = params.ds.data != nullptr && !params.ds.is_float;
  if (status != cudaSuccess || !launch.stores_ds) return status;
  constexpr int kAtomCols = 64;
  return tma::make_tensor_map(launch.ds_map,
                              tma::tensor_map_source(params, params.ds.data, params.ds.strides, true, params.ds.cols),
                              plan.dtype, {kAtomCols, plan.block_m});
}

inline cudaError_t set_bands(BwdLaunch& launch, const plan::BwdPlan& plan) {
  const Flash_bwd_params& params = launch.params;
  if (plan.bands.count == 1) return cudaSuccess;
  launch.bands = plan.bands;
  launch.preparing_shares = plan.preparing_shares;
  launch.prepares_softmax_d = params.dlse_ptr == nullptr && params.dsinks_ptr == nullptr;
  launch.dq_tiles = {FastDiv(params.h), FastDiv(plan.bands.dq_tiles / params.h_h_k_ratio)};
  constexpr int kAtomCols = 64;
  return tma::make_tensor_map(launch.o_map,
                              tma::tensor_map_source(params, params.o_ptr, params.o_strides, true, params.d_v),
                              plan.dtype, {kAtomCols, plan.block_m});
}

// The call of softmax_d_kernel(), for the heads of the first band. In a dense batch, a band of more heads than one
// entry has is rounded up to whole entries.
inline Flash_bwd_mask_params before_bands(const Flash_bwd_mask_params& params, const BwdLaunch& launch) {
  Flash_bwd_mask_params first = params;
  if (!launch.prepares_softmax_d) return first;
  const int heads = launch.bands.heads * params.h_h_k_ratio;
  if (!params.is_varlen()) first.b = (heads + params.h - 1) / params.h;
  if (heads < params.h) first.h = heads;
  return first;
}

// Only softmax_d_kernel() may precede a dependent launch: the kernel counts on what that one has waited for.
template <class Config>
cudaError_t launch_kernel(void (*kernel)(BwdLaunch), const BwdLaunch& launch, const plan::BwdPlan& plan,
                          cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  if (plan.runs(plan::BwdStage::kBegin)) {
    return launch_dependent(kernel, plan.grid, plan.threads, plan.smem_bytes, launch, launch.params.device, stream,
                            configured_devices);
  }
  return flash::launch(kernel, plan.grid, plan.threads, plan.smem_bytes, launch, launch.params.device, stream,
                       configured_devices);
}

template <class Config>
cudaError_t run_flash_bwd_convert_dq(const Flash_bwd_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch_dependent(flash_bwd_convert_dq_kernel<Config>, plan.dq_grid, plan.dq_threads, plan.dq_smem_bytes,
                          params, params.device, stream, configured_devices);
}

// softmax_d, then the main kernel: either it computes all gradients of whole heads, or it adds to dQ in global memory
// and dQ's conversion follows.
template <Dtype kDtype, int kHeadDim, BwdVariant kVariant, DqLocation kDqLocation>
cudaError_t run_flash_bwd(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  using Config = BwdOnePassConfig<kDtype, kHeadDim, kVariant, kDqLocation>;
  BwdLaunch launch{};
  launch.params = params;
  launch.mask = params.mask;
  launch.grid = plan.order;
  launch.tile_count_semaphore = plan.is_dynamic ? params.tile_count_semaphore : nullptr;
  cudaError_t status = set_bands(launch, plan);
  if (status == cudaSuccess && plan.runs(plan::BwdStage::kAdd)) status = make_tensor_maps(launch, plan);
  if constexpr (kVariant == BwdVariant::kBiased) {
    if (status == cudaSuccess) status = make_bias_maps(launch, params, plan);
  }
  if (status == cudaSuccess && plan.runs(plan::BwdStage::kBegin)) {
    status = run_softmax_d(before_bands(params, launch), kDtype, stream);
  }
  if (status != cudaSuccess) return status;
  if constexpr (kDqLocation == DqLocation::kShared) {
    return launch_kernel<Config>(flash_bwd_heads_kernel<Config>, launch, plan, stream);
  } else {
    if (plan.runs(plan::BwdStage::kAdd)) status = launch_kernel<Config>(flash_bwd_kernel<Config>, launch, plan, stream);
    if (status != cudaSuccess || !plan.runs(plan::BwdStage::kEnd)) return status;
    constexpr bool kIsTall = kDqLocation == DqLocation::kGlobalLong && kHeadDim == plan::kSm90TallBwdTile.head_dim;
    constexpr DqLocation kDqTiles = kIsTall ? kDqLocation : DqLocation::kGlobal;
    using Plain = BwdOnePassConfig<kDtype, kHeadDim, BwdVariant::kPlain, kDqTiles>;
    return run_flash_bwd_convert_dq<Plain>(params, plan, stream);
  }
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_bwd_one_pass(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  if constexpr (kHeadDim == plan::kSm90SharedDqTile.head_dim) {
    if (plan.dq_in_smem) {
      return run_flash_bwd<kDtype, kHeadDim, BwdVariant::kPlain, DqLocation::kShared>(params, plan, stream);
    }
  }
  if (plan.long_rows) {
    return run_flash_bwd<kDtype, kHeadDim, BwdVariant::kPlain, DqLocation::kGlobalLong>(params, plan, stream);
  }
  const auto run = [&](auto variant) {
    return run_flash_bwd<kDtype, kHeadDim, decltype(variant)::value, DqLocation::kGlobal>(params, plan, stream);
  };
  switch (plan.variant) {
    case plan::BwdVariant::kPlain: return run(std::integral_constant<BwdVariant, BwdVariant::kPlain>());
    case plan::BwdVariant::kGeneral: return run(std::integral_constant<BwdVariant, BwdVariant::kGeneral>());
    case plan::BwdVariant::kAccumulate: return run(std::integral_constant<BwdVariant, BwdVariant::kAccumulate>());
    case plan::BwdVariant::kListed: return run(std::integral_constant<BwdVariant, BwdVariant::kListed>());
    case plan::BwdVariant::kListedPlain: return run(std::integral_constant<BwdVariant, BwdVariant::kListedPlain>());
    case plan::BwdVariant::kBiased: return run(std::integral_constant<BwdVariant, BwdVariant::kBiased>());
    case plan::BwdVariant::kDropout: break;
  }
  return cudaErrorInvalidValue;  // a variant of the mma.sync family
}

}  // namespace sm90
}  // namespace flash
