// Launches of the mma.sync decode kernel: the attention and, where tiles may be split, the combine.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/decode/variant.h"
#include "params/kvcache.h"
#include "plan/kv_tiles.h"
#ifdef __CUDA_ARCH__
#include "kernels/decode/kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace decode {

#ifndef __CUDA_ARCH__  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim, int kSize, KvVariant kVariant>
struct KvConfig;
template <class Config>
__global__ void flash_fwd_split_kernel(const __grid_constant__ Flash_kvcache_params params) {}
#endif

template <Dtype kDtype, int kHeadDim, int kSize, KvVariant kVariant>
cudaError_t run_flash_fwd_split(Flash_kvcache_params& params, cudaStream_t stream) {
  using Config = KvConfig<kDtype, kHeadDim, kSize, kVariant>;
  constexpr plan::KvTile kTile = plan::kv_tile(kHeadDim, kSize, kDtype);
  static std::atomic<uint64_t> configured_devices{0};
  if (params.stages == 0) return cudaErrorInvalidConfiguration;
  if (params.in_clusters) {
    const cudaError_t status = runs_sm90_code(flash_fwd_split_kernel<Config>, params.device, params.in_clusters);
    if (status != cudaSuccess) return status;
  }
  // Calls may differ in their stages (FLASH_ATTN_SMEM_LIMIT): the kernel may take as much as the device has.
  int most = 0;
  cudaError_t status = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, params.device);
  if (status == cudaSuccess) {
    status = allow_shared_memory(flash_fwd_split_kernel<Config>, most, params.device, configured_devices);
  }
  if (status != cudaSuccess) return status;
  const int smem_bytes = plan::kv_smem_bytes(kTile, params.stages);
  return launch_dependent(flash_fwd_split_kernel<Config>, params.thread_blocks, plan::kv_threads(kTile), smem_bytes,
                          params, params.device, stream, configured_devices, params.in_clusters ? 2 : 1);
}

template <Dtype kDtype, int kHeadDim, int kSize>
cudaError_t run_flash_fwd_split_variant(Flash_kvcache_params& params, cudaStream_t stream) {
  if (params.mask_bits.given()) {
    return run_flash_fwd_split<kDtype, kHeadDim, kSize, KvVariant::kMaskBits>(params, stream);
  }
  if constexpr (plan::kv_may_swap_ab(plan::kv_tile(kHeadDim, kSize, kDtype))) {
    if (params.swaps_ab) return run_flash_fwd_split<kDtype, kHeadDim, kSize, KvVariant::kSwapAb>(params, stream);
  }
  if constexpr (plan::kv_tile(kHeadDim, kSize, kDtype).has_plain) {
    if (params.is_plain) {
      return run_flash_fwd_split<kDtype, kHeadDim, kSize, KvVariant::kPlain>(params, stream);
    }
  }
  return run_flash_fwd_split<kDtype, kHeadDim, kSize, KvVariant::kAll>(params, stream);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_split_sm80(const Flash_kvcache_params& call, cudaStream_t stream) {
  Flash_kvcache_params params = call;  // the combine needs to know how the attention was launched
  cudaError_t status = cudaErrorInvalidValue;
  if (params.tile_size == 0) status = run_flash_fwd_split_variant<kDtype, kHeadDim, 0>(params, stream);
  if constexpr (plan::kv_size_exists(kHeadDim, 1, kDtype)) {
    if (params.tile_size == 1) status = run_flash_fwd_split_variant<kDtype, kHeadDim, 1>(params, stream);
  }
  if constexpr (plan::kv_size_exists(kHeadDim, 2, kDtype)) {
    if (params.tile_size == 2) status = run_flash_fwd_split_variant<kDtype, kHeadDim, 2>(params, stream);
  }
  if (status != cudaSuccess || !params.combines) return status;
  return run_decode_combine(params, is_eight_bit(kDtype) ? params.q_dtype : kDtype, stream);
}

}  // namespace decode

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_split_(const Flash_kvcache_params& params, cudaStream_t stream) {
  return decode::run_mha_fwd_split_sm80<kDtype, kHeadDim>(params, stream);
}

}  // namespace flash
