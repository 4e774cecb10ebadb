// Softmax of the e4m3 forward: scores to P in e4m3, packed as the A operand of P V.
#pragma once

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

// Two codes from the low 16 bits of floats, clamped to [0, 448], in 16 bits each.
__device__ __forceinline__ uint32_t clamp_codes(float a, float b) {
  return __vimin_s16x2_relu(__byte_perm(__float_as_uint(a), __float_as_uint(b), 0x5410), e4m3::kMaxCodes);
}

// row_max is that of scaled scores in powers of 2, rounded to an integer, so that corrections and codes are exact, and
// less kOffsetLog2, so that P = exp2(score - row_max) uses e4m3's range: the greatest is about 2^5, and with the lag
// 2^8. e4m3 ends at 448 = 2^8.8: offset and lag together may not exceed that.
// kCodes: P as codes straight from the scores, and no sums but those of P V.
template <bool kCodes>
struct Fp8Softmax : Softmax<2, int> {
  using Base = Softmax<2, int>;
  using Base::row_max;
  using Base::row_sum;
  static constexpr int kRows = 2;
  static constexpr float kOffsetLog2 = 5.0f, kMaxLagLog2 = 3.0f;
  static_assert(kOffsetLog2 + kMaxLagLog2 <= 8.8f, "P would saturate");
  // Scores of 128 products of codes up to 448 that are scaled by less differ by less than the 4096 octaves that 16 bits
  // of a code reach.
  static constexpr float kLargestNearScale = 7.5e-5f;
  static constexpr float kFarLog2 = -1000.0f;

  // `always`: for a tile's first block. Returns, warp-uniform, whether row_max was updated: then O has to be multiplied
  // by `correction`, row_sum already is. A NaN among the scores makes row_max NaN for good.
  template <class Scores>
  __device__ __forceinline__ int update_row_max(const Scores& scores, float scale, bool always,
                                                float (&correction)[kRows]) {
    using namespace cute;
    int bound[kRows];  // bits of the largest non-negative score, or NaN
    bool exceeds = always;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      bound[mi] = 0;
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ni += 2) {
        bound[mi] = __vimax3_s32(bound[mi], __float_as_int(scores(mi, ni)), __float_as_int(scores(mi, ni + 1)));
      }
      exceeds |= !(fmaf(__int_as_float(bound[mi]), scale, -row_max[mi]) <= kOffsetLog2 + kMaxLagLog2);
    }
    if (!__any_sync(0xffffffffu, exceeds)) return false;
    float new_max[kRows];
    Base::set_maxima(scores, new_max);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const bool has_nan = quad_max_of_bits(bound[mi]) > 0x7f800000 || row_max[mi] != row_max[mi] || scale != scale;
      const float raised = fmaxf(row_max[mi], rintf(new_max[mi] * scale) - kOffsetLog2);
      const float new_row_max = has_nan ? __int_as_float(0x7fffffff) : fmaxf(raised, Base::kLowest);
      correction[mi] = exp2f(row_max[mi] - new_row_max);
      row_max[mi] = new_row_max;
      row_sum[mi][0] *= correction[mi];
    }
    return true;
  }

  __device__ __forceinline__ static int quad_max_of_bits(int bits) {
    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
    return max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
  }

  // Half of a block's P, in registers that P V under way does not read: words() makes the operand of it and acc_s.
  // Words 2 i and 2 i + 1 hold the 16 keys i of rows g and g + 8; S is an accumulator of 8 columns after the other.
  template <int kWords>
  struct HalfP {
    uint32_t low[kCodes ? kWords : 1], high[kCodes ? kWords : 1];  // codes, two in each
    uint16_t pairs[kCodes ? 1 : kWords];                           // of the first two keys of a word
    uint32_t sign = 0;                                             // 0, which only a run knows
  };
  __device__ __forceinline__ static constexpr int index(int word, int j) {
    return word / 2 * 8 + word % 2 * 2 + j % 2 + j / 2 * 4;
  }

  template <class Acc, int kWords>
  __device__ __forceinline__ void exponentiate(Acc& acc_s, float scale, HalfP<kWords>& half) {
    static_assert(decltype(cute::size(acc_s))::value == 4 * kWords);
    if constexpr (kCodes) {
      make_codes(acc_s, scale, half);
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& p = acc_s(index(i, j));
          p = exp2f(fmaf(p, scale, -row_max[i % 2]));
          row_sum[i % 2][0] += p;
        }
        half.pairs[i] = pack_e4m3(acc_s(index(i, 0)), acc_s(index(i, 1)));
      }
      half.sign = row_sum[0][0] + row_sum[1][0] < 0.0f;
    }
  }

  template <class Acc, int kWords>
  __device__ __forceinline__ void make_codes(Acc& acc_s, float scale, HalfP<kWords>& half) const {
    constexpr float kZero = e4m3::kCodeMagic + e4m3::kCodesPerOctave * e4m3::kExponentBias;
    float factor = e4m3::kCodesPerOctave * scale, offset[kRows];
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) offset[mi] = kZero - e4m3::kCodesPerOctave * fmaxf(row_max[mi], -0x1p18f);
    if (!(scale <= kLargestNearScale)) {  // codes of scores far below would wrap
#pragma unroll
      for (int i = 0; i < 4 * kWords; ++i) {
        acc_s(i) = fmaxf(fmaf(acc_s(i), scale, -row_max[i / 2 % 2]), kFarLog2);
      }
      factor = e4m3::kCodesPerOctave;
      offset[0] = offset[1] = kZero;
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      float code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = fmaf(acc_s(index(i, j)), factor, offset[i % 2]);
      half.low[i] = clamp_codes(code[0], code[1]);
      half.high[i] = clamp_codes(code[2], code[3]);
      half.sign |= half.high[i];
    }
    half.sign >>= 31;
  }

  // Behind the wait for P V, which reads the registers that these words go to.
  template <class Acc, int kWords>
  __device__ __forceinline__ static uint32_t word(const Acc& acc_s, const HalfP<kWords>& half, int i) {
    if constexpr (kCodes) {
      return __byte_perm(half.low[i], half.high[i], 0x6420);
    } else {
      return join(half.pairs[i], pack_e4m3(acc_s(index(i, 2)), acc_s(index(i, 3))));
    }
  }

  // finalize(), with the sums of P as it was rounded, in every lane of a quad: numerator and denominator lose alike,
  // and a row of one key is exact. The LSE keeps the sums before rounding, if there are any.
  template <class Acc>
  __device__ __forceinline__ void finalize_rounded(float (&o_scale)[kRows], const Acc& acc_o, int ones_col,
                                                   float v_descale, float sink) {
    Fp8Softmax rounded = *this;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const float sum = 0.25f * acc_o(ones_col / 2 + 2 * mi);
      rounded.row_sum[mi][0] = row_max[mi] != row_max[mi] ? row_max[mi] : sum;
      if (kCodes) rounded.row_max[mi] -= e4m3::kCodeMeanLog2;
    }
    rounded.finalize(o_scale, v_descale, 1.0f, sink);
    if constexpr (kCodes) {
      *this = rounded;
    } else {
      float unused[kRows];
      Base::finalize(unused, 1.0f, 1.0f, sink);
    }
  }
};

}  // namespace sm90
}  // namespace flash
