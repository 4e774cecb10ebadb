// Stores of accumulators, number by number.
#pragma once

#include "kernels/common/element.h"

namespace flash {

template <class Element, class Accumulator>
void store_accumulator(Accumulator& acc, int thread, Element* base, int64_t stride, int rows, int cols) {
  for (int i = 0; i < Accumulator::kSize; ++i) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, col = i / 4 * 8 + thread % 4 * 2 + i % 2;
    if (row < rows && col < cols) base[row * stride + col].bits = to_bf16(acc(i));
  }
}

}  // namespace flash
