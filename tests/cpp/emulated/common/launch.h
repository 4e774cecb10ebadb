// The twin of src/common/launch.h: a launch runs the whole grid.
#pragma once

#include <atomic>

#include "../plan/grid.h"

namespace flash {

template <class Params>
struct EmulatedCall {
  void (*kernel)(Params);
  const Params& params;
};

template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads, int smem_bytes, const Params& params, int,
                   cudaStream_t, std::atomic<uint64_t>&) {
  const EmulatedCall<Params> call{kernel, params};
  emulation::run_grid(
      blocks, threads, smem_bytes,
      [](const void* arguments) {
        const auto& own = *static_cast<const EmulatedCall<Params>*>(arguments);
        own.kernel(own.params);
      },
      &call);
  return cudaSuccess;
}

template <class Params>
cudaError_t launch_dependent(void (*kernel)(Params), int64_t blocks, int threads, int smem_bytes, const Params& params,
                             int device, cudaStream_t stream, std::atomic<uint64_t>& configured_devices) {
  return launch(kernel, blocks, threads, smem_bytes, params, device, stream, configured_devices);
}

}  // namespace flash
