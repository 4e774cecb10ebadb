// Tensors as kernels take them: new ones without torch's dispatcher, which takes longer than the allocation; aligned
// and padded copies; strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <vector>

#include "params/flash.h"

namespace flash {

using Tensors = std::vector<at::Tensor>;

// ---- new ----

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

// ---- alignment and strides ----

// Whether the elements of a row are adjacent.
inline bool has_contiguous_rows(const at::Tensor& tensor) { return tensor.size(-1) <= 1 || tensor.stride(-1) == 1; }

// Whether every row begins at a multiple of vector_bytes; attention kernels move vectors of 16 bytes. Strides of axes
// of size 1 do not matter.
inline bool is_aligned(const at::Tensor& tensor, int64_t vector_bytes = 16) {
  const int64_t elements = vector_bytes / tensor.element_size();
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % vector_bytes != 0) return false;
  for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis) {
    if (tensor.size(axis) > 1 && tensor.stride(axis) % elements != 0) return false;
  }
  return has_contiguous_rows(tensor);
}

inline at::Tensor aligned(const at::Tensor& tensor) {
  return tensor.numel() == 0 || is_aligned(tensor) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

// (batch or pages, rows, heads, d) or (rows, heads, d).
inline MatrixStrides matrix_strides(const at::Tensor& tensor) {
  MatrixStrides strides;
  strides.batch = tensor.dim() == 4 ? tensor.stride(0) : 0;
  strides.row = tensor.stride(-3);
  strides.head = tensor.stride(-2);
  return strides;
}

// Of a new tensor with all axes of `like` but the last, which has head_dim columns.
inline MatrixStrides contiguous_strides(const at::Tensor& like, int64_t head_dim) {
  MatrixStrides strides;
  strides.head = head_dim;
  strides.row = strides.head * like.size(-2);
  strides.batch = like.dim() == 4 ? strides.row * like.size(-3) : 0;
  return strides;
}

// The widest vectors, of 16 or 4 bytes or one element, in which rows can be read: start, strides and row length are
// multiples of it.
inline int vector_bytes(const at::Tensor& tensor) {
  const int element_bytes = static_cast<int>(tensor.element_size());
  for (const int bytes : {16, 4}) {
    if (is_aligned(tensor, bytes) && tensor.size(-1) % (bytes / element_bytes) == 0) return bytes;
  }
  return element_bytes;
}

// matrix_strides() with 0 for axes of size 1, whose strides may not suit 16-byte vectors.
inline MatrixStrides cache_strides(const at::Tensor& tensor) {
  MatrixStrides strides = matrix_strides(tensor);
  if (tensor.size(0) <= 1) strides.batch = 0;
  if (tensor.size(1) <= 1) strides.row = 0;
  if (tensor.size(2) <= 1) strides.head = 0;
  return strides;
}

// ---- padding ----

// Pads the last axis with zero columns; 0: as it is.
inline at::Tensor pad_head_dim(const at::Tensor& tensor, int64_t head_dim) {
  const int64_t own = tensor.size(-1);
  if (head_dim == 0 || own == head_dim) return tensor;
  at::DimVector shape(tensor.sizes().begin(), tensor.sizes().end());
  shape.back() = head_dim;
  at::Tensor padded = new_empty(tensor, shape, tensor.scalar_type());
  padded.narrow(-1, 0, own).copy_(tensor);
  padded.narrow(-1, own, head_dim - own).zero_();
  return padded;
}

// The layout of aligned(), without its memory.
inline at::Tensor aligned_layout(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || is_aligned(tensor)) return tensor;
  return at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
}

// The layout of pad_head_dim(), without its memory.
inline at::Tensor padded_layout(const at::Tensor& tensor, int64_t head_dim) {
  if (head_dim == 0 || tensor.size(-1) == head_dim) return tensor;
  at::DimVector shape(tensor.sizes().begin(), tensor.sizes().end());
  shape.back() = head_dim;
  return at::empty(shape, tensor.options().device(at::kMeta));
}

// An output of `head_dim` columns: computed in the caller's tensor if the kernels can write it, else in a new one that
// finish() slices and copies.
class Output {
 public:
  // pad: columns that the kernels write; 0: as many as the result has. `like`: on the result's device.
  // accumulates: the kernels add to the given fp32 tensor, or to zeros that finish() adds to it.
  Output(const std::optional<at::Tensor>& given, const at::Tensor& like, at::ScalarType dtype, at::IntArrayRef shape,
         int64_t pad, bool accumulates = false)
      : given_(given), head_dim_(shape.back()), accumulates_(accumulates) {
    const int64_t computed_dim = pad == 0 ? head_dim_ : pad;
    const bool direct = given.has_value() && head_dim_ == computed_dim && is_aligned(*given);
    if (direct) {
      computed = *given;
      return;
    }
    at::DimVector computed_shape(shape.begin(), shape.end());
    computed_shape.back() = computed_dim;
    computed = accumulates ? new_zeros(like, computed_shape, at::kFloat) : new_empty(like, computed_shape, dtype);
  }

  at::Tensor finish() const {
    if (given_.has_value() && computed.is_same(*given_)) return computed;
    const bool is_padded = computed.size(-1) != head_dim_;
    const at::Tensor columns = is_padded ? computed.narrow(-1, 0, head_dim_) : computed;
    if (!given_.has_value()) return is_padded ? columns.contiguous() : columns;
    if (accumulates_) {
      given_->add_(columns);
    } else {
      given_->copy_(columns);
    }
    return *given_;
  }

  at::Tensor computed;

 private:
  const std::optional<at::Tensor>& given_;
  int64_t head_dim_;
  bool accumulates_;
};

}  // namespace flash
