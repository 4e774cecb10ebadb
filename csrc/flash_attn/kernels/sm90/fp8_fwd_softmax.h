// Softmax of the e4m3 forward: scores to P in e4m3, packed as the A operand of P V.
#pragma once

#include <cuda_fp16.h>

#include <cute/tensor.hpp>

#include "core/e4m3.h"
#include "kernels/common/softmax.h"

namespace flash {
namespace sm90 {

// Two probabilities in e4m3, rounded to nearest even; the first in the lower byte.
__device__ __forceinline__ uint16_t pack_e4m3(float a, float b) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(pair) : "f"(a), "f"(b));
  return pair;
}
__device__ __forceinline__ uint32_t join(uint16_t low, uint16_t high) {
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}

// Four e4m3 values times powers of 2.
__device__ __forceinline__ uint32_t multiply_e4m3(uint32_t word, __half2 factor) {
  uint32_t result;
  asm("{.reg .b16 low, high;\n"
      ".reg .b32 first, second;\n"
      "mov.b32 {low, high}, %1;\n"
      "cvt.rn.f16x2.e4m3x2 first, low;\n"
      "cvt.rn.f16x2.e4m3x2 second, high;\n"
      "mul.rn.f16x2 first, first, %2;\n"
      "mul.rn.f16x2 second, second, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 low, first;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 high, second;\n"
      "mov.b32 %0, {low, high};}"
      : "=r"(result)
      : "r"(word), "r"(*reinterpret_cast<const uint32_t*>(&factor)));
  return result;
}

// Two e4m3 bit patterns from the low 16 bits of floats, in 16 bits each: 0 below the range, NaN above it and for NaN.
__device__ __forceinline__ uint32_t clamp_bits(float a, float b, uint32_t shift) {
  const uint32_t pair = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x5410);
  return __viaddmin_s16x2_relu(pair, shift, e4m3::twice(e4m3::kNanBits));
}

// fmaxf and fminf drop NaN.
__device__ __forceinline__ float clamp_keeping_nan(float x, float least, float most) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(least));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(most));
  return x;
}

// row_max is the maximum of scaled scores in powers of 2, minus kOffsetLog2, so that P = exp2(score - row_max) uses
// e4m3's range: right after an update the largest P is at most 2^5.5, and row_max lags until one would exceed 448 =
// 2^8.8, the largest e4m3 value. row_max is rounded to an integer, so that corrections are exact. P V also sums the
// rounded P. kExpBits: P as e4m3 bit patterns straight from the scores, summed by P V alone.
template <bool kExpBits>
struct Fp8Softmax : Softmax<2, int> {
  using Base = Softmax<2, int>;
  using Base::row_max;
  using Base::row_sum;
  static constexpr int kRows = 2;
  static constexpr float kOffsetLog2 = 5.0f, kLargestP = 448.0f;
  // Scores of 128 products of e4m3 values up to 448, scaled by at most this factor, are less than kNearLog2; their
  // differences are less than the 4096 octaves that 16 bits of a pattern reach.
  static constexpr float kLargestNearScale = 7.5e-5f, kNearLog2 = 2000.0f;
  static constexpr float kFarLog2 = 1000.0f;
  static constexpr float kLargestPLog2 = 8.75f;  // of bit pattern 126
  // Partial sums of a row, each over few enough P to stay within kLargestP right after an update.
  static constexpr int kPartialSums = 2;

  // What a step adds to row_sum. A struct: with a plain array ptxas serialises the products of head dim 128.
  struct Sums {
    float exact[kRows];
  };

  uint32_t bits_shift;  // e4m3::kBitsShift, twice; a kernel parameter, since ptxas would remake a constant at each use
  float rounded_sum[kRows] = {};  // of the rounded P, over all columns

  __device__ __forceinline__ explicit Fp8Softmax(uint32_t bits_shift_) : bits_shift(bits_shift_) {}

  // For a block that may exceed row_max: raises row_max to the maximum of the scores. O then has to be multiplied by
  // `correction`; row_sum already is. A NaN among the scores makes row_max NaN for good.
  template <class Scores>
  __device__ __forceinline__ void update_row_max(const Scores& scores, float scale, float (&correction)[kRows]) {
    using namespace cute;
    float new_max[kRows];
    Base::set_maxima(scores, new_max);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      int bits = 0;  // of the largest non-negative score, or of NaN
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ni += 2) {
        bits = __vimax3_s32(bits, __float_as_int(scores(mi, ni)), __float_as_int(scores(mi, ni + 1)));
      }
      const bool has_nan = quad_max_of_bits(bits) > 0x7f800000 || row_max[mi] != row_max[mi] || scale != scale;
      const float raised = fmaxf(row_max[mi], rintf(new_max[mi] * scale) - kOffsetLog2);
      const float new_row_max = has_nan ? __int_as_float(0x7fffffff) : fmaxf(raised, Base::kLowest);
      correction[mi] = exp2f(row_max[mi] - new_row_max);
      row_max[mi] = new_row_max;
      row_sum[mi][0] *= correction[mi];
      rounded_sum[mi] *= correction[mi];
    }
  }

  __device__ __forceinline__ static int quad_max_of_bits(int bits) {
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
    return max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
  }

  // Words 2 i and 2 i + 1 of P hold the 16 keys i of rows g and g + 8; S is a sequence of accumulators of 8 columns.
  __device__ __forceinline__ static constexpr int index(int word, int j) {
    return word / 2 * 8 + word % 2 * 2 + j % 2 + j / 2 * 4;
  }

  // P = exp2(S - row_max), four e4m3 values a word, and its sums. Returns true if some P of this thread overflows or is
  // NaN: then P has to be recomputed. `is_new`: row_max is that of these scores.
  template <class Acc, class Words>
  __device__ __forceinline__ bool exponentiate(const Acc& acc_s, float scale, bool is_new, Words& words,
                                               Sums& sums) const {
    static_assert(decltype(cute::size(acc_s))::value == 4 * decltype(cute::size(words))::value);
    if constexpr (kExpBits) {
      return make_exp_bits(acc_s, scale, is_new, words);
    } else {
      constexpr int kWords = decltype(cute::size(words))::value;
      static_assert(kWords / kRows / kPartialSums * 4 * 45.3f <= kLargestP, "2^5.5 each");
      float partial[kRows][kPartialSums] = {};
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        float p[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          p[j] = exp2f(fmaf(acc_s(index(i, j)), scale, -row_max[i % 2]));
          partial[i % 2][i / 2 % kPartialSums] += p[j];
        }
        words(i) = join(pack_e4m3(p[0], p[1]), pack_e4m3(p[2], p[3]));
      }
      int bits = 0;  // bits of non-negative floats order like the floats, and NaN is above them
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        bits = __vimax3_s32(bits, __float_as_int(partial[mi][0]), __float_as_int(partial[mi][1]));
        sums.exact[mi] = partial[mi][0] + partial[mi][1];
      }
      return bits > __float_as_int(kLargestP);
    }
  }

  __device__ __forceinline__ void add(const Sums& sums) {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      if constexpr (!kExpBits) row_sum[mi][0] += sums.exact[mi];
    }
  }

  // Rescales P after row_max was raised. Corrections are powers of 2: only denormal results are rounded.
  template <class Words>
  __device__ __forceinline__ void rescale_p(Words& words, const float (&correction)[kRows]) const {
#pragma unroll
    for (int i = 0; i < cute::size(words); ++i) {
      words(i) = multiply_e4m3(words(i), __float2half2_rn(correction[i % 2]));
    }
  }

  __device__ __forceinline__ void add_rounded(float first, float second) {
    rounded_sum[0] += first;
    rounded_sum[1] += second;
  }

  template <class Acc, class Words>
  __device__ __forceinline__ bool make_exp_bits(const Acc& acc_s, float scale, bool is_new, Words& words) const {
    constexpr float kZero = e4m3::kBitsMagic + e4m3::kPatternsPerOctave * e4m3::kExponentBias;
    if (scale <= kLargestNearScale) {
      float offset[kRows];
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) offset[mi] = kZero - e4m3::kPatternsPerOctave * fmaxf(row_max[mi], -kNearLog2);
      const float factor = e4m3::kPatternsPerOctave * scale;
      return pack_bits(words, [&](int i) { return fmaf(acc_s(i), factor, offset[i / 2 % 2]); });
    }
    // Bit patterns of scores far from row_max would wrap. Above 2^26 row_max itself is rounded to more than
    // kOffsetLog2.
    const float most = is_new ? kLargestPLog2 : kFarLog2;
    return pack_bits(words, [&](int i) {
      const float exponent = clamp_keeping_nan(fmaf(acc_s(i), scale, -row_max[i / 2 % 2]), -kFarLog2, most);
      return fmaf(exponent, e4m3::kPatternsPerOctave, kZero);
    });
  }

  // bits_of(i): the bit pattern of element i of S, as a float. Returns whether some is NaN.
  template <class Words, class BitsOf>
  __device__ __forceinline__ bool pack_bits(Words& words, const BitsOf& bits_of) const {
    constexpr int kWords = decltype(cute::size(words))::value;
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t low = clamp_bits(bits_of(index(i, 0)), bits_of(index(i, 1)), bits_shift);
      const uint32_t high = clamp_bits(bits_of(index(i, 2)), bits_of(index(i, 3)), bits_shift);
      largest = __vimax3_s16x2(largest, low, high);
      words(i) = __byte_perm(low, high, 0x6420);
    }
    constexpr uint32_t kToBit7 = e4m3::twice(0x80u - e4m3::kNanBits);
    return (largest + kToBit7 & e4m3::twice(0x80u)) != 0;
  }

  // finalize() with the sums of the rounded P: rounding then affects numerator and denominator alike, and a row with
  // one key is exact. The LSE keeps the sums before rounding, if there are any.
  __device__ __forceinline__ void finalize_rounded(float (&o_scale)[kRows], float v_descale, float sink) {
    Fp8Softmax rounded = *this;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const float sum = 0.25f * rounded_sum[mi];  // the same in every lane of a quad, which finalize() adds up
      rounded.row_sum[mi][0] = row_max[mi] != row_max[mi] ? row_max[mi] : sum;
      if (kExpBits) rounded.row_max[mi] -= e4m3::kExpBitsMeanLog2;
    }
    rounded.finalize(o_scale, v_descale, 1.0f, sink);
    if constexpr (kExpBits) {
      *this = rounded;
    } else {
      float unused[kRows];
      Base::finalize(unused, 1.0f, 1.0f, sink);
    }
  }
};

}  // namespace sm90
}  // namespace flash
