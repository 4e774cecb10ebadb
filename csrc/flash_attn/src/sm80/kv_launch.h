// Launches of the mma.sync attention against a KV cache: the attention and, where tiles may be cut, their merge.
#pragma once

#include "common/launch.h"
#include "sm80/kv_kernel.h"

namespace flash {

template <class Config>
cudaError_t run_flash_fwd_split(const Flash_kvcache_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  if (params.stages == 0) return cudaErrorInvalidConfiguration;
  const int smem_bytes = plan::kv_smem_bytes(Config::kTile, params.stages);
  // After the kernel that appends, whose rows this one waits for before it reads them.
  const auto start = params.seqlen_new > 0 ? launch_dependent<Flash_kvcache_params> : launch<Flash_kvcache_params>;
  return start(flash_fwd_split_kernel<Config>, params.thread_blocks, Config::kThreads, smem_bytes, params,
               params.device, stream, configured_devices);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_split_sm80(const Flash_kvcache_params& params, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  if (params.tile_size == 0) status = run_flash_fwd_split<KvConfig<kDtype, kHeadDim, 0>>(params, stream);
  if (params.tile_size == 1) status = run_flash_fwd_split<KvConfig<kDtype, kHeadDim, 1>>(params, stream);
  if constexpr (plan::kv_size_exists(kHeadDim, 2)) {
    if (params.tile_size == 2) status = run_flash_fwd_split<KvConfig<kDtype, kHeadDim, 2>>(params, stream);
  }
  if (status != cudaSuccess || !params.merges) return status;
  return run_kvcache_merge_<kDtype>(params, stream);
}

}  // namespace flash
