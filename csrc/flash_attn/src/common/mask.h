// Keys outside the visible range of a row become -inf. Runs on edge blocks only.
#pragma once

#include <cute/tensor.hpp>

#include "common/block_range.h"

namespace flash {

// The two sides are masked apart, because most edge blocks touch one side only. Both key limits grow with the row:
// the first row decides whether the right side is touched, the last row whether the left one is.
template <class Scores, class Coords>
__device__ __forceinline__ void apply_mask(Scores& scores, const Coords& coords, const Visibility& visibility,
                                           int row_begin, int row_end, int col_begin, int col_end) {
  using namespace cute;
  if (visibility.key_end(row_begin) < col_end) {
#pragma unroll
    for (int mi = 0; mi < size<0>(scores); ++mi) {
      const int limit = visibility.key_end(row_begin + coords.row(mi)) - col_begin;
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        if (coords.col(ni) >= limit) scores(mi, ni) = -INFINITY;
      }
    }
  }
  if (visibility.key_begin(row_end - 1) > col_begin) {
#pragma unroll
    for (int mi = 0; mi < size<0>(scores); ++mi) {
      const int limit = visibility.key_begin(row_begin + coords.row(mi)) - col_begin;
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        if (coords.col(ni) < limit) scores(mi, ni) = -INFINITY;
      }
    }
  }
}

}  // namespace flash
