// Tensor maps and launch of the wgmma forward.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm90/fwd_kernel.h"
#include "plan/fwd_plan.h"

namespace flash {
namespace sm90 {

// Boxes of rows within a page; without them rows are copied one by one.
template <class Config>
cudaError_t make_page_maps(FwdLaunch& launch, Dtype dtype) {
  const Flash_fwd_params& params = launch.params;
  if (launch.page_box_rows == 0) return cudaSuccess;
  auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, int head_dim) {
    const TensorMapSource pool{data,       strides, false, params.paged.num_pages, params.paged.page_size.divisor,
                               params.h_k, head_dim};
    return make_tensor_map(map, pool, dtype, {Config::kAtomCols, launch.page_box_rows});
  };
  const cudaError_t status = make(launch.k_map, params.k_ptr, params.k_strides, params.d);
  return status == cudaSuccess ? make(launch.v_map, params.v_ptr, params.v_strides, params.d_v) : status;
}

template <class Config>
cudaError_t make_tensor_maps(FwdLaunch& launch, Dtype dtype) {
  const Flash_fwd_params& params = launch.params;
  auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, bool is_query, int rows,
                  int head_dim) {
    return make_tensor_map(map, tensor_map_source(params, data, strides, is_query, head_dim), dtype,
                           {Config::kAtomCols, rows});
  };
  cudaError_t status = make(launch.q_map, params.q_ptr, params.q_strides, true, 64, params.d);
  constexpr int kStoredRows = Config::kHasStoreWarp ? 64 : 16;
  if (status == cudaSuccess) status = make(launch.o_map, params.o_ptr, params.o_strides, true, kStoredRows, params.d_v);
  if (status != cudaSuccess || params.seqlen_k == 0) return status;  // no key is ever loaded
  if (params.is_paged()) return make_page_maps<Config>(launch, dtype);
  status = make(launch.k_map, params.k_ptr, params.k_strides, false, Config::kBlockN, params.d);
  if (status != cudaSuccess) return status;
  return make(launch.v_map, params.v_ptr, params.v_strides, false, Config::kBlockN, params.d_v);
}

inline FwdLaunch fwd_launch(const Flash_fwd_split_params& params, const plan::FwdPlan& plan) {
  FwdLaunch launch{};
  launch.params = params;
  launch.splits = params.splits;
  if (plan.num_splits > 1) {
    launch.params.softmax_lse_ptr = params.splits.lse_ptr;
    launch.params.sinks_ptr = nullptr;  // the combine adds them
  }
  launch.page_box_rows = plan.page_box_rows;
  launch.tiles = static_cast<int>(plan.num_work_tiles / plan.num_splits);
  launch.short_tiles = plan.short_tiles;
  launch.sort_varlen_tiles = plan.sort_varlen_tiles;
  launch.order = plan.order;
  launch.heads_of_batch = FastDiv(params.h);
  launch.unmasked_blocks = FastDiv(plan.unmasked_blocks);
  launch.group = FastDiv(params.h_h_k_ratio);
  launch.tile_count_semaphore = plan.is_dynamic ? params.tile_count_semaphore : nullptr;
  return launch;
}

template <class Config>
cudaError_t launch_kernel(const FwdLaunch& launch, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int device = launch.params.device;
  if (plan.pdl) {
    return flash::launch_dependent(flash_fwd_kernel<Config>, plan.grid, Config::kThreads, plan.smem_bytes, launch,
                                   device, stream, configured_devices);
  }
  return flash::launch(flash_fwd_kernel<Config>, plan.grid, Config::kThreads, plan.smem_bytes, launch, device, stream,
                       configured_devices);
}

template <class Config, Dtype kDtype>
cudaError_t run_flash_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static_assert(Config::kConsumerGroups * static_cast<int>(sizeof(FwdStorage<Config>)) ==
                    plan::sm90_fwd_smem_bytes(Config::kTile, Config::kVariant, kDtype),
                "plan and kernel agree on the shared memory");
  static_assert(sizeof(WorkTile) == plan::kWorkTileBytes);
  FwdLaunch launch = fwd_launch(params, plan);
  const cudaError_t status = make_tensor_maps<Config>(launch, kDtype);
  return status == cudaSuccess ? launch_kernel<Config>(launch, plan, stream) : status;
}

// Variants without a kernel are in no plan.
template <Dtype kDtype, int kHeadDim, FwdVariant kVariant>
cudaError_t run_variant(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::sm90_has_variant(kHeadDim, kVariant)) {
    return run_flash_fwd<FwdConfig<kDtype, kHeadDim, kVariant>, kDtype>(params, plan, stream);
  }
  return cudaErrorInvalidValue;
}

template <Dtype kDtype, int kHeadDim, int kHeadDimV = kHeadDim>
cudaError_t run_mha_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if constexpr (kHeadDimV != kHeadDim) {
    return run_flash_fwd<FwdConfig<kDtype, kHeadDim, FwdVariant::kPlain, kHeadDimV>, kDtype>(params, plan, stream);
  } else {
    switch (plan.variant) {
      case FwdVariant::kPlain: return run_variant<kDtype, kHeadDim, FwdVariant::kPlain>(params, plan, stream);
      case FwdVariant::kShort: return run_variant<kDtype, kHeadDim, FwdVariant::kShort>(params, plan, stream);
      case FwdVariant::kDropout: return run_variant<kDtype, kHeadDim, FwdVariant::kDropout>(params, plan, stream);
      case FwdVariant::kScoreMod: return run_variant<kDtype, kHeadDim, FwdVariant::kScoreMod>(params, plan, stream);
      case FwdVariant::kMasked: return run_variant<kDtype, kHeadDim, FwdVariant::kMasked>(params, plan, stream);
      case FwdVariant::kOneWave: return run_variant<kDtype, kHeadDim, FwdVariant::kOneWave>(params, plan, stream);
      case FwdVariant::kSoftcap: return run_variant<kDtype, kHeadDim, FwdVariant::kSoftcap>(params, plan, stream);
      case FwdVariant::kAlibi: return run_variant<kDtype, kHeadDim, FwdVariant::kAlibi>(params, plan, stream);
    }
    return cudaErrorInvalidValue;
  }
}

}  // namespace sm90
}  // namespace flash
