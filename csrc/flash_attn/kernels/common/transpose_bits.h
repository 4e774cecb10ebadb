// A matrix of 32 x 32 bits, a row in each lane of a warp.
#pragma once

#include <cstdint>

namespace flash {

// Bit i of lane j becomes bit j of lane i.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t word) {
  const int lane = threadIdx.x % 32;
  uint32_t mask = 0xffffu;  // bits whose number lacks that of `distance`
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2, mask ^= mask << distance) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, word, distance);
    word = lane & distance ? (word & ~mask) | (other >> distance & mask) : (word & mask) | (other & mask) << distance;
  }
  return word;
}

}  // namespace flash
