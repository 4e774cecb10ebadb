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

// Rows of a tile, a bit for each: those of 32 rows in each lane.
struct MarkedRows {
  uint32_t of_lane = 0;

  __device__ __forceinline__ bool any() const { return __any_sync(0xffffffffu, of_lane != 0u); }
};

// Zeroes the marked rows. By one warp, after its wait for the TMA copy.
template <int kTileRows, int kAtoms, int kAtomCols, class Element>
__device__ __forceinline__ void clear_rows(Element* tile, const MarkedRows& rows) {
  constexpr int kRowVectors = kAtomCols * static_cast<int>(sizeof(Element)) / static_cast<int>(sizeof(uint4));
  constexpr int kTileVectors = kTileRows * kRowVectors;
#pragma unroll 1
  for (int row = 0; row < kTileRows; ++row) {
    if (!(__shfl_sync(0xffffffffu, rows.of_lane, row / 32) >> (row % 32) & 1u)) continue;
    uint4* const vectors = reinterpret_cast<uint4*>(tile) + row * kRowVectors;
    for (int i = threadIdx.x % 32; i < kAtoms * kRowVectors; i += 32) {
      vectors[i / kRowVectors * kTileVectors + i % kRowVectors] = uint4{};
    }
  }
  fence_buffer();
  __syncwarp();
}

}  // namespace tma
}  // namespace flash
