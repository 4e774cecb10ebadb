// Rows in vectors of eight columns, which a thread reads, multiplies and writes at once: 8-bit values or 16-bit
// numbers.
#pragma once

#include "kernels/common/element.h"
#include "kernels/common/sequence.h"
#include "kernels/decode/eight_bit.h"

namespace flash {
namespace decode {

constexpr int kRowVectorCols = 8;

__device__ __forceinline__ void unpack_pair(uint32_t pair, __half2, float& low, float& high) {
  const float2 values = __half22float2(reinterpret_cast<const __half2&>(pair));
  low = values.x;
  high = values.y;
}

__device__ __forceinline__ void unpack_pair(uint32_t pair, __nv_bfloat162, float& low, float& high) {
  low = __uint_as_float(pair << 16);
  high = __uint_as_float(pair & 0xffff0000u);
}

template <Dtype kQuantized>
__device__ __forceinline__ void unpack_vector(uint2 packed, float (&values)[kRowVectorCols]) {
  uint32_t pairs[4];
  keys_to_half<kQuantized>(packed.x, pairs[0], pairs[1]);
  keys_to_half<kQuantized>(packed.y, pairs[2], pairs[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack_pair(pairs[i], __half2{}, values[2 * i], values[2 * i + 1]);
}

template <Dtype kDtype>
__device__ __forceinline__ void unpack_vector(uint4 vector, float (&values)[kRowVectorCols]) {
  const uint32_t pairs[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) unpack_pair(pairs[i], NativePairOf<kDtype>{}, values[2 * i], values[2 * i + 1]);
}

// Clamped to the range of fp16 if that is kDtype.
template <Dtype kDtype>
__device__ __forceinline__ uint4 pack_vector(float (&values)[kRowVectorCols]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = values[2 * i], high = values[2 * i + 1];
    if constexpr (kDtype == Dtype::kFp16) {
      low = in_half_range(low);
      high = in_half_range(high);
    }
    words[i] = pack_pair(low, high, ElementOf<kDtype>{});
  }
  return {words[0], words[1], words[2], words[3]};
}

// vector_bytes: 8 or more, 4, or less; then there are `count` values.
__device__ __forceinline__ uint2 load_quantized(const uint8_t* from, int vector_bytes, int count) {
  uint2 packed{0, 0};
  if (vector_bytes >= 8) return *reinterpret_cast<const uint2*>(from);
  if (vector_bytes == 4) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
    return {words[0], words[1]};
  }
#pragma unroll
  for (int i = 0; i < kRowVectorCols; ++i) {
    if (i < count) (i < 4 ? packed.x : packed.y) |= uint32_t{from[i]} << 8 * (i % 4);
  }
  return packed;
}

// The sequence of a packed row; an arbitrary one for rows of none. segments: of q or of k.
__device__ __forceinline__ int sequence_of_row(const int* segments, int batch, int row) {
  int low = 0, high = batch + 2;  // segments[low] <= row < segments[high], were there no empty ones
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (segments[middle] <= row ? low : high) = middle;
  }
  return clamp(low - 1, 0, batch - 1);
}

}  // namespace decode
}  // namespace flash
