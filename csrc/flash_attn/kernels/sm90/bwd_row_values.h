// What a consumer of the wgmma backward reads per row of an m_block: LSE, softmax_d and the random bits of dropout.
#pragma once

#include "core/dropout_mask.h"

namespace flash {
namespace sm90 {

// LSE or softmax_d of this thread's rows, read in pairs of neighbouring rows from shared memory.
template <class Coords>
struct SmemRowValues {
  const float* rows;
  const Coords& coords;

  __device__ __forceinline__ float2 pair(int mi) const {
    return *reinterpret_cast<const float2*>(rows + coords.row(mi));
  }
};

// The same in registers, loaded before a wgmma with both operands in shared memory starts: it saturates the bandwidth
// of shared memory.
template <class Coords, int kRows>
struct RegisterRowValues {
  float2 pairs[kRows / 2];

  __device__ __forceinline__ explicit RegisterRowValues(const SmemRowValues<Coords>& values) {
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) pairs[i] = values.pair(2 * i);
  }
  __device__ __forceinline__ float2 pair(int mi) const { return pairs[mi / 2]; }
};

// The random bits of dropout of rows and of pairs of columns, in shared memory.
template <class Coords>
struct SmemRandomBits {
  const RandomBits* rows;
  const RandomBits* pairs;
  const Coords& coords;

  __device__ __forceinline__ RandomBits row(int mi) const { return rows[coords.row(mi)]; }
  __device__ __forceinline__ RandomBits column_pair(int ni) const { return pairs[coords.col(ni) / 2]; }
};

}  // namespace sm90
}  // namespace flash
