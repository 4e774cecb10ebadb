// Online softmax in base 2 (Milakov & Gimelshein 2018; Dao et al. 2022): running row maximum and row sum.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "params/flash.h"

namespace flash {

// Flag: what holds conditions of the warp. ptxas keeps a bool in a byte, which costs instructions wherever paths meet.
// kSums: how many sums of a row exp2_softcap_poly() keeps, each of some of the columns, until finish().
template <int kRows, class Flag = bool, int kSums = 1>
struct Softmax {
  static constexpr float kThresholdLog2 = kRescaleThresholdLog2;
  static constexpr float kLog2e = 1.4426950408889634f;
  static constexpr float kLn2 = 0.69314718055994531f;
  static constexpr float kMaxSpeculativeSum =
      256.0f;  // for the sum of a thread's probabilities; fp16 holds them up to 65504
  // For what capped scores may lie above their reference, seen by their size alone: fp16 holds 2^15.
  static constexpr float kSoftcapThresholdLog2 = 15.0f;
  static constexpr float kLargeLog2 = 1024.0f;  // exponents beyond lose more than half a unit of an fp16 1
  // References start here: finite, so that a score of -inf, masked or not, has weight 0 in every kind of block.
  static constexpr float kLowest = -3.402823466e38f;

  float row_max[kRows];         // reference of the raw scores; kLowest while all of them were -inf
  float row_sum[kRows][kSums];  // of this thread's share of the columns; after finish() the first is the row's
  Flag is_large = false;        // some reference of the warp is beyond kLargeLog2

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      row_max[mi] = kLowest;
#pragma unroll
      for (int i = 0; i < kSums; ++i) row_sum[mi][i] = 0.0f;
    }
  }

  // Turns scores (rows, cols) into exp2(scale (score - reference)), where the reference of a row is at most
  // threshold_log2 / scale below its running maximum: out (rows, head dim) is rescaled only when some row of the warp
  // would pass that. The result does not depend on the reference except through rounding. scale > 0.
  template <class Scores, class Out>
  __device__ __forceinline__ void update(Scores& scores, Out& out, float scale, float threshold_log2 = kThresholdLog2) {
    using namespace cute;
    update_row_maxima(scores, scale, threshold_log2, [&](int mi, float correction) {
#pragma unroll
      for (int ni = 0; ni < size<1>(out); ++ni) out(mi, ni) *= correction;
    });
    exponentiate(scores, scale);
  }

  // The first half of update(). Returns, for the warp as a whole, whether references rose: then out is to be multiplied
  // by `correction` before it takes up the new probabilities. row_sum is.
  template <class Scores>
  __device__ __forceinline__ bool update_row_max(const Scores& scores, float scale, float (&correction)[kRows],
                                                 float threshold_log2 = kThresholdLog2) {
    return update_row_maxima(scores, scale, threshold_log2, [&](int mi, float o_scale) { correction[mi] = o_scale; });
  }

  // The same where nothing was met before: references become the maxima, whatever they are, and nothing is corrected. A
  // row that still met nothing counts as large: its next block should not go ahead.
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

  // correct(mi, correction) is called for every row if references rise.
  template <class Scores, class Correct>
  __device__ __forceinline__ bool update_row_maxima(const Scores& scores, float scale, float threshold_log2,
                                                    const Correct& correct) {
    using namespace cute;
    static_assert(decltype(size<0>(scores))::value == kRows, "one running reference per row");
    if (!__any_sync(0xffffffffu, may_exceed_threshold(scores, scale, threshold_log2))) return false;
    float new_max[kRows];
    set_maxima(scores, new_max);
    bool large = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const float reference = fmaxf(row_max[mi], new_max[mi]);
      const float correction = exp2f((row_max[mi] - reference) * scale);
      row_max[mi] = reference;
#pragma unroll
      for (int i = 0; i < kSums; ++i) row_sum[mi][i] *= correction;
      // A row that met nothing counts as large wherever edges may go ahead. They never do where conditions are bools:
      // there it would only change the rounding of the warp's other rows, unless its product overflows.
      if constexpr (std::is_same_v<Flag, bool>) {
        large |= (reference > kLowest || scale > 1.0f) && fabsf(reference * scale) > kLargeLog2;
      } else {
        large |= !(fabsf(reference * scale) <= kLargeLog2);
      }
      correct(mi, correction);
    }
    is_large = __any_sync(0xffffffffu, large);
    return true;
  }

  // The maxima of whole rows.
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

  // Whether some score of this thread may lie more than threshold_log2 / scale above its reference.
  template <class Scores>
  __device__ __forceinline__ bool may_exceed_threshold(const Scores& scores, float scale, float threshold_log2) const {
    return may_exceed(scores, threshold_log2, [&](int mi, float top) { return (top - row_max[mi]) * scale; });
  }

  // Whether the exponent of some score of this thread, which rises with the score, may be beyond `most`. The bits of
  // floats that are not negative are ordered like integers, of which three are compared at once: negative scores count
  // as 0.
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

  // The second half of update().
  template <class Scores>
  __device__ __forceinline__ void exponentiate(Scores& scores, float scale) {
    using namespace cute;
    float offset[kRows];
    set_offsets(scores, scale, offset);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) = exp2f(scores(mi, ni) * scale - offset[mi]);
        row_sum[mi][0] += scores(mi, ni);
      }
    }
  }

  // What exponents take off: the reference of each row, which large ones have taken off before.
  template <class Scores>
  __device__ __forceinline__ void set_offsets(Scores& scores, float scale, float (&offset)[kRows]) const {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) offset[mi] = row_max[mi] * scale;
    if (is_large) subtract_row_max(scores, offset);
  }

  // update() of scores that pass through `series` on their way, for a scale of 1; or false, with nothing done, where
  // the warp has scores beyond the series or its references may have to rise. The polynomial, of as few terms as the
  // scores of the warp allow, runs beside the exponentials, and its last product is the one that takes off the
  // reference anyway. kBySquares: looks at a bound of all scores first, and at the greatest and the least where that
  // does not do.
  template <bool kBySquares, class Scores>
  __device__ __forceinline__ bool exp2_softcap_poly(Scores& scores, const SoftcapSeries& series,
                                                    const ShortSoftcapSeries& short_series, float threshold_log2) {
    using namespace cute;
    // Row by row into one sum each, a chain of additions decides where ptxas puts the exponentials
    // (docs/tuning/fwd_sm90.md).
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
    float square;  // no score's is greater
    bool fails = is_large;
    if constexpr (kBySquares) {
      float room = INFINITY;  // for capped scores, whatever their sign, before a reference has to rise
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) room = fminf(room, row_max[mi]);
      room = is_large ? -1.0f : room + (threshold_log2 > 0.0f ? kSoftcapThresholdLog2 : 0.0f);
      const float most = room > 0.0f ? room * room * series.inverse_steepness : -1.0f;
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
    if (!kBySquares && __all_sync(0xffffffffu, square <= series.short_bound)) {
      apply_short();
    } else {
      apply([&](float score) { return series.factor(score); });
    }
    return true;
  }

  // The largest square of a score of this thread. Returns whether is_right(mi, top) for each row, whose greatest score
  // that is not negative, or 0, is `top`.
  template <class Scores, class IsRight>
  __device__ __forceinline__ static bool largest_square(const Scores& scores, float& square, const IsRight& is_right) {
    using namespace cute;
    static_assert(decltype(size<1>(scores))::value % 2 == 0, "scores are compared in pairs");
    bool right = true;
    square = 0.0f;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      int high = 0;       // bits of the largest score that is not negative
      unsigned low = 0u;  // of the lowest negative one, if there is one
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ni += 2) {
        const int first = __float_as_int(scores(mi, ni)), second = __float_as_int(scores(mi, ni + 1));
        high = __vimax3_s32(high, first, second);
        low = __vimax3_u32(low, static_cast<unsigned>(first), static_cast<unsigned>(second));
      }
      const float top = __int_as_float(high), reach = fmaxf(top, fabsf(__uint_as_float(low)));
      square = fmaxf(square, reach * reach);
      right &= is_right(mi, top);
    }
    return right;
  }

  // No square of a score of this thread is greater; NaN if there is one. Four squares are added at the full rate of
  // the multipliers and compared at once, where integer maxima take one score in two at half of it. They are no
  // products that the compiler could keep in registers until the polynomial wants them.
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

  // Whether scores may go ahead of their references: exp2_speculative() is for moderate ones, with some slack.
  __device__ __forceinline__ bool may_speculate(float threshold_log2) const {
    return threshold_log2 > 0.0f && !is_large;
  }

  // update() as if no reference had to rise, which it sees only afterwards, by the sums of the probabilities: their
  // maxima need not be looked for. Returns whether that was right for the whole warp. If not, the scores are lost, and
  // nothing else has changed. Where may_speculate().
  template <class Scores>
  __device__ __forceinline__ bool exp2_speculative(Scores& scores, float scale) {
    float offset[kRows];
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) offset[mi] = row_max[mi] * scale;
    return exp2_speculative(scores, scale, [&](int mi, int) { return offset[mi]; });
  }

  // The same of scores that take a bias on their way, `gradient` times the column's distance from the row's diagonal,
  // for references of biased scores. `distance`: of the diagonal of the tile's first row from its first column.
  template <class Scores, class Coords>
  __device__ __forceinline__ bool exp2_speculative_alibi(Scores& scores, const Coords& coords, float scale,
                                                         float gradient, int distance) {
    float offset[kRows];  // the reference, less the bias of the thread's first column
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
    float sums[kRows];
    exp2_with_sums(scores, scale, offset_of, sums);
    if (!speculation_holds(sums)) return false;
    add(sums);
    return true;
  }

  // The first half of exp2_speculative(): sums of this block alone.
  template <class Scores, class OffsetOf>
  __device__ __forceinline__ static void exp2_with_sums(Scores& scores, float scale, const OffsetOf& offset_of,
                                                        float (&sums)[kRows]) {
    using namespace cute;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      sums[mi] = 0.0f;
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        scores(mi, ni) = exp2f(scores(mi, ni) * scale - offset_of(mi, ni));
        sums[mi] += scores(mi, ni);
      }
    }
  }

  // Whether the warp was right to go ahead.
  __device__ __forceinline__ static bool speculation_holds(const float (&sums)[kRows]) {
    bool is_right = true;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) is_right &= sums[mi] <= kMaxSpeculativeSum;  // not if it is NaN
    return __all_sync(0xffffffffu, is_right);
  }

  __device__ __forceinline__ void add(const float (&sums)[kRows]) {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) row_sum[mi][0] += sums[mi];
  }

  // The product of a large reference and the scale is rounded by more than 16-bit probabilities are: the difference is
  // taken first, so that the score at the reference becomes exactly 1.
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

  // Adds up the sums of all rows over the quad, once, and says what turns the accumulated output into the result: 0 for
  // a row that saw nothing. `sink`: the logit of one more key without a value, a natural logarithm, -inf for none. It
  // joins the sum of the quad, so that it counts once; above the reference it becomes the reference of row_sum, so that
  // it neither overflows nor is lost.
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

  // Natural-log LSE after finish() with the same sink; +inf marks a row that saw nothing and has no sink.
  __device__ __forceinline__ float lse(int mi, float scale, float sink = -INFINITY) const {
    const float log_sum = log2f(row_sum[mi][0]);
    const float above = sink + log_sum * kLn2, below = (row_max[mi] * scale + log_sum) * kLn2;
    return row_sum[mi][0] == 0.0f ? INFINITY : sink_above(mi, scale, sink) > 0.0f ? above : below;
  }

  // How far the sink lies above the reference, in powers of 2.
  __device__ __forceinline__ float sink_above(int mi, float scale, float sink) const {
    return sink * kLog2e - row_max[mi] * scale;
  }
};

}  // namespace flash
