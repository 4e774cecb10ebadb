// The twin of csrc/flash_attn/launch_check.h: a GPU with few multiprocessors, so that small problems are cut as well.
#pragma once

#include <cuda_runtime_api.h>

#include <ATen/core/Tensor.h>

#include "checks.h"

namespace flash {

struct DeviceFacts {
  int multiprocessors = 4;
  int smem_per_multiprocessor = 233472;
  int smem_per_block = 232448;
};

inline DeviceFacts& mutable_device_facts() {
  static DeviceFacts facts;
  return facts;
}
inline const DeviceFacts& device_facts(int) { return mutable_device_facts(); }
inline int multiprocessor_count(int) { return mutable_device_facts().multiprocessors; }
inline void check_device_supported(const at::Tensor&) {}

inline void check_launch(cudaError_t status, const char* kernel, const at::Tensor&) {
  if (status != cudaSuccess) checks::fail(kernel, "launch failed: ", int64_t{status});
}

}  // namespace flash
