// Scores of a forward with tangents: P and S' of a block, as row_col_views. kernels/sm90/jvp_fwd_mainloop.h has the
// mathematics.
#pragma once

#include <cute/tensor_impl.hpp>

#include "kernels/common/accumulator.h"

namespace flash {

// Tangents of hidden keys, which may be NaN, become 0.
template <int kRows, class Probs, class Scores>
__device__ __forceinline__ void clear_hidden_tangents(const Probs& probs, Scores& t_scores) {
  using namespace cute;
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
    for (int ni = 0; ni < size<1>(probs); ++ni) {
      if (probs(mi, ni) == 0.0f) t_scores(mi, ni) = 0.0f;
    }
  }
}

// The center of rows whose first visible keys are those of this block: the mean of their S'. centered: a bit for each
// row that has its center.
template <int kRows, class Probs, class Scores>
__device__ __forceinline__ void set_centers(const Probs& probs, const Scores& t_scores, float scale,
                                            float (&center)[kRows], int& centered) {
  using namespace cute;
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    float weighted = 0.0f, sum = 0.0f;
#pragma unroll
    for (int ni = 0; ni < size<1>(probs); ++ni) {
      weighted = fmaf(probs(mi, ni), t_scores(mi, ni), weighted);
      sum += probs(mi, ni);
    }
    weighted = quad_sum(weighted);
    sum = quad_sum(sum);
    if ((centered >> mi & 1) != 0 || !(sum > 0.0f)) continue;
    center[mi] = weighted / sum * scale;
    centered |= 1 << mi;
  }
}

}  // namespace flash
