// Rows of a staged tile in shared memory to a strided matrix, in 16-byte vectors.
#pragma once

#include <cute/tensor_impl.hpp>

#include "kernels/common/convert.h"

namespace flash {

// Called by all threads of the block, after a barrier that follows the stores to the tile; the thread layout is that of
// RowCopy. Writes rows [0, rows) and columns [0, cols).
template <class Copy, class Element, class Smem>
__device__ __forceinline__ void store_rows(const Smem& tile, Element* base, int64_t stride, int rows, int cols) {
  const Copy threads(cols);
#pragma unroll
  for (int i = 0; i < decltype(cute::size<0>(tile))::value; i += Copy::kRowsPerIteration) {
    const int row = threads.row + i;
#pragma unroll
    for (int j = 0; j < Copy::kColIterations; ++j) {
      const int col = threads.col + j * Copy::kThreadsPerRow * Copy::kVectorCols;
      if (row < rows && col < cols) {
        *reinterpret_cast<uint4*>(base + row * stride + col) = *reinterpret_cast<const uint4*>(&tile(row, col));
      }
    }
  }
}

// Adds accumulators to rows [0, rows) and columns [0, cols) of a strided fp32 matrix. `values`: a row_col_view; `base`
// and the rows are aligned to 8 bytes. Each element belongs to one thread, so that the sums have the same bits in every
// run.
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

// Transposes 4 x 4 words of the four lanes of a quad: word k of lane l becomes word l of lane k.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool is_upper = lane & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, is_upper ? words[i] : words[i + distance], distance);
      words[i] = is_upper ? received : words[i];
      words[i + distance] = is_upper ? words[i + distance] : received;
    }
  }
}

// Stores a warpgroup's accumulator of 64 rows to rows [0, rows) and columns [0, cols) of a strided matrix of Elements,
// in 16-byte vectors, 64 bytes of each row at a time. It needs no shared memory and no wait. By whole warps; `thread`:
// index in the warpgroup.
template <class Element, class Accumulator>
__device__ __forceinline__ void store_accumulator(const Accumulator& acc, int thread, Element* base, int64_t stride,
                                                  int rows, int cols) {
  constexpr int kTiles = decltype(cute::size(acc))::value / 4;  // of 8 columns; a thread has two columns of two rows
  static_assert(kTiles % 4 == 0, "a quad exchanges four tiles");
  const int lane = thread % 4, first_row = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; tile += 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int first = 4 * (tile + i) + 2 * half;
        words[i] = pack_pair(acc(first), acc(first + 1), Element{});
      }
      transpose_quad(words, lane);
      const int row = first_row + 8 * half, col = 8 * (tile + lane);
      if (row < rows && col < cols) {
        *reinterpret_cast<uint4*>(base + row * stride + col) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace flash
