// Online softmax in base 2 (Milakov & Gimelshein 2018; Dao et al. 2022): running row maximum and row sum.
#pragma once

#include <cute/tensor_impl.hpp>

#include "kernels/common/accumulator.h"
#include "params/flash.h"

namespace flash {

// Flag: type of warp-uniform conditions. ptxas keeps a bool in a byte, which costs instructions at every join.
// kSums: partial sums per row of exp2_softcap_poly(), each over some of the columns, added up by finalize().
template <int kRows, class Flag = bool, int kSums = 1>
struct Softmax {
  static constexpr float kThresholdLog2 = kRescaleThresholdLog2;
  static constexpr float kLog2e = 1.4426950408889634f;
  static constexpr float kLn2 = 0.69314718055994531f;
  // Bound of a thread's sum over a block. Equal scores of 192 keys sum to 48; what is larger is raised at once, since
  // the rounding of a row's largest P is most of the error (docs/how_it_works.md).
  static constexpr float kMaxSpeculativeSum = 64.0f;
  static constexpr float kMostRaised = 0x1p100f;  // has a reciprocal among the normal floats
  // How far capped scores may exceed row_max when only a bound of their magnitude is known: fp16 holds 2^15.
  static constexpr float kSoftcapThresholdLog2 = 15.0f;
  static constexpr float kLargeLog2 = 1024.0f;      // beyond it exponents round by more than half a ulp of an fp16 1
  static constexpr float kMostSumToFall = 0x1p20f;  // while no row_sum exceeds it, row_max may fall
  static constexpr float kMostFall = 0x1p100f;      // kLowest minus it is kLowest
  // Initial row_max. Finite, so that a score of -inf, masked or not, gets weight 0 in every kind of block.
  static constexpr float kLowest = -3.402823466e38f;

  float row_max[kRows];         // lagging row max of the raw scores; kLowest while all were -inf
  float row_sum[kRows][kSums];  // over this thread's columns; after finalize() [0] is the row's sum
  Flag is_large = false;        // some row_max of the warp exceeds kLargeLog2

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      row_max[mi] = kLowest;
#pragma unroll
      for (int i = 0; i < kSums; ++i) row_sum[mi][i] = 0.0f;
    }
  }

  // Turns scores (rows, cols) into exp2(scale (score - row_max)). row_max lags the true running maximum by at most
  // threshold_log2 / scale: out (rows, head dim) is rescaled only when some row of the warp would exceed that. The
  // result depends on the lag only through rounding. scale > 0. With kMayFall and a threshold below 0 row_max falls to
  // the maximum of a block too, if it is not further below: the largest P of each block is 1, which is not rounded.
  template <bool kMayFall = false, class Scores, class Out>
  __device__ __forceinline__ void update(Scores& scores, Out& out, float scale, float threshold_log2 = kThresholdLog2) {
    if (__any_sync(0xffffffffu, may_exceed_threshold(scores, scale, threshold_log2))) {
      float maxima[kRows];
      set_maxima(scores, maxima);
      raise_and_rescale(maxima, out, scale, kMayFall ? most_fall(scale, threshold_log2) : 0.0f);
    }
    exponentiate<true>(scores, scale);
  }

  // First half of update(), with a threshold of at least 0. Returns, warp-uniform, whether row_max was updated: then
  // multiply out by `correction` before accumulating new probabilities (row_sum already is).
  template <class Scores>
  __device__ __forceinline__ bool update_row_max(const Scores& scores, float scale, float (&correction)[kRows],
                                                 float threshold_log2 = kThresholdLog2) {
    return update_row_maxima(scores, scale, threshold_log2, [&](int mi, float o_scale) { correction[mi] = o_scale; });
  }

  // For a tile's first block: row_max becomes the block's maximum unconditionally, and nothing has to be corrected. A
  // row that is still fully masked counts as large: the next block must not be speculative.
  template <class Scores>
  __device__ __forceinline__ void set_row_max(const Scores& scores, float scale) {
    bool large = false;
    set_maxima(scores, row_max);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      row_max[mi] = fmaxf(row_max[mi], kLowest);
      large |= !(fabsf(row_max[mi] * scale) <= kLargeLog2);
    }
    is_large = __any_sync(0xffffffffu, large);
  }

  // Calls correct(mi, correction) for every row if row_max is updated.
  template <class Scores, class Correct>
  __device__ __forceinline__ bool update_row_maxima(const Scores& scores, float scale, float threshold_log2,
                                                    const Correct& correct) {
    using namespace cute;
    static_assert(decltype(size<0>(scores))::value == kRows, "one running row max per row");
    if (!__any_sync(0xffffffffu, may_exceed_threshold(scores, scale, threshold_log2))) return false;
    float new_max[kRows];
    set_maxima(scores, new_max);
    raise_row_maxima(new_max, scale, correct);
    return true;
  }

  // update() where other warps have other columns of the rows. `maxima`: of the block's scores, of all columns.
  // Negative ones count as 0, as in may_exceed(): a first block of fully masked rows must set is_large.
  template <class Scores, class Out>
  __device__ __forceinline__ void update_shared(Scores& scores, Out& out, const float (&maxima)[kRows], float scale,
                                                float threshold_log2) {
    using namespace cute;
    bool exceeds = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) exceeds |= (fmaxf(maxima[mi], 0.0f) - row_max[mi]) * scale > threshold_log2;
    if (__any_sync(0xffffffffu, exceeds)) raise_and_rescale(maxima, out, scale);
    exponentiate<true>(scores, scale);
  }

  // How far row_max may fall in a block. The bound of the sums, of all columns by the vote, is one of the distance to
  // the true maximum, and so of out.
  __device__ __forceinline__ float most_fall(float scale, float threshold_log2) const {
    if (threshold_log2 >= 0.0f) return 0.0f;
    bool may_fall = true;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) may_fall &= row_sum[mi][0] <= kMostSumToFall;  // false for NaN
    return __all_sync(0xffffffffu, may_fall) ? fminf(-threshold_log2 / scale, kMostFall) : 0.0f;
  }

  template <class Out>
  __device__ __forceinline__ void raise_and_rescale(const float (&maxima)[kRows], Out& out, float scale,
                                                    float most_fall = 0.0f) {
    using namespace cute;
    const auto rescale_row = [&](int mi, float correction) {
#pragma unroll
      for (int ni = 0; ni < size<1>(out); ++ni) out(mi, ni) *= correction;
    };
    raise_row_maxima(maxima, scale, rescale_row, most_fall);
  }

  // Raises row_max to the maxima of a block, or lowers it to those that are at most `most_fall` below it.
  template <class Correct>
  __device__ __forceinline__ void raise_row_maxima(const float (&new_max)[kRows], float scale, const Correct& correct,
                                                   float most_fall = 0.0f) {
    bool large = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const float fall = new_max[mi] >= row_max[mi] - most_fall ? most_fall : 0.0f;
      const float new_row_max = fmaxf(row_max[mi] - fall, new_max[mi]);
      const float correction = exp2f((row_max[mi] - new_row_max) * scale);
      row_max[mi] = new_row_max;
#pragma unroll
      for (int i = 0; i < kSums; ++i) row_sum[mi][i] *= correction;
      // A fully masked row counts as large wherever masked blocks may be speculative. With Flag = bool they never are,
      // and counting it would change the rounding of the warp's other rows, unless the product overflows.
      if constexpr (std::is_same_v<Flag, bool>) {
        large |= (new_row_max > kLowest || scale > 1.0f) && fabsf(new_row_max * scale) > kLargeLog2;
      } else {
        large |= !(fabsf(new_row_max * scale) <= kLargeLog2);
      }
      correct(mi, correction);
    }
    is_large = __any_sync(0xffffffffu, large);
  }

  // Maxima of whole rows.
  template <class Scores>
  __device__ __forceinline__ static void set_maxima(const Scores& scores, float (&maxima)[kRows]) {
    using namespace cute;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      maxima[mi] = scores(mi, 0);
#pragma unroll
      for (int ni = 1; ni < size<1>(scores); ++ni) maxima[mi] = fmaxf(maxima[mi], scores(mi, ni));
      maxima[mi] = quad_max(maxima[mi]);
    }
  }

  // Whether some score of this thread may exceed row_max by more than threshold_log2 / scale.
  template <class Scores>
  __device__ __forceinline__ bool may_exceed_threshold(const Scores& scores, float scale, float threshold_log2) const {
    return may_exceed(scores, threshold_log2, [&](int mi, float top) { return (top - row_max[mi]) * scale; });
  }

  // Whether `exponent`, monotone in the score, may exceed `most` for some score of this thread. Non-negative floats
  // order like their bits, so three are compared by one integer instruction; negative scores count as 0.
  template <class Scores, class Exponent>
  __device__ __forceinline__ bool may_exceed(const Scores& scores, float most, const Exponent& exponent) const {
    using namespace cute;
    static_assert(decltype(size<1>(scores))::value % 2 == 0, "scores are compared in pairs");
    bool exceeds = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      int bound = 0;
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ni += 2) {
        bound = __vimax3_s32(bound, __float_as_int(scores(mi, ni)), __float_as_int(scores(mi, ni + 1)));
      }
      exceeds |= exponent(mi, __int_as_float(bound)) > most;
    }
    return exceeds;
  }

  template <class Out>
  __device__ __forceinline__ void rescale(Out& out, const float (&correction)[kRows]) const {
    using namespace cute;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < size<1>(out); ++ni) out(mi, ni) *= correction[mi];
    }
  }

  // Second half of update(). Offsets: row_max * scale, subtracted from exponents; large ones from the scores
  // beforehand. kBlockSums: the block is summed first and then added to row_sum. One chain of additions over thousands
  // of keys would be most of the LSE's error.
  template <bool kBlockSums = false, class Scores>
  __device__ __forceinline__ void exponentiate(Scores& scores, float scale) {
    using namespace cute;
    float offset[kRows];
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) offset[mi] = row_max[mi] * scale;
    if (is_large) subtract_row_max(scores, offset);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      float sum = kBlockSums ? 0.0f : row_sum[mi][0];
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) = exp2f(scores(mi, ni) * scale - offset[mi]);
        sum += scores(mi, ni);
      }
      row_sum[mi][0] = kBlockSums ? row_sum[mi][0] + sum : sum;
    }
  }

  // update() of softcapped scores (scale 1) by `series`. Returns false, with nothing done, if the warp has scores
  // outside the range of the series or row_max may have to be updated. The polynomial, with as few terms as the warp's
  // scores allow, overlaps the exponentials; its last FMA is the one that subtracts row_max anyway. kCheckBoundByNorm:
  // tests a bound of all scores first, and exact maxima only if that fails.
  template <bool kCheckBoundByNorm, class Scores>
  __device__ __forceinline__ bool exp2_softcap_poly(Scores& scores, const SoftcapSeries& series,
                                                    const ShortSoftcapSeries& short_series, float threshold_log2) {
    using namespace cute;
    // Column-major, with several sums per row: a single chain of additions would decide where ptxas puts the
    // exponentials (docs/tuning/findings.md, 20).
    const auto apply = [&](const auto& o_scale) {
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
#pragma unroll
        for (int mi = 0; mi < kRows; ++mi) {
          scores(mi, ni) = exp2f(scores(mi, ni) * o_scale(scores(mi, ni)) - row_max[mi]);
          row_sum[mi][ni % kSums] += scores(mi, ni);
        }
      }
    };
    const auto apply_short = [&] { apply([&](float score) { return short_series.factor(score); }); };
    float square;  // bound of all squared scores
    bool fails = is_large;
    if constexpr (kCheckBoundByNorm) {
      float headroom = INFINITY;  // how large |capped score| may be before row_max has to be updated
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) headroom = fminf(headroom, row_max[mi]);
      headroom = is_large ? -1.0f : headroom + (threshold_log2 > 0.0f ? kSoftcapThresholdLog2 : 0.0f);
      const float most = headroom > 0.0f ? headroom * headroom * series.inverse_steepness : -1.0f;
      square = square_bound(scores);
      if (__all_sync(0xffffffffu, square <= fminf(most, series.short_bound))) {
        apply_short();
        return true;
      }
      fails |= may_exceed(scores, threshold_log2, [&](int mi, float top) { return series.cap(top) - row_max[mi]; });
    } else {
      fails |= !largest_square(scores, square,
                               [&](int mi, float top) { return series.cap(top) - row_max[mi] <= threshold_log2; });
    }
    if (__any_sync(0xffffffffu, fails | !(square <= series.bound))) return false;
    if (!kCheckBoundByNorm && __all_sync(0xffffffffu, square <= series.short_bound)) {
      apply_short();
    } else {
      apply([&](float score) { return series.factor(score); });
    }
    return true;
  }

  // Largest squared score of this thread. Returns whether holds(mi, top) for each row; `top` is the row's
  // greatest non-negative score, or 0.
  template <class Scores, class Holds>
  __device__ __forceinline__ static bool largest_square(const Scores& scores, float& square, const Holds& holds) {
    using namespace cute;
    static_assert(decltype(size<1>(scores))::value % 2 == 0, "scores are compared in pairs");
    bool all_hold = true;
    square = 0.0f;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      int high = 0;       // bits of the largest non-negative score
      unsigned low = 0u;  // of the most negative score, if any
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ni += 2) {
        const int first = __float_as_int(scores(mi, ni)), second = __float_as_int(scores(mi, ni + 1));
        high = __vimax3_s32(high, first, second);
        low = __vimax3_u32(low, static_cast<unsigned>(first), static_cast<unsigned>(second));
      }
      const float top = __int_as_float(high), reach = fmaxf(top, fabsf(__uint_as_float(low)));
      square = fmaxf(square, reach * reach);
      all_hold &= holds(mi, top);
    }
    return all_hold;
  }

  // Upper bound of this thread's squared scores; NaN if there is one. Sums of four squares run at the full FMA rate,
  // where integer maxima take a slot per two scores at half rate; starting from kTiny keeps them FFMAs: ptxas would
  // keep plain products in registers for the polynomial (230 bytes of spills).
  template <class Scores>
  __device__ __forceinline__ static float square_bound(const Scores& scores) {
    using namespace cute;
    static_assert(kRows == 2 && decltype(size<1>(scores))::value % 4 == 0, "scores are compared in fours");
    constexpr float kTiny = 1e-30f;
    int bound = 0;
#pragma unroll
    for (int ni = 0; ni < size<1>(scores); ni += 4) {
      float sums[kRows];
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        sums[mi] = kTiny;
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[mi] = fmaf(scores(mi, ni + i), scores(mi, ni + i), sums[mi]);
      }
      bound = __vimax3_s32(bound, __float_as_int(sums[0]), __float_as_int(sums[1]));
    }
    return __int_as_float(bound);
  }

  // Whether a block may be speculative: moderate row_max, non-zero rescale threshold.
  __device__ __forceinline__ bool may_speculate(float threshold_log2) const {
    return threshold_log2 > 0.0f && !is_large;
  }

  // Speculative update(): exponentiates against the current row_max, then checks that every thread's row sum is <=
  // kMaxSpeculativeSum, so that maxima need not be computed. False if any row of the warp fails: scores are P, other
  // state is unchanged, and raise_row_max() comes next. Requires may_speculate().
  template <class Scores>
  __device__ __forceinline__ bool exp2_speculative(Scores& scores, float scale) {
    float offset[kRows];
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) offset[mi] = row_max[mi] * scale;
    return exp2_speculative(scores, scale, [&](int mi, int) { return offset[mi]; });
  }

  // The same with ALiBi: adds `gradient` times the column's distance from the row's diagonal; row_max is of biased
  // scores. `distance`: from the tile's first column to the diagonal of its first row.
  template <class Scores, class Coords>
  __device__ __forceinline__ bool exp2_speculative_alibi(Scores& scores, const Coords& coords, float scale,
                                                         float gradient, int distance) {
    float offset[kRows];  // row_max minus the bias of the thread's first column
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      offset[mi] = row_max[mi] + gradient * static_cast<float>(distance + coords.row(mi) - coords.col(0));
    }
    return exp2_speculative(scores, scale, [&](int mi, int ni) {
      return offset[mi] - gradient * static_cast<float>(coords.col(ni) - coords.col(0));
    });
  }

  template <class Scores, class OffsetOf>
  __device__ __forceinline__ bool exp2_speculative(Scores& scores, float scale, const OffsetOf& offset_of) {
    using namespace cute;
    float sums[kRows] = {};  // of this block alone
    bool holds = true;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) = exp2f(scores(mi, ni) * scale - offset_of(mi, ni));
        sums[mi] += scores(mi, ni);
      }
      holds &= sums[mi] <= kMaxSpeculativeSum;  // false for NaN
    }
    if (!__all_sync(0xffffffffu, holds)) return false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) row_sum[mi][0] += sums[mi];
    return true;
  }

  // After a speculation that failed, with P of the row max so far: raises row_max to the true maximum, which the
  // largest P tells. False if it is beyond kMostRaised: S has to be computed again, other state is unchanged.
  template <class Scores>
  __device__ __forceinline__ bool raise_row_max(Scores& scores, float scale, float (&correction)[kRows]) {
    using namespace cute;
    float new_max[kRows];
    set_maxima(scores, new_max);
    bool overflows = false, large = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      overflows |= !(new_max[mi] <= kMostRaised);
      new_max[mi] = row_max[mi] + log2f(fmaxf(new_max[mi], 1.0f)) / scale;
      overflows |= !(new_max[mi] < INFINITY);  // by the division
      large |= !(fabsf(new_max[mi] * scale) <= kLargeLog2);
    }
    if (__any_sync(0xffffffffu, overflows)) return false;
    is_large = __any_sync(0xffffffffu, large);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      correction[mi] = exp2f((row_max[mi] - new_max[mi]) * scale);
      row_max[mi] = new_max[mi];
#pragma unroll
      for (int i = 0; i < kSums; ++i) row_sum[mi][i] *= correction[mi];
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) *= correction[mi];
        row_sum[mi][0] += scores(mi, ni);
      }
    }
    return true;
  }

  // Large row_max * scale rounds by more than 16-bit probabilities do: subtract first, so that the maximal score
  // becomes exactly 1.
  template <class Scores>
  __device__ __forceinline__ void subtract_row_max(Scores& scores, float (&offset)[kRows]) const {
    using namespace cute;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      offset[mi] = 0.0f;
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) scores(mi, ni) -= row_max[mi];
    }
  }

  // Reduces row_sum over the quad and sets o_scale, the factor from the accumulated O to the result; 0 for a fully
  // masked row. `sink`: natural-log logit of one more key without a value, -inf for none. It is added after the quad
  // reduction, so that it counts once; above row_max it becomes the maximum of row_sum, so that it neither overflows
  // nor underflows.
  __device__ __forceinline__ void finalize(float (&o_scale)[kRows], float keep_scale, float scale, float sink) {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int i = 1; i < kSums; ++i) row_sum[mi][0] += row_sum[mi][i];
      row_sum[mi][0] = quad_sum(row_sum[mi][0]);
    }
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) o_scale[mi] = row_sum[mi][0] == 0.0f ? 0.0f : keep_scale / row_sum[mi][0];
    if (sink == -INFINITY) return;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const float above = sink_above(mi, scale, sink);
      const float correction = above > 0.0f ? exp2f(-above) : 1.0f;
      row_sum[mi][0] = row_sum[mi][0] * correction + (above > 0.0f ? 1.0f : exp2f(above));
      o_scale[mi] = keep_scale * correction / row_sum[mi][0];
    }
  }

  // Natural-log LSE, after finalize() with the same sink; +inf marks a fully masked row without a sink. natural_scale:
  // `scale` before its product with log2(e) was rounded.
  __device__ __forceinline__ float lse(int mi, float scale, float natural_scale, float sink) const {
    const float log_sum = log2f(row_sum[mi][0]) * kLn2;
    const float above = sink + log_sum, below = fmaf(row_max[mi], natural_scale, log_sum);
    return row_sum[mi][0] == 0.0f ? INFINITY : sink_above(mi, scale, sink) > 0.0f ? above : below;
  }

  // log2 distance of the sink above row_max.
  __device__ __forceinline__ float sink_above(int mi, float scale, float sink) const {
    return sink * kLog2e - row_max[mi] * scale;
  }
};

}  // namespace flash
