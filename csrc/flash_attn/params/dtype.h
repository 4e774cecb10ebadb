// The element types of Q, K, V, O and their gradients, and of an 8-bit KV cache. Plain C++17.
#pragma once

namespace flash {

enum class Dtype { kFp16, kBf16, kE4m3, kInt8 };

constexpr int dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16: return 2;
    case Dtype::kBf16: return 2;
    case Dtype::kE4m3: return 1;
    case Dtype::kInt8: return 1;
  }
  return 0;
}

constexpr bool is_eight_bit(Dtype dtype) { return dtype_bytes(dtype) == 1; }

constexpr const char* dtype_name(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16: return "fp16";
    case Dtype::kBf16: return "bf16";
    case Dtype::kE4m3: return "e4m3";
    case Dtype::kInt8: return "int8";
  }
  return "";
}

}  // namespace flash
