// Rows of a staged tile in shared memory to a strided matrix, in 16-byte vectors.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/convert.h"

namespace flash {

// By all threads of the block, after a barrier behind the stores to the tile; the thread layout is that of RowCopy.
// Writes rows [0, rows) and columns [0, cols).
template <class Copy, class Element, class Smem>
__device__ __forceinline__ void store_rows(const Smem& tile, Element* base, int64_t stride, int rows, int cols) {
  const Copy threads(cols);
#pragma unroll
  for (int i = 0; i < decltype(cute::size<0>(tile))::value; i += Copy::kRowsPerPass) {
    const int row = threads.row + i;
#pragma unroll
    for (int j = 0; j < Copy::kColPasses; ++j) {
      const int col = threads.col + j * Copy::kThreadsPerRow * Copy::kVectorCols;
      if (row < rows && col < cols) {
        *reinterpret_cast<uint4*>(base + row * stride + col) = *reinterpret_cast<const uint4*>(&tile(row, col));
      }
    }
  }
}

// Adds accumulators to rows [0, rows) and columns [0, cols) of a strided fp32 matrix. `values`: a row_col_view; `base`
// and the rows are aligned to 8 bytes. Each element has one thread, so that the sums have the same bits in every run.
template <class Values, class Coords>
__device__ __forceinline__ void add_rows(const Values& values, const Coords& coords, float* base, int64_t stride,
                                         int rows, int cols) {
  using namespace cute;
#pragma unroll
  for (int mi = 0; mi < size<0>(values); ++mi) {
    float* const row = base + coords.row(mi) * stride;
#pragma unroll
    for (int ni = 0; ni < size<1>(values); ni += 2) {
      if (coords.row(mi) < rows && coords.col(ni) < cols) {
        float2& sum = *reinterpret_cast<float2*>(row + coords.col(ni));
        sum = {sum.x + values(mi, ni), sum.y + values(mi, ni + 1)};
      }
    }
  }
}

// Converts accumulators to Elements in a swizzled tile of shared memory. Fragments hold pairs of neighbouring columns.
template <class Element, class Mma, class Accumulator, class Smem>
__device__ __forceinline__ void stage_accumulator(const Mma& mma, const Accumulator& accumulator, Smem& tile) {
  using namespace cute;
  using Store = Copy_Atom<AutoVectorizingCopyWithAssumedAlignment<32>, Element>;
  const auto store = make_tiled_copy_C(Store{}, mma).get_thread_slice(threadIdx.x);
  const auto values = convert<Element>(accumulator);
  copy(Store{}, store.retile_S(values), store.partition_D(tile));
}

}  // namespace flash
