// Keys outside the visible range of a row become -inf. Runs on edge blocks only.
#pragma once

#include <cute/tensor.hpp>

#include "common/block_range.h"

namespace flash {

template <class Scores, class Coords>
__device__ __forceinline__ void apply_mask(Scores& scores, const Coords& coords, const Visibility& visibility,
                                           int row_begin, int col_begin) {
  using namespace cute;
#pragma unroll
  for (int mi = 0; mi < size<0>(scores); ++mi) {
    const int row = row_begin + coords.row(mi);
    const int key_begin = visibility.key_begin(row) - col_begin;
    const int key_end = visibility.key_end(row) - col_begin;
#pragma unroll
    for (int ni = 0; ni < size<1>(scores); ++ni) {
      const int col = coords.col(ni);
      if (col < key_begin || col >= key_end) scores(mi, ni) = -INFINITY;
    }
  }
}

}  // namespace flash
