// Launches of the two-pass wgmma backward: softmax_d, the dK and dV kernel, the dQ kernel.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/sm90/bwd_tensor_maps.h"
#include "kernels/sm90/bwd_variant.h"
#include "plan/bwd_plan.h"
#ifdef __CUDA_ARCH__
#include "kernels/sm90/bwd_two_pass/dkv_kernel.h"
#include "kernels/sm90/bwd_two_pass/dq_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace sm90 {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim, BwdVariant kVariant, int kHeadDimV>
struct BwdTwoPassConfig;
template <class Config>
__global__ void flash_bwd_dkv_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {}
template <class Config>
__global__ void flash_bwd_dq_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {}
#endif

// Each kernel counts its work tiles.
enum TileCountSemaphore { kDkvTileCount, kDqTileCount };

inline int* tile_count_semaphore(const Flash_bwd_params& params, TileCountSemaphore which, bool is_dynamic) {
  return is_dynamic ? params.tile_count_semaphore + which : nullptr;
}

template <class Config>
cudaError_t run_flash_bwd_dkv(BwdTwoPassLaunch launch, const plan::BwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  launch.num_tiles = static_cast<int>(plan.order.blocks);
  launch.tile_count_semaphore = tile_count_semaphore(launch.params, kDkvTileCount, plan.is_dynamic);
  return launch_dependent(flash_bwd_dkv_kernel<Config>, plan.grid, plan.threads, plan.smem_bytes, launch,
                          launch.params.device, stream, configured_devices);
}

template <class Config>
cudaError_t run_flash_bwd_dq(BwdTwoPassLaunch launch, const plan::BwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  launch.num_tiles = static_cast<int>(plan.dq_tiles);
  launch.tile_count_semaphore = tile_count_semaphore(launch.params, kDqTileCount, plan.dq_is_dynamic);
  if (!plan.dq_overlaps) {
    return flash::launch(flash_bwd_dq_kernel<Config>, plan.dq_grid, plan.dq_threads, plan.dq_smem_bytes, launch,
                         launch.params.device, stream, configured_devices);
  }
  return launch_dependent(flash_bwd_dq_kernel<Config>, plan.dq_grid, plan.dq_threads, plan.dq_smem_bytes, launch,
                          launch.params.device, stream, configured_devices);
}

// softmax_d, then both kernels. DqConfig: the dQ kernel has no variant for sums of dK and dV.
template <class Config, class DqConfig>
cudaError_t run_flash_bwd_two_pass(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan,
                                   cudaStream_t stream) {
  BwdTwoPassLaunch launch{};
  launch.params = params;
  launch.mask = params.mask;
  launch.grid = plan.order;
  cudaError_t status = make_tensor_maps(launch, plan.dtype);
  if (status == cudaSuccess) status = run_softmax_d(params, plan.dtype, stream);
  if (status == cudaSuccess) status = run_flash_bwd_dkv<Config>(launch, plan, stream);
  launch.mask = params.dq_mask;
  launch.ds = params.ds;
  return status == cudaSuccess ? run_flash_bwd_dq<DqConfig>(launch, plan, stream) : status;
}

template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_bwd_two_pass(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  using Plain = BwdTwoPassConfig<kDtype, kHeadDim, BwdVariant::kPlain, kHeadDimV>;
  using General = BwdTwoPassConfig<kDtype, kHeadDim, BwdVariant::kGeneral, kHeadDimV>;
  using Accumulate = BwdTwoPassConfig<kDtype, kHeadDim, BwdVariant::kAccumulate, kHeadDimV>;
  if constexpr (plan::has_listed_bwd(kHeadDim, kHeadDimV)) {
    using Listed = BwdTwoPassConfig<kDtype, kHeadDim, BwdVariant::kListed, kHeadDimV>;
    if (plan.variant == plan::BwdVariant::kListed) return run_flash_bwd_two_pass<Listed, Listed>(params, plan, stream);
  }
  switch (plan.variant) {
    case plan::BwdVariant::kPlain: return run_flash_bwd_two_pass<Plain, Plain>(params, plan, stream);
    case plan::BwdVariant::kGeneral: return run_flash_bwd_two_pass<General, General>(params, plan, stream);
    case plan::BwdVariant::kAccumulate: return run_flash_bwd_two_pass<Accumulate, Plain>(params, plan, stream);
    case plan::BwdVariant::kListed:
    case plan::BwdVariant::kListedPlain:
    case plan::BwdVariant::kBiased:
    case plan::BwdVariant::kDropout: break;
  }
  return cudaErrorInvalidValue;  // a variant of the mma.sync family, or of another head dim
}

}  // namespace sm90
}  // namespace flash
