// Conversion of fp32 accumulators to 16-bit operands, packed in pairs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cute/tensor.hpp>

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

// A register tensor of the same layout; elements 2i and 2i + 1 are packed together.
template <class Element, class Tensor>
__device__ __forceinline__ auto convert(const Tensor& source) {
  using namespace cute;
  auto result = make_tensor<Element>(source.layout());
  auto pairs = recast<uint32_t>(result);
  static_assert(decltype(size(source))::value % 2 == 0, "elements are packed in pairs");
#pragma unroll
  for (int i = 0; i < size(pairs); ++i) pairs(i) = pack_pair(source(2 * i), source(2 * i + 1), Element{});
  return result;
}

}  // namespace flash
