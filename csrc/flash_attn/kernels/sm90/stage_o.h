// Accumulators into shared memory, in the swizzle atoms that TMA stores and wgmma reads.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/convert.h"
#include "kernels/tma/swizzle.h"

namespace flash {
namespace sm90 {

// A warp's 16 rows of 64 in swizzle atoms of kCols columns of 16 bits.
template <int kCols>
struct StagedRows {
  uint32_t address;

  template <class Element>
  __device__ __forceinline__ explicit StagedRows(Element* buffer) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    address = cute::cast_smem_ptr_to_uint(buffer + tma::swizzle_offset(kCols, row, lane / 16));
  }

  // Columns [col, col + 16): the four registers of an A operand.
  __device__ __forceinline__ void store(int col, const uint32_t (&pairs)[4]) const {
    constexpr int kAtomBytes = 64 * kCols * 2;
    // Advancing by two 16-byte vectors flips one bit of the offset under any swizzle.
    const uint32_t to = (address ^ (col % kCols / tma::kVectorCols * 16)) + col / kCols * kAtomBytes;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]),
                 "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
                 : "memory");
  }
};

// Stages kHeadDim columns of this warp's 16 rows of O, times o_scale.
template <int kCols, int kHeadDim, class Acc, class Element>
__device__ __forceinline__ void stage_o(const Acc& acc_o, Element* buffer, const float (&o_scale)[2]) {
  const StagedRows<kCols> rows(buffer);
#pragma unroll
  for (int col = 0; col < kHeadDim; col += 16) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = col / 2 + 2 * i;
      pairs[i] = pack_pair(acc_o(at) * o_scale[i % 2], acc_o(at + 1) * o_scale[i % 2], Element{});
    }
    rows.store(col, pairs);
  }
}

}  // namespace sm90
}  // namespace flash
