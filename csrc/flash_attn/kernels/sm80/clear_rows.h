// Clearing of rows that no query or key of the sequence sees, in tiles of shared memory.
#pragma once

namespace flash {
namespace sm80 {

// Zeroes the first `rows` rows of each tile: they may hold NaN, and 0 * NaN would be NaN in the MMA. By all threads,
// after a barrier that follows the copies; ends with a barrier. Only the rare tiles with such rows (rows > 0) pay for
// it.
template <class Config, class... Tiles>
__device__ __forceinline__ void clear_rows(int rows, Tiles&&... tiles) {
  if (rows <= 0) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * Config::kHeadDim; i += Config::kThreads) {
    ((tiles(i / Config::kHeadDim, i % Config::kHeadDim) = typename Config::Element(0.0f)), ...);
  }
  __syncthreads();
}

// Zeroes those of the first kRows rows whose bit is 0, likewise. seen(i): the bits of 32 rows from row 32 i on, the
// same for all threads.
template <class Config, int kRows, class Seen, class... Tiles>
__device__ __forceinline__ void clear_unseen_rows(const Seen& seen, Tiles&&... tiles) {
  constexpr int kWords = kRows < 32 ? 1 : kRows / 32;
  constexpr uint32_t kAll = kRows < 32 ? (1u << kRows % 32) - 1u : ~0u;
  bool all_seen = true;
#pragma unroll
  for (int i = 0; i < kWords; ++i) all_seen &= (seen(i) & kAll) == kAll;
  if (all_seen) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * Config::kHeadDim; i += Config::kThreads) {
    const int row = i / Config::kHeadDim;
    if (seen(row / 32) >> (row % 32) & 1u) continue;
    ((tiles(row, i % Config::kHeadDim) = typename Config::Element(0.0f)), ...);
  }
  __syncthreads();
}

}  // namespace sm80
}  // namespace flash
