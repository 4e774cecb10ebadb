// The dtypes of Q, K and V, and of the codes of an 8-bit cache: of torch and of the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "params/dtype.h"

namespace flash {

constexpr const char* kSupportedDtypes = "float16 or bfloat16";
constexpr const char* kCombinedDtypes = "float16, bfloat16 or float32";

inline bool is_supported(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

inline Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf: return Dtype::kFp16;
    case at::kFloat8_e4m3fn: return Dtype::kE4m3;
    case at::kChar: return Dtype::kInt8;
    default: return Dtype::kBf16;
  }
}

}  // namespace flash
