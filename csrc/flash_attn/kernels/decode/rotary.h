// Rotary embedding of one pair of elements (Su et al., "RoFormer", 2021).
#pragma once

#include "params/kvcache.h"

namespace flash {
namespace decode {

struct RotaryPair {
  int first;
  int second;
};

__device__ __forceinline__ RotaryPair rotary_pair(const Rotary& rotary, int pair) {
  return rotary.interleaved ? RotaryPair{2 * pair, 2 * pair + 1} : RotaryPair{pair, pair + rotary.pairs};
}

// Rotates (a, b) by the angle of `position`, in fp32.
template <class Element>
__device__ __forceinline__ void rotate_pair(const Rotary& rotary, int position, int pair, Element& a, Element& b) {
  const float cos =
      static_cast<float>(static_cast<const Element*>(rotary.cos_ptr)[position * rotary.cos_stride + pair]);
  const float sin =
      static_cast<float>(static_cast<const Element*>(rotary.sin_ptr)[position * rotary.sin_stride + pair]);
  const float x = static_cast<float>(a), y = static_cast<float>(b);
  a = static_cast<Element>(x * cos - y * sin);
  b = static_cast<Element>(x * sin + y * cos);
}

}  // namespace decode
}  // namespace flash
