// The counters from which persistent kernels draw their tiles: zero between launches, and never shared by two launches
// that may run at the same time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <unordered_map>

#include "allocate.h"

namespace flash {

constexpr int64_t kCountersPerDevice = 1024;

// Counters of one device, one for each stream that ever asked. Launches of a stream follow each other, and each leaves
// its counter at zero.
struct StreamCounters {
  at::Tensor values;
  std::unordered_map<unsigned long long, int64_t> slots;  // by the stream's identity, which is never used again

  // Null when there are more streams than counters.
  int* of(unsigned long long stream, const at::Tensor& q) {
    if (!values.defined()) {
      values = new_zeros(q, {kCountersPerDevice}, at::kInt);
      C10_CUDA_CHECK(cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()));  // other streams use it too
    }
    const auto slot = slots.emplace(stream, static_cast<int64_t>(slots.size())).first->second;
    return slot < kCountersPerDevice ? values.mutable_data_ptr<int>() + slot : nullptr;
  }
};

// A counter for one launch on the current stream. A captured launch gets a counter of its own, because its graph may
// run on any stream: `own` holds it until the launch is queued.
inline int* tile_counter(const at::Tensor& q, at::Tensor& own) {
  static std::mutex mutex;
  // Never destroyed: the tensors must not be freed after the CUDA driver at exit.
  static auto& devices = *new std::unordered_map<int, StreamCounters>();
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) {
    unsigned long long stream = 0;
    C10_CUDA_CHECK(cudaStreamGetId(c10::cuda::getCurrentCUDAStream().stream(), &stream));
    const std::lock_guard<std::mutex> lock(mutex);
    int* const counter = devices[q.device().index()].of(stream, q);
    if (counter != nullptr) return counter;
  }
  own = new_zeros(q, {1}, at::kInt);
  return own.mutable_data_ptr<int>();
}

}  // namespace flash
