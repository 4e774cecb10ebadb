// The dtypes of Q, K and V, of torch and of the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "params/dtype.h"

namespace flash {

constexpr const char* kSupportedDtypes = "float16 or bfloat16";
constexpr const char* kCombinedDtypes = "float16, bfloat16 or float32";

inline bool is_supported(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

inline Dtype dtype_of(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf ? Dtype::kFp16 : Dtype::kBf16;
}

}  // namespace flash
