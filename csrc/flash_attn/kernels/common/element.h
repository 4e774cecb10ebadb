// The 16-bit element types, and conversion of fp32 numbers to pairs of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include <type_traits>

#include "params/flash.h"

namespace flash {

template <Dtype kDtype>
using ElementOf = std::conditional_t<kDtype == Dtype::kFp16, cutlass::half_t, cutlass::bfloat16_t>;

// The types of CUDA's own headers.
template <Dtype kDtype>
using NativeOf = std::conditional_t<kDtype == Dtype::kFp16, __half, __nv_bfloat16>;

template <Dtype kDtype>
using NativePairOf = std::conditional_t<kDtype == Dtype::kFp16, __half2, __nv_bfloat162>;

__device__ __forceinline__ uint32_t pack_pair(float low, float high, cutlass::half_t) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, cutlass::bfloat16_t) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// The same of max(x, 0), and of NaN as it is.
__device__ __forceinline__ uint32_t pack_pair_relu(float low, float high, cutlass::half_t) {
  uint32_t pair;
  asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t pack_pair_relu(float low, float high, cutlass::bfloat16_t) {
  uint32_t pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace flash
