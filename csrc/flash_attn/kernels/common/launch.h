// Checked kernel launches with dynamic shared memory, with or without programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "plan/grid.h"

namespace flash {

// Above 48 KB the limit of a kernel must be raised once per device. Racing threads at most repeat the call.
template <class Params>
cudaError_t allow_shared_memory(void (*kernel)(Params), int smem_bytes, int device,
                                std::atomic<uint64_t>& configured_devices) {
  const uint64_t device_bit = uint64_t{1} << (device % 64);
  if (smem_bytes <= 48 * 1024 || (configured_devices.load(std::memory_order_relaxed) & device_bit)) return cudaSuccess;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (status == cudaSuccess) configured_devices.fetch_or(device_bit, std::memory_order_relaxed);
  return status;
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), int64_t blocks, int threads, int smem_bytes, const Params& params,
                   int device, cudaStream_t stream, std::atomic<uint64_t>& configured_devices) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > plan::kMaxGridBlocks) return cudaErrorInvalidConfiguration;
  const cudaError_t status = allow_shared_memory(kernel, smem_bytes, device, configured_devices);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(blocks), threads, smem_bytes, stream>>>(params);
  return cudaGetLastError();
}

// Whether the loaded code is for sm_90 or later, which programmatic dependent launch (kernels/common/pdl.h) and
// clusters need. Queried once for all kernels with these parameters: they are built for the same architectures.
template <class Params>
cudaError_t runs_sm90_code(void (*kernel)(Params), int device, bool& result) {
  static std::atomic<uint64_t> queried{0}, supported{0};
  const uint64_t device_bit = uint64_t{1} << (device % 64);
  if (!(queried.load() & device_bit)) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (status != cudaSuccess) return status;
    if (attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90) supported.fetch_or(device_bit);
    queried.fetch_or(device_bit);
  }
  result = supported.load() & device_bit;
  return cudaSuccess;
}

// A programmatic dependent launch: may overlap the preceding kernel in the stream; `kernel` calls
// wait_for_previous_kernel(). cluster: thread blocks per cluster, 1 unless runs_sm90_code().
template <class Params>
cudaError_t launch_dependent(void (*kernel)(Params), int64_t blocks, int threads, int smem_bytes, const Params& params,
                             int device, cudaStream_t stream, std::atomic<uint64_t>& configured_devices,
                             int cluster = 1) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > plan::kMaxGridBlocks) return cudaErrorInvalidConfiguration;
  cudaError_t status = allow_shared_memory(kernel, smem_bytes, device, configured_devices);
  bool is_sm90 = false;
  if (status == cudaSuccess) status = runs_sm90_code(kernel, device, is_sm90);
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = (is_sm90 ? 1 : 0) + (cluster > 1 ? 1 : 0);
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace flash
