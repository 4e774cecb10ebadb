// Tensor maps and launch of the wgmma forward.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm90/bias_map.h"
#include "kernels/sm90/fwd_launch_params.h"
#include "kernels/tma/tensor_map.h"
#include "plan/fwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm90/fwd_direct_kernel.h"
#include "kernels/sm90/fwd_kernel.h"
#include "kernels/sm90/fwd_static_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm90 {

using plan::FwdVariant;

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim, FwdVariant kVariant, int kHeadDimV>
struct FwdConfig;
template <class Base>
struct PairedConfig;
template <class Config>
__global__ void flash_fwd_kernel(const __grid_constant__ FwdLaunch launch) {}
template <class Config>
__global__ void flash_fwd_direct_kernel(const __grid_constant__ FwdLaunch launch) {}
template <class Config>
__global__ void flash_fwd_static_kernel(const __grid_constant__ FwdLaunch launch) {}
#endif

// Maps of boxes of rows within a page; without them rows are copied one by one.
inline cudaError_t make_page_maps(FwdLaunch& launch, Dtype dtype, int atom_cols) {
  const Flash_fwd_params& params = launch.params;
  if (launch.page_box_rows == 0) return cudaSuccess;
  auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, int head_dim) {
    const tma::TensorMapSource pool{data,       strides, false, params.paged.num_pages, params.paged.page_size.divisor,
                                    params.h_k, head_dim};
    return tma::make_tensor_map(map, pool, dtype, {atom_cols, launch.page_box_rows});
  };
  const cudaError_t status = make(launch.k_map, params.k_ptr, params.k_strides, params.d);
  return status == cudaSuccess ? make(launch.v_map, params.v_ptr, params.v_strides, params.d_v) : status;
}

// stored_rows: rows of O in one TMA store.
inline cudaError_t make_tensor_maps(FwdLaunch& launch, const plan::FwdPlan& plan, int stored_rows) {
  const Flash_fwd_params& params = launch.params;
  const int atom_cols = plan::swizzle_atom_cols(plan.head_dim);
  auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, bool is_query, int rows,
                  int head_dim) {
    return tma::make_tensor_map(map, tma::tensor_map_source(params, data, strides, is_query, head_dim), plan.dtype,
                                {atom_cols, rows});
  };
  cudaError_t status = make(launch.q_map, params.q_ptr, params.q_strides, true, 64, params.d);
  if (status == cudaSuccess) status = make(launch.o_map, params.o_ptr, params.o_strides, true, stored_rows, params.d_v);
  if (status != cudaSuccess || params.seqlen_k == 0) return status;  // no key is ever loaded
  if (params.is_paged()) return make_page_maps(launch, plan.dtype, atom_cols);
  status = make(launch.k_map, params.k_ptr, params.k_strides, false, plan.block_n, params.d);
  if (status != cudaSuccess) return status;
  return make(launch.v_map, params.v_ptr, params.v_strides, false, plan.block_n, params.d_v);
}

inline FwdLaunch fwd_launch(const Flash_fwd_split_params& params, const plan::FwdPlan& plan) {
  FwdLaunch launch{};
  launch.params = params;
  launch.splits = params.splits;
  launch.mask = params.mask;
  if (plan.num_splits > 1) {
    launch.params.softmax_lse_ptr = params.splits.lse_ptr;
    launch.params.sinks_ptr = nullptr;  // the combine adds them
  }
  launch.page_box_rows = plan.page_box_rows;
  launch.tiles = static_cast<int>(plan.num_work_tiles / plan.num_splits);
  launch.short_tiles = plan.short_tiles;
  launch.sort_varlen_tiles = plan.sort_varlen_tiles;
  launch.pairs_rows = plan.pairs_rows;
  launch.order = plan.order;
  launch.heads_of_batch = FastDiv(params.h);
  launch.unmasked_blocks = FastDiv(plan.unmasked_blocks);
  launch.group = FastDiv(params.h_h_k_ratio);
  launch.tile_count_semaphore = plan.is_dynamic ? params.tile_count_semaphore : nullptr;
  return launch;
}

template <void (*kernel)(FwdLaunch)>
cudaError_t launch_kernel(const FwdLaunch& launch, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int device = launch.params.device;
  if (plan.pdl) {
    return flash::launch_dependent(kernel, plan.grid, plan.threads, plan.smem_bytes, launch, device, stream,
                                   configured_devices, plan.in_clusters ? 2 : 1);
  }
  return flash::launch(kernel, plan.grid, plan.threads, plan.smem_bytes, launch, device, stream, configured_devices);
}

template <class Config, FwdVariant kVariant>
cudaError_t launch_variant(const FwdLaunch& launch, const plan::FwdPlan& plan, cudaStream_t stream) {
  if constexpr (kVariant == FwdVariant::kDirect) {
    return launch_kernel<flash_fwd_direct_kernel<Config>>(launch, plan, stream);
  } else if constexpr (kVariant == FwdVariant::kStatic) {
    return launch_kernel<flash_fwd_static_kernel<Config>>(launch, plan, stream);
  } else {
    return launch_kernel<flash_fwd_kernel<Config>>(launch, plan, stream);
  }
}

template <Dtype kDtype, int kHeadDim, FwdVariant kVariant, int kHeadDimV = kHeadDim>
cudaError_t run_flash_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  constexpr plan::FwdPolicy kPolicy = plan::sm90_fwd_policy(kHeadDim, kHeadDimV, kVariant);
  FwdLaunch launch = fwd_launch(params, plan);
  cudaError_t status = make_tensor_maps(launch, plan, kPolicy.has(plan::fwd_feature::kHasStoreWarp) ? 64 : 16);
  if constexpr (kVariant == FwdVariant::kBiased) {
    if (status == cudaSuccess) status = make_bias_map(launch.bias_map, params, params.mask.bias, 64, true);
  }
  if (status != cudaSuccess) return status;
  using Config = FwdConfig<kDtype, kHeadDim, kVariant, kHeadDimV>;
  if constexpr (plan::may_pair_thread_blocks(kHeadDim, kVariant)) {
    if (plan.in_clusters) return launch_variant<PairedConfig<Config>, kVariant>(launch, plan, stream);
  }
  return launch_variant<Config, kVariant>(launch, plan, stream);
}

// No plan names a variant without a kernel.
template <Dtype kDtype, int kHeadDim, FwdVariant kVariant>
cudaError_t run_variant(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::sm90_has_variant(kHeadDim, kVariant)) {
    return run_flash_fwd<kDtype, kHeadDim, kVariant>(params, plan, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace sm90

template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_fwd_wgmma_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  using plan::FwdVariant;
  if constexpr (kHeadDimV != kHeadDim) {
    return sm90::run_flash_fwd<kDtype, kHeadDim, FwdVariant::kPlain, kHeadDimV>(params, plan, stream);
  } else {
    switch (plan.variant) {
      case FwdVariant::kPlain: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kPlain>(params, plan, stream);
      case FwdVariant::kShort: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kShort>(params, plan, stream);
      case FwdVariant::kDropout: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kDropout>(params, plan, stream);
      case FwdVariant::kMasked: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kMasked>(params, plan, stream);
      case FwdVariant::kOneWave: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kOneWave>(params, plan, stream);
      case FwdVariant::kDirect: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kDirect>(params, plan, stream);
      case FwdVariant::kStatic: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kStatic>(params, plan, stream);
      case FwdVariant::kListed:
      case FwdVariant::kListedShort:
      case FwdVariant::kBiased:
        if constexpr (plan::sm90_has_variant(kHeadDim, FwdVariant::kListed)) {
          return run_mha_fwd_listed_wgmma_<kDtype, kHeadDim>(params, plan, stream);
        }
        return cudaErrorInvalidValue;
      default: return run_mha_fwd_modified_wgmma_<kDtype, kHeadDim>(params, plan, stream);
    }
  }
}

}  // namespace flash
