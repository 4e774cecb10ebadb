// cp.async of matrix rows into a swizzled tile of shared memory. Rows out of bounds and columns beyond the head dim
// become 0: 0 * NaN would be NaN in the MMA.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/paged_kv.h"
#include "params/flash.h"

namespace flash {

template <class Element>
struct SourceRow {
  const Element* data;
  bool valid;  // an invalid line is not read and becomes zeros
};

// kThreadsPerRow threads copy a row, one 16-byte vector each; an iteration covers kRowsPerIteration rows.
template <class Element, int kThreads, int kAtomCols, int kHeadDim>
struct RowCopy {
  static constexpr int kVectorCols = 16 / sizeof(Element);
  static constexpr int kThreadsPerRow = kAtomCols / kVectorCols;
  static constexpr int kRowsPerIteration = kThreads / kThreadsPerRow;
  static constexpr int kColIterations = kHeadDim / kAtomCols;
  using ThreadLayout = cute::Layout<cute::Shape<cute::Int<kRowsPerIteration>, cute::Int<kThreadsPerRow>>,
                                    cute::Stride<cute::Int<kThreadsPerRow>, cute::_1>>;
  using Atom = cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, Element>;
  using TiledCopy = decltype(cute::make_tiled_copy(Atom{}, ThreadLayout{},
                                                   cute::Layout<cute::Shape<cute::_1, cute::Int<kVectorCols>>>{}));

  int row;         // of this thread in the first iteration
  int col;         // of this thread in the first iteration over columns
  int valid_cols;  // head dim of the tensor

  __device__ __forceinline__ explicit RowCopy(int head_dim)
      : row(threadIdx.x / kThreadsPerRow), col((threadIdx.x % kThreadsPerRow) * kVectorCols), valid_cols(head_dim) {}

  // row_at(iteration) -> SourceRow of row `row + iteration * kRowsPerIteration`. smem: (rows, kHeadDim), swizzled.
  template <class Lines, class Smem>
  __device__ __forceinline__ void run(const Lines& row_at, Smem& smem) const {
    using namespace cute;
    auto tile = TiledCopy{}.get_thread_slice(threadIdx.x).partition_D(smem);  // ((8, 1), ROWS, COLS)
#pragma unroll
    for (int i = 0; i < size<1>(tile); ++i) {
      const SourceRow<Element> source = row_at(i);
#pragma unroll
      for (int j = 0; j < kColIterations; ++j) {
        auto vector =
            make_tensor(make_gmem_ptr(source.data + j * kAtomCols), Layout<Shape<Shape<Int<kVectorCols>, _1>>>{});
        copy(Atom{}.with(source.valid && col + j * kAtomCols < valid_cols), vector, tile(_, i, j));
      }
    }
  }

  // Rows [first, rows) of a strided matrix; kBounded = false asserts that the whole tile is in bounds.
  template <bool kBounded, class Smem>
  __device__ __forceinline__ void run_strided(const Element* base, int64_t stride, int rows, Smem& smem,
                                              int first = 0) const {
    run_from<kBounded>(base + thread_offset(stride), stride, rows, smem, first);
  }

  // This thread's element offset in the first iteration.
  __device__ __forceinline__ int64_t thread_offset(int64_t stride) const { return row * stride + col; }

  // run_strided() from a pointer that includes thread_offset().
  template <bool kBounded, class Smem>
  __device__ __forceinline__ void run_from(const Element* from, int64_t stride, int rows, Smem& smem,
                                           int first = 0) const {
    run(
        [&](int iteration) {
          const int offset = iteration * kRowsPerIteration;
          return SourceRow<Element>{from + offset * stride,
                                    !kBounded || (row + offset >= first && row + offset < rows)};
        },
        smem);
  }

  // Keys [key_begin, key_begin + rows) of one paged sequence. Pages whose block_table entry is out of range become 0.
  template <bool kBounded, class Smem>
  __device__ __forceinline__ void run_paged(const Element* base, const MatrixStrides& strides, const PagedKv& paged,
                                            const int* pages, int key_begin, int rows, Smem& smem) const {
    run(
        [&](int iteration) {
          const int offset = row + iteration * kRowsPerIteration;
          const PageRow at = page_row(paged, pages, key_begin + offset, !kBounded || offset < rows);
          return SourceRow<Element>{base + (at.valid ? at.page : 0) * strides.batch + at.row * strides.row + col,
                                    at.valid};
        },
        smem);
  }
};

}  // namespace flash
