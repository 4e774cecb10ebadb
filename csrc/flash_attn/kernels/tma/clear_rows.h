// Clearing of fully masked rows at the beginning of a tile: TMA clips boxes at the end of a sequence only.
#pragma once

#include <cstdint>

#include "kernels/tma/mbarrier.h"

namespace flash {
namespace tma {

// Zeroes the first `rows` rows of a tile of kTileRows rows in swizzle atoms of kAtomCols columns. By one warp, after
// its wait for the TMA copy; swizzling permutes vectors within a row only.
template <int kTileRows, int kAtoms, int kAtomCols, class Element>
__device__ __forceinline__ void clear_rows(Element* tile, int rows) {
  constexpr int kRowVectors = kAtomCols * static_cast<int>(sizeof(Element)) / static_cast<int>(sizeof(uint4));
  static_assert(kRowVectors > 0, "a row of a swizzle atom holds whole vectors");
#pragma unroll 1
  for (int atom = 0; atom < kAtoms; ++atom) {
    uint4* const vectors = reinterpret_cast<uint4*>(tile + atom * kTileRows * kAtomCols);
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < rows * kRowVectors; i += 32) vectors[i] = uint4{};
  }
  fence_buffer();
  __syncwarp();
}

}  // namespace tma
}  // namespace flash
