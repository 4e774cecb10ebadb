// Tensor maps and launches of the wgmma backward.
#pragma once

#include <type_traits>

#include "kernels/common/launch.h"
#include "kernels/sm90/bwd_kernel.h"
#include "kernels/sm90/bwd_wide_launch.h"
#include "plan/bwd_plan.h"

namespace flash {
namespace sm90 {

template <class Config>
cudaError_t make_tensor_maps(BwdLaunch& launch, Dtype dtype) {
  const Flash_bwd_params& params = launch.params;
  constexpr int kStoredRows = 16;  // of one warp
  struct Matrix {
    CUtensorMap& map;
    const void* data;
    const MatrixStrides& strides;
    bool is_query;
    int rows;
    int head_dim;
  };
  const Matrix matrices[] = {
      {launch.q_map, params.q_ptr, params.q_strides, true, Config::kBlockM, params.d},
      {launch.do_map, params.do_ptr, params.do_strides, true, Config::kBlockM, params.d_v},
      {launch.k_map, params.k_ptr, params.k_strides, false, Config::kBlockN / Config::kKvParts, params.d},
      {launch.v_map, params.v_ptr, params.v_strides, false, Config::kBlockN / Config::kKvParts, params.d_v},
      {launch.dk_map, params.dk_ptr, params.dk_strides, false, kStoredRows, params.d},
      {launch.dv_map, params.dv_ptr, params.dv_strides, false, kStoredRows, params.d_v},
  };
  for (const Matrix& matrix : matrices) {
    const cudaError_t status = make_tensor_map(
        matrix.map, tensor_map_source(params, matrix.data, matrix.strides, matrix.is_query, matrix.head_dim), dtype,
        {Config::kAtomCols, matrix.rows});
    if (status != cudaSuccess) return status;
  }
  if constexpr (Config::kDqInSmem) {
    return make_tensor_map(launch.dq_map, tensor_map_source(params, params.dq_ptr, params.dq_strides, true, params.d),
                           dtype, {Config::kHeadDim, kStoredRows});
  }
  return cudaSuccess;
}

template <class Config>
constexpr int checked_smem_bytes() {
  constexpr int kBytes = static_cast<int>(sizeof(BwdStorage<Config>));
  static_assert(
      kBytes == plan::sm90_bwd_smem_bytes(Config::kTile, Config::kIsGeneral, Config::kDqInSmem, Config::kDtype),
      "plan and kernel agree on the shared memory");
  return kBytes;
}

template <class Config>
cudaError_t launch_kernel(void (*kernel)(BwdLaunch), const BwdLaunch& launch, const plan::BwdPlan& plan,
                          cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return flash::launch(kernel, plan.grid, Config::kThreads, checked_smem_bytes<Config>(), launch, launch.params.device,
                       stream, configured_devices);
}

template <class Config>
cudaError_t run_flash_bwd_convert_dq(const Flash_bwd_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return flash::launch(flash_bwd_convert_dq_kernel<Config>, plan.dq_grid, 32 * Config::kDqWarps, plan.dq_smem_bytes,
                       params, params.device, stream, configured_devices);
}

// softmax_d; then the kernel that computes all gradients of whole heads, or the one that adds to dQ in global memory,
// and dQ's conversion.
template <class Config>
cudaError_t run_flash_bwd(const Flash_bwd_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  BwdLaunch launch{};
  launch.params = params;
  launch.grid = plan.order;
  launch.tile_count_semaphore = plan.is_dynamic ? params.tile_count_semaphore : nullptr;
  cudaError_t status = cudaSuccess;
  if (plan.runs(plan::BwdStage::kAdd)) status = make_tensor_maps<Config>(launch, Config::kDtype);
  if (status == cudaSuccess && plan.runs(plan::BwdStage::kBegin))
    status = run_softmax_d(params, Config::kDtype, stream);
  if (status != cudaSuccess) return status;
  if constexpr (Config::kDqInSmem) {
    return launch_kernel<Config>(flash_bwd_heads_kernel<Config>, launch, plan, stream);
  } else {
    if (plan.runs(plan::BwdStage::kAdd)) status = launch_kernel<Config>(flash_bwd_kernel<Config>, launch, plan, stream);
    if (status != cudaSuccess || !plan.runs(plan::BwdStage::kEnd)) return status;
    using Plain = BwdConfig<Config::kDtype, Config::kHeadDim, BwdVariant::kPlain>;
    return run_flash_bwd_convert_dq<Plain>(params, plan, stream);
  }
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_bwd_narrow(const Flash_bwd_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  if constexpr (kHeadDim == plan::kSm90SharedDqTile.head_dim) {
    using Shared = BwdConfig<kDtype, kHeadDim, BwdVariant::kPlain, DqLocation::kShared>;
    if (plan.dq_in_smem) return run_flash_bwd<Shared>(params, plan, stream);
  }
  if constexpr (kHeadDim == plan::kSm90TwoPassTile.head_dim) {
    using TwoPass = BwdWideConfig<kDtype, kHeadDim, BwdVariant::kPlain>;
    if (plan.dq_pass) return run_flash_bwd_passes<TwoPass, TwoPass>(params, plan, stream);
  }
  const auto run = [&](auto variant) {
    return run_flash_bwd<BwdConfig<kDtype, kHeadDim, decltype(variant)::value>>(params, plan, stream);
  };
  switch (plan.variant) {
    case plan::BwdVariant::kPlain: return run(std::integral_constant<BwdVariant, BwdVariant::kPlain>());
    case plan::BwdVariant::kGeneral: return run(std::integral_constant<BwdVariant, BwdVariant::kGeneral>());
    case plan::BwdVariant::kAccumulate: return run(std::integral_constant<BwdVariant, BwdVariant::kAccumulate>());
    case plan::BwdVariant::kDropout: break;
  }
  return cudaErrorInvalidValue;  // of the other family
}

template <Dtype kDtype, int kHeadDim, int kHeadDimV = kHeadDim>
cudaError_t run_mha_bwd(const Flash_bwd_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::has_dq_pass(plan::sm90_bwd_tile(kHeadDim, kHeadDimV))) {
    return run_mha_bwd_wide<kDtype, kHeadDim, kHeadDimV>(params, plan, stream);
  } else {
    return run_mha_bwd_narrow<kDtype, kHeadDim>(params, plan, stream);
  }
}

}  // namespace sm90
}  // namespace flash
