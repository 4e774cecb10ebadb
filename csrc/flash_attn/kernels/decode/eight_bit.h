// Conversion of 8-bit values in registers to fp16, two at a time, and quantisation.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/eight_bit.h"
#include "params/dtype.h"

namespace flash {
namespace decode {

__device__ __forceinline__ uint32_t hmul2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ uint32_t hadd2(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

__device__ __forceinline__ uint32_t hfma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Two 8-bit values of a word, the upper ones with kSecond, as fp16.
template <bool kSecond>
__device__ __forceinline__ uint32_t e4m3_to_half(uint32_t word) {
  using namespace eight_bit;
#if __CUDA_ARCH__ >= 890
  uint32_t result;
  if constexpr (kSecond) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(result) : "r"(word));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(result) : "r"(word));
  }
  return result;
#else
  const uint32_t spread = __byte_perm(word, 0, kSecond ? kE4m3Second : kE4m3First);
  const uint32_t magnitude = spread >> 1 & kE4m3Magnitude;
  const uint32_t overflows = hfma2(magnitude, kHalf32768, kHalf4096);
  return hfma2(overflows, 0, hmul2(magnitude | (spread & kE4m3Sign), kHalf256));
#endif
}

template <bool kSecond>
__device__ __forceinline__ float2 e4m3_to_floats(uint32_t word) {
  float2 pair;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
      : "=f"(pair.x), "=f"(pair.y)
      : "r"(e4m3_to_half<kSecond>(word)));
  return pair;
}

// word: after kInt8Sign was flipped.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t int8_to_half(uint32_t word) {
  return hadd2(__byte_perm(word, eight_bit::kInt8Exponent, kSelector), eight_bit::kInt8Bias);
}

// A word of ldmatrix: four columns of one key -> both B registers.
template <Dtype kQuantized>
__device__ __forceinline__ void keys_to_half(uint32_t word, uint32_t& b0, uint32_t& b1) {
  if constexpr (kQuantized == Dtype::kE4m3) {
    b0 = e4m3_to_half<false>(word);
    b1 = e4m3_to_half<true>(word);
  } else {
    word ^= eight_bit::kInt8Sign;
    b0 = int8_to_half<eight_bit::kInt8First>(word);
    b1 = int8_to_half<eight_bit::kInt8Second>(word);
  }
}

// A word of ldmatrix.trans: two keys by an even and an odd column -> one B register of each column's product.
template <Dtype kQuantized>
__device__ __forceinline__ void values_to_half(uint32_t word, uint32_t& even, uint32_t& odd) {
  if constexpr (kQuantized == Dtype::kE4m3) {
    word = __byte_perm(word, word, eight_bit::kInterleaveKeys);
    even = e4m3_to_half<false>(word);
    odd = e4m3_to_half<true>(word);
  } else {
    word ^= eight_bit::kInt8Sign;
    even = int8_to_half<eight_bit::kInt8EvenCols>(word);
    odd = int8_to_half<eight_bit::kInt8OddCols>(word);
  }
}

// Finite numbers beyond the range of fp16 become its largest.
__device__ __forceinline__ float in_half_range(float value) {
  constexpr float kLargestHalf = 65504.0f;
  return fabsf(value) > kLargestHalf && fabsf(value) < INFINITY ? copysignf(kLargestHalf, value) : value;
}

// K's part of its descale if queries take the rest.
__device__ __forceinline__ float key_power(float descale) {
  return __uint_as_float(eight_bit::key_power(__float_as_uint(descale)));
}

__device__ __forceinline__ float without_key_power(float descale) {
  return descale * __uint_as_float(eight_bit::reciprocal_power(eight_bit::key_power(__float_as_uint(descale))));
}

// ---- Quantisation: flash_attn/eight_bit.py defines the arithmetic. It must not flush denormals, as fast math would.
// ----

__device__ __forceinline__ float multiply_ieee(float a, float b) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float reciprocal_ieee(float value) {
  float result;
  asm("rcp.rn.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ __forceinline__ uint32_t quantized_e4m3(float value) {
#if __CUDA_ARCH__ >= 890
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(0.0f), "f"(value));
  return value != value ? 0x7f : packed & 0xff;
#else
  return eight_bit::e4m3_bits(__float_as_uint(value), __float_as_uint(fabsf(value) + 16384.0f));
#endif
}

__device__ __forceinline__ uint32_t quantized_int8(float value) {
  if (value != value) return 0;
  return static_cast<uint32_t>(__float2int_rn(fminf(fmaxf(value, -127.0f), 127.0f))) & 0xff;
}

__device__ __forceinline__ uint32_t quantized(float value, Dtype dtype) {
  return dtype == Dtype::kE4m3 ? quantized_e4m3(value) : quantized_int8(value);
}

// The descale of a row whose largest magnitude, NaN left out, is `amax`.
__device__ __forceinline__ float descale_of(float amax, bool has_nan, Dtype dtype) {
  constexpr float kLargestFloat = 3.40282346638528859811704183484516925e+38f;
  constexpr float kSmallest = 1.17549435082228750796873653722224568e-38f;  // 2^-126
  constexpr float kE4m3 = static_cast<float>(1.0 / 448.0), kInt8 = static_cast<float>(1.0 / 127.0);
  if (dtype == Dtype::kInt8 && has_nan) return __int_as_float(0x7fc00000);
  return fmaxf(multiply_ieee(fminf(amax, kLargestFloat), dtype == Dtype::kE4m3 ? kE4m3 : kInt8), kSmallest);
}

}  // namespace decode
}  // namespace flash
