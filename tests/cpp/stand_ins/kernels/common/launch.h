// Launches run at once, block after block.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda_runtime_api.h"
#include "emulated_cuda.h"

namespace flash {

template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads, int, const Params& params, int, cudaStream_t,
                   std::atomic<uint64_t>&) {
  gridDim.x = static_cast<int>(blocks);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) emulation::run_block(threads, [&] { kernel(params); });
  return cudaSuccess;
}

template <class Params>
cudaError_t launch_dependent(void (*kernel)(Params), int64_t blocks, int threads, int smem_bytes, const Params& params,
                             int device, cudaStream_t stream, std::atomic<uint64_t>& configured_devices) {
  return launch(kernel, blocks, threads, smem_bytes, params, device, stream, configured_devices);
}

}  // namespace flash
