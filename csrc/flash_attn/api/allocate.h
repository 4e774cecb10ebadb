// New CUDA tensors without torch's dispatcher, which takes longer than the allocation.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>

namespace flash {

// Contiguous and uninitialised, on the device of `like`.
inline at::Tensor new_empty(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::detail::empty_cuda(shape, dtype, like.device(), std::nullopt);
}

// Zeroed on the current stream.
inline at::Tensor new_zeros(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {
  at::Tensor tensor = new_empty(like, shape, dtype);
  if (tensor.nbytes() > 0) {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
    C10_CUDA_CHECK(cudaMemsetAsync(tensor.mutable_data_ptr(), 0, tensor.nbytes(), stream));
  }
  return tensor;
}

}  // namespace flash
