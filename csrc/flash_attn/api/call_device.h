// The device of a call.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

namespace flash {

// Makes a device current until the end of the scope, and its context too: a thread that has not yet called the CUDA
// runtime has none, in which no tensor map can be encoded, and CUDAGuard alone leaves device 0 so.
class CallDevice {
 public:
  explicit CallDevice(c10::Device device) : guard_(device) { C10_CUDA_CHECK(cudaSetDevice(device.index())); }

 private:
  c10::cuda::CUDAGuard guard_;
};

}  // namespace flash
