// Conversion of fp32 accumulators to 16-bit operands, packed in pairs.
#pragma once

#include <cute/tensor_impl.hpp>

#include "kernels/common/element.h"

namespace flash {

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

// The same with 0 for negative elements.
template <class Element, class Tensor>
__device__ __forceinline__ auto convert_relu(const Tensor& source) {
  using namespace cute;
  auto result = make_tensor<Element>(source.layout());
  auto pairs = recast<uint32_t>(result);
#pragma unroll
  for (int i = 0; i < size(pairs); ++i) pairs(i) = pack_pair_relu(source(2 * i), source(2 * i + 1), Element{});
  return result;
}

}  // namespace flash
