// Launches of the mma.sync backward.
#pragma once

#include <type_traits>

#include "kernels/common/launch.h"
#include "kernels/sm80/bwd_launch_params.h"
#include "plan/bwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm80/bwd_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm80 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim, BwdVariant kVariant, bool kSmallTile>
struct BwdConfig;
template <class Config>
__global__ void flash_bwd_kernel(const __grid_constant__ BwdLaunch launch) {}
template <class Config>
__global__ void flash_bwd_convert_dq_kernel(const __grid_constant__ Flash_bwd_params params) {}
#endif

template <class Config>
cudaError_t run_flash_bwd(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch(flash_bwd_kernel<Config>, plan.grid, plan.threads, plan.smem_bytes,
                BwdLaunch{params, plan.stages, plan.order, params.mask, params.ds}, params.device, stream,
                configured_devices);
}

template <class Config>
cudaError_t run_flash_bwd_convert_dq(const Flash_bwd_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch(flash_bwd_convert_dq_kernel<Config>, plan.dq_grid, plan.dq_threads, plan.dq_smem_bytes, params,
                params.device, stream, configured_devices);
}

template <Dtype kDtype, int kHeadDim, bool kSmallTile>
cudaError_t run_flash_bwd_variant(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  const auto run = [&](auto variant) {
    return run_flash_bwd<BwdConfig<kDtype, kHeadDim, decltype(variant)::value, kSmallTile>>(params, plan, stream);
  };
  switch (plan.variant) {
    case plan::BwdVariant::kPlain: return run(std::integral_constant<BwdVariant, BwdVariant::kPlain>());
    case plan::BwdVariant::kDropout: return run(std::integral_constant<BwdVariant, BwdVariant::kDropout>());
    case plan::BwdVariant::kAccumulate: return run(std::integral_constant<BwdVariant, BwdVariant::kAccumulate>());
    case plan::BwdVariant::kGeneral:
    case plan::BwdVariant::kListed:
    case plan::BwdVariant::kListedPlain:
    case plan::BwdVariant::kBiased: break;
  }
  return cudaErrorInvalidValue;  // a variant of the wgmma family
}

template <Dtype kDtype, int kHeadDim, bool kSmallTile>
cudaError_t run_mha_bwd_tile(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  if (plan.stages == 0) return cudaErrorInvalidConfiguration;
  cudaError_t status = cudaSuccess;
  if (plan.runs(plan::BwdStage::kBegin)) status = run_softmax_d(params, kDtype, stream);
  if (status == cudaSuccess && plan.runs(plan::BwdStage::kAdd)) {
    status = run_flash_bwd_variant<kDtype, kHeadDim, kSmallTile>(params, plan, stream);
  }
  if (status != cudaSuccess || !plan.runs(plan::BwdStage::kEnd)) return status;
  return run_flash_bwd_convert_dq<BwdConfig<kDtype, kHeadDim, BwdVariant::kPlain, kSmallTile>>(params, plan, stream);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_bwd(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::small_bwd_tile(kHeadDim) != nullptr) {
    if (plan.small_tile) return run_mha_bwd_tile<kDtype, kHeadDim, true>(params, plan, stream);
  }
  return run_mha_bwd_tile<kDtype, kHeadDim, false>(params, plan, stream);
}

}  // namespace sm80

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_bwd_(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  return sm80::run_mha_bwd<kDtype, kHeadDim>(params, plan, stream);
}

}  // namespace flash
