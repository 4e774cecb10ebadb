// Online softmax with the exact running row max: the bits of a row's result do not depend on other rows. In softmax.h
// the whole warp decides when the row max is updated.
#pragma once

#include <cute/tensor_impl.hpp>

#include "kernels/common/accumulator.h"

namespace flash {

template <int kRows>
struct ExactSoftmax {
  float row_max[kRows];  // of the raw scores; -inf while no visible key was met
  float row_sum[kRows];  // over this thread's columns

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      row_max[mi] = -INFINITY;
      row_sum[mi] = 0.0f;
    }
  }

  template <class Out>
  __device__ __forceinline__ static void rescale_rows(Out& out, const float (&factors)[kRows]) {
    using namespace cute;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < size<1>(out); ++ni) out(mi, ni) *= factors[mi];
    }
  }

  // Turns scores (rows, cols) into exp2(scale (score - row_max)) and rescales out (rows, head dim). Subtracting first
  // keeps large scores exact. The warp vote only skips multiplications by one.
  template <class Scores, class Out>
  __device__ __forceinline__ void update(Scores& scores, Out& out, float scale) {
    update(scores, scale, false, [&](float (&factors)[kRows]) { rescale_rows(out, factors); });
  }

  // The same; rescale_out(factors) is called by the whole warp, also if `also` holds in some lane.
  template <class Scores, class RescaleOut>
  __device__ __forceinline__ void update(Scores& scores, float scale, bool also, const RescaleOut& rescale_out) {
    using namespace cute;
    static_assert(decltype(size<0>(scores))::value == kRows, "one running maximum per row");
    float new_max[kRows];
    bool any_new_max = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      new_max[mi] = scores(mi, 0);
#pragma unroll
      for (int ni = 1; ni < size<1>(scores); ++ni) new_max[mi] = fmaxf(new_max[mi], scores(mi, ni));
      new_max[mi] = fmaxf(row_max[mi], quad_max(new_max[mi]));
      any_new_max |= new_max[mi] > row_max[mi];
    }
    if (__any_sync(0xffffffffu, any_new_max || also)) {
      float factors[kRows];
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        factors[mi] = new_max[mi] == -INFINITY ? 1.0f : exp2f((row_max[mi] - new_max[mi]) * scale);
        row_max[mi] = new_max[mi];
        row_sum[mi] *= factors[mi];
      }
      rescale_out(factors);
    }
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const float offset = row_max[mi] == -INFINITY ? 0.0f : row_max[mi];
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) = exp2f((scores(mi, ni) - offset) * scale);
        row_sum[mi] += scores(mi, ni);
      }
    }
  }
};

}  // namespace flash
