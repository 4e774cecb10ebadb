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

}  // namespace sm80
}  // namespace flash
