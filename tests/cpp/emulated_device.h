// What the headers of the kernels need besides emulated_cuda.h.
#pragma once

#include "emulated_cuda.h"

#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#undef __shared__
#define __shared__

using std::isnan;
using std::max;

struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __vimax3_s32(int a, int b, int c) { return max(a, max(b, c)); }
inline unsigned __vimax3_u32(unsigned a, unsigned b, unsigned c) { return max(a, max(b, c)); }
inline bool __all_sync(uint32_t mask, bool value) { return !__any_sync(mask, !value); }
inline void atomicMax(int* address, int value) { *address = max(*address, value); }
inline void atomicMin(unsigned* address, unsigned value) { *address = min(*address, value); }
