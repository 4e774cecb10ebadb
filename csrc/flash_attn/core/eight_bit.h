// 8-bit K and V as MMA operands: which fragment element holds which element of K, V, Q and O, and the bit patterns of
// the conversions. Plain C++17.
//
// A 16-byte vector of a row of K holds 16 columns, one k-step of the MMA. ldmatrix gives lane 4 g + t bytes 4 t to 4 t
// + 3 of key g: both B registers of a 16 x 8 product, if Q's columns are permuted the same way. A vector of V holds 16
// columns of O. ldmatrix.trans gives lane 4 g + t bytes 2 g and 2 g + 1 of keys 2 t and 2 t + 1: the B registers of two
// products, one for even and one for odd columns, so that a thread's columns of O are consecutive.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash {
namespace eight_bit {

constexpr int kVectorCols = 16;  // columns of a 16-byte vector of 8-bit values

// Q: position in shared memory of pair `pair` of 16-bit columns, among 16 columns, so that ldmatrix delivers it to the
// lane and register that hold the same columns of K.
FLASH_HOST_DEVICE constexpr int q_pair_position(int pair) { return pair % 2 * 4 + pair / 2; }

// First of the four consecutive columns of a vector's O that lane 4 g + t holds. The even columns' accumulator comes
// first: column o_col(t) + 2 j + odd is element j of accumulator `odd`.
FLASH_HOST_DEVICE constexpr int o_col(int t) { return 4 * t; }

// Byte selectors of PRMT.
constexpr uint32_t kInterleaveKeys = 0x3120;  // of V: (k0 c0, k0 c1, k1 c0, k1 c1) -> (k0 c0, k1 c0, k0 c1, k1 c1)

// int8: value + 128 as the low byte of an fp16 is 1024 + 128 + value.
constexpr uint32_t kInt8Sign = 0x80808080u;
constexpr uint32_t kInt8Exponent = 0x64646464u;
constexpr uint32_t kInt8Bias = 0xE480E480u;  // -1152, twice
constexpr uint32_t kInt8First = 0x4140;      // bytes 0 and 1, each below the exponent
constexpr uint32_t kInt8Second = 0x4342;     // bytes 2 and 3
constexpr uint32_t kInt8EvenCols = 0x4240;   // bytes 0 and 2: V of both keys
constexpr uint32_t kInt8OddCols = 0x4341;

// e4m3 without a conversion instruction: sign, exponent and mantissa at fp16's positions are the value times 2^-8. The
// largest magnitude is NaN: only it overflows in magnitude * 2^15 + 2^12.
constexpr uint32_t kE4m3First = 0x1404;  // bytes 0 and 1, each as the high byte of 16 bits, with zeros
constexpr uint32_t kE4m3Second = 0x3424;
constexpr uint32_t kE4m3Sign = 0x80008000u;
constexpr uint32_t kE4m3Magnitude = 0x3f803f80u;  // after a shift to the right by 1
constexpr uint32_t kHalf256 = 0x5c005c00u;        // 2^8, twice
constexpr uint32_t kHalf32768 = 0x78007800u;      // 2^15
constexpr uint32_t kHalf4096 = 0x6c006c00u;       // 2^12

// Rounds to nearest even and saturates; NaN becomes 0x7f. `bits`: of an fp32. `below_normal`: bits of |value| + 2^14,
// whose last bit is worth 2^-9, for values below 2^-6.
FLASH_HOST_DEVICE constexpr uint32_t e4m3_bits(uint32_t bits, uint32_t below_normal) {
  const uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7f;
  if (magnitude >= 0x43e00000) return sign | 0x7e;  // 448
  if (magnitude < 0x3c800000) return sign | (below_normal - 0x46800000);
  return sign | (((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3));
}

// The power of two, in fp32 bits, that multiplies K if queries become fp16 and take the rest of K's descale. The rest
// is below 1, so that queries stay in range, unless the descale exceeds 2^7. Quantised values times the power are exact
// in fp16: the last bit of e4m3 is 2^-9, and no value exceeds 448.
FLASH_HOST_DEVICE constexpr uint32_t key_power(uint32_t descale) {
  constexpr uint32_t kSmallest = 0x38000000, kLargest = 0x43000000, kDouble = 0x00800000;  // 2^-15, 2^7
  const uint32_t power = (descale & 0x7f800000) + kDouble;
  return power < kSmallest ? kSmallest : power > kLargest ? kLargest : power;
}

// The bits of 1 / power.
FLASH_HOST_DEVICE constexpr uint32_t reciprocal_power(uint32_t power) { return 0x7f000000 - power; }

}  // namespace eight_bit
}  // namespace flash
