// A checked launch with dynamic shared memory.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "../plan/grid.h"

namespace flash {

// Kernels above 48 KB need their limit raised once per device. Racing threads at most repeat the call.
template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads, int smem_bytes, const Params& params,
                   int device, cudaStream_t stream, std::atomic<uint64_t>& configured_devices) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > plan::kMaxGridBlocks) return cudaErrorInvalidConfiguration;
  const uint64_t device_bit = uint64_t{1} << (device % 64);
  if (smem_bytes > 48 * 1024 && !(configured_devices.load(std::memory_order_relaxed) & device_bit)) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
    if (status != cudaSuccess) return status;
    configured_devices.fetch_or(device_bit, std::memory_order_relaxed);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace flash
