// Tensors as kernels take them: aligned, and padded to one head dim where the plan says so.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "api/allocate.h"
#include "api/set_params.h"

namespace flash {

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

// The memory layout of aligned(), without its memory.
inline at::Tensor aligned_layout(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || is_aligned(tensor)) return tensor;
  return at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
}

// The same of pad_head_dim().
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
  // pad: columns that the kernels write; 0: as many as the result has. `like`: of the result's dtype and device.
  // accumulates: the kernels add to the given fp32 tensor, or to zeros that finish() adds to it.
  Output(const OptionalTensor& given, const at::Tensor& like, at::IntArrayRef shape, int64_t pad,
         bool accumulates = false)
      : given_(given), head_dim_(shape.back()), accumulates_(accumulates) {
    const int64_t computed_dim = pad == 0 ? head_dim_ : pad;
    const bool direct = given.has_value() && head_dim_ == computed_dim && is_aligned(*given);
    if (direct) {
      computed = *given;
      return;
    }
    at::DimVector computed_shape(shape.begin(), shape.end());
    computed_shape.back() = computed_dim;
    computed =
        accumulates ? new_zeros(like, computed_shape, at::kFloat) : new_empty(like, computed_shape, like.scalar_type());
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
  const OptionalTensor& given_;
  int64_t head_dim_;
  bool accumulates_;
};

}  // namespace flash
