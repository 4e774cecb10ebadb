// The element types of Q, K, V, O and their gradients. Plain C++17.
#pragma once

namespace flash {

enum class Dtype { kFp16, kBf16 };

constexpr int dtype_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16: return 2;
    case Dtype::kBf16: return 2;
  }
  return 0;
}

constexpr const char* dtype_name(Dtype dtype) { return dtype == Dtype::kFp16 ? "fp16" : "bf16"; }

}  // namespace flash
