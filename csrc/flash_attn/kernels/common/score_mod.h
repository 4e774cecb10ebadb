// Score modifiers, applied to raw scores before the mask when Flash_fwd_params::has_score_mod: softcap, then ALiBi.
// Results are in units of log2(e), so that the softmax scale is 1. One run-time branch around each loop.
//
// apply() modifies scores, in the forwards; grad() also turns dS into the gradient of raw scores, in the backwards.
// Callers pass the coordinates of their tile of scores, so that a modifier's arithmetic is here alone. Of kernels/
// these are sm80/fwd_mainloop.h, sm80/bias_gradient.cu, sm90/fwd_softmax_step.h (by the faster apply<Modifiers>(), with
// a slope from sm90/fwd_mainloop.h), sm90/bwd_one_pass/mainloop.h, sm90/bwd_one_pass/biases.h, common/differentiate.h,
// auxiliary/dropout_probs.cu and, with a loop for rows of several heads, decode/packed_rows.h.
#pragma once

#include <cute/tensor_impl.hpp>

#include "core/softcap_series.h"
#include "params/flash.h"
#include "params/modifiers.h"

namespace flash {

// Built where it is used, from parameters in constant memory: keeping it would cost registers in the whole loop.
struct ScoreMod {
  static constexpr float kLog2e = 1.4426950408889634f;

  bool softcapped;
  float scale_log2;  // of the raw score
  float tanh_scale;  // 2 log2(e) scale / softcap
  float cap_log2;    // softcap log2(e)
  float slope_log2;  // ALiBi slope log2(e)

  __device__ __forceinline__ explicit ScoreMod(const Flash_fwd_params& params)
      : softcapped(params.softcap > 0.0f),
        scale_log2(params.scale_softmax * kLog2e),
        tanh_scale(softcapped ? 2.0f * scale_log2 / params.softcap : 0.0f),
        cap_log2(params.softcap * kLog2e),
        slope_log2(0.0f) {}

  __device__ __forceinline__ ScoreMod(const Flash_fwd_params& params, int batch, int head) : ScoreMod(params) {
    slope_log2 = head_slope_log2(params, batch, head);
  }

  __device__ __forceinline__ static float head_slope_log2(const Flash_fwd_params& params, int batch, int head) {
    return params.alibi_slopes_ptr != nullptr
               ? params.alibi_slopes_ptr[batch * params.alibi_slopes_batch_stride + head] * kLog2e
               : 0.0f;
  }

  // Derivative 1 - tanh^2 of a capped score with respect to the raw one, up to the scale.
  __device__ __forceinline__ float cap_derivative(float capped) const {
    const float tanh = capped / cap_log2;
    return 1.0f - tanh * tanh;
  }

  // softcap log2(e) tanh(x) with 2 x = score * tanh_scale / log2(e). Relative error near 1e-6 everywhere (tanh.approx:
  // 5e-4): 1 - 2 / (exp(2 x) + 1) cancels for small x, which take the Taylor series.
  __device__ __forceinline__ float cap(float score) const {
    constexpr float kLn2 = 0.69314718055994531f;
    const float two_x_log2 = score * tanh_scale;
    const float x = two_x_log2 * (0.5f * kLn2);
    const float square = x * x;
    const float series = x + x * square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315)));
    const float tanh = 1.0f - __fdividef(2.0f, exp2f(two_x_log2) + 1.0f);
    return cap_log2 * (fabsf(x) < 0.25f ? series : tanh);
  }

  __device__ __forceinline__ float bias(int diagonal, int col) const {
    return -slope_log2 * fabsf(static_cast<float>(diagonal - col));
  }

  // One modified score.
  __device__ __forceinline__ float modified(float score, int diagonal, int col) const {
    return (softcapped ? cap(score) : score * scale_log2) + bias(diagonal, col);
  }

  // Multiplies by the derivative of the cap, where `probability` is exp2(modified score - lse_log2): without the
  // scores.
  __device__ __forceinline__ void chain_cap(float& gradient, float probability, float lse_log2, int diagonal,
                                            int col) const {
    const float capped = log2f(probability) + lse_log2 - bias(diagonal, col);
    gradient *= probability > 0.0f ? cap_derivative(capped) : 0.0f;
  }

  // apply() on the scores, and the chain rule on `gradients` of the same layout: times the derivative of the cap; a
  // bias has none.
  template <class Scores, class Gradients, class Coords>
  __device__ __forceinline__ void grad(Scores& scores, Gradients& gradients, const Coords& coords, int diagonal0,
                                       int col0) const {
    using namespace cute;
    if (softcapped) {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) {
        scores(i) = cap(scores(i));
        gradients(i) *= cap_derivative(scores(i));
      }
    } else {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) scores(i) *= scale_log2;
    }
    add_bias(scores, coords, diagonal0, col0);
  }

  // scores: a row_col_view; diagonal0, col0: key-axis position of the tile's row 0, and its first column.
  template <class Scores, class Coords>
  __device__ __forceinline__ void apply(Scores& scores, const Coords& coords, int diagonal0, int col0) const {
    apply_cap(scores);
    add_bias(scores, coords, diagonal0, col0);
  }

  template <class Scores>
  __device__ __forceinline__ void apply_cap(Scores& scores) const {
    using namespace cute;
    if (softcapped) {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) scores(i) = cap(scores(i));
    } else {
#pragma unroll
      for (int i = 0; i < size(scores); ++i) scores(i) *= scale_log2;
    }
  }

  template <class Scores, class Coords>
  __device__ __forceinline__ void add_bias(Scores& scores, const Coords& coords, int diagonal0, int col0) const {
    using namespace cute;
    if (slope_log2 == 0.0f) return;
#pragma unroll
    for (int mi = 0; mi < size<0>(scores); ++mi) {
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) += bias(diagonal0 + coords.row(mi), col0 + coords.col(ni));
      }
    }
  }

  // apply() for a warp with registers to spare: softcap by SoftcapSeries if no score of the warp exceeds its bound;
  // ALiBi converts the distance to float once, because a conversion takes as long as an exponential.
  template <Modifiers kModifiers, class Scores, class Coords>
  __device__ __forceinline__ static void apply(const Flash_fwd_params& params, float slope_log2, Scores& scores,
                                               const Coords& coords, int diagonal0, int col0) {
    using namespace cute;
    constexpr bool kAny = kModifiers == Modifiers::kAny;
    const bool softcapped = kAny ? params.softcap > 0.0f : kModifiers == Modifiers::kSoftcap;
    const bool biased = kAny ? params.alibi_slopes_ptr != nullptr : kModifiers == Modifiers::kAlibi;
    if (softcapped) {
      const SoftcapSeries series = params.softcap_series;
      if (within(scores, series.bound)) {
#pragma unroll
        for (int i = 0; i < size(scores); ++i) scores(i) = series.cap(scores(i));
      } else {
        ScoreMod(params).apply_cap(scores);
      }
    }
    const float factor = softcapped ? 1.0f : params.scale_softmax * kLog2e;
    if (!biased) {
      if (!softcapped) {
#pragma unroll
        for (int i = 0; i < size(scores); ++i) scores(i) *= factor;
      }
      return;
    }
    static_assert(
        Coords::kRowsApart8 == 1 && Coords::kColsApart8 == 2 && decltype(size<0>(scores))::value == 2,
        "an element of the second row is as far from the diagonal as the one 8 columns before it in the first");
    constexpr int kPairs = decltype(size<1>(scores))::value / 2;
    const float distance = static_cast<float>(diagonal0 + coords.row(0) - col0 - coords.col(0));
#pragma unroll
    for (int i = -1; i < kPairs; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float bias = slope_log2 * fabsf(distance - static_cast<float>(8 * i + j));
        if (i >= 0) scores(0, 2 * i + j) = scores(0, 2 * i + j) * factor - bias;
        if (i + 1 < kPairs) scores(1, 2 * i + 2 + j) = scores(1, 2 * i + 2 + j) * factor - bias;
      }
    }
  }

  // Whether every squared score of the warp is <= bound (a negative bound: never). NaN is not detected.
  template <class Scores>
  __device__ __forceinline__ static bool within(const Scores& scores, float bound) {
    using namespace cute;
    constexpr int kChains = 4;
    float largest[kChains] = {};
#pragma unroll
    for (int i = 0; i < size(scores); ++i) largest[i % kChains] = fmaxf(largest[i % kChains], fabsf(scores(i)));
    const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
    return __all_sync(0xffffffffu, all * all <= bound);
  }
};

}  // namespace flash
