// The techniques that a design switches, one function each: copies, GEMMs, softmax.
#pragma once

#include <cute/tensor.hpp>

#include "fwd_config.h"
#include "kernels/common/softmax.h"
#include "kernels/sm80/gemm.h"

namespace flash {
namespace lab {

// Rows [0, rows) of a strided matrix into a tile, the others become 0. kBounded = false: the whole tile is in bounds.
// cp.async returns at once; plain loads are complete, for this thread, when the function is.
template <bool kBounded, class Config, class Smem>
__device__ __forceinline__ void copy_rows(const typename Config::Element* base, int64_t stride, int rows, Smem& tile) {
  using Copy = typename Config::RowCopyT;
  const Copy copy(Config::kHeadDim);
  if constexpr (kDesign.async_copies) {
    copy.template run_strided<kBounded>(base, stride, rows, tile);
  } else {
#pragma unroll
    for (int i = 0; i < decltype(cute::size<0>(tile))::value; i += Copy::kRowsPerIteration) {
      const int row = copy.row + i;
#pragma unroll
      for (int j = 0; j < Copy::kColIterations; ++j) {
        const int col = copy.col + j * kAtomCols;
        uint4 vector = make_uint4(0, 0, 0, 0);
        if (!kBounded || row < rows) vector = *reinterpret_cast<const uint4*>(base + row * stride + col);
        *reinterpret_cast<uint4*>(&tile(row, col)) = vector;
      }
    }
  }
}

// This thread's copies, then the barrier: the tile is complete and what was read before may be overwritten.
__device__ __forceinline__ void wait_for_copies() {
  cute::cp_async_wait<0>();
  __syncthreads();
}

// Reads an operand before the MMAs of slice k, kTogether slices at a time (0: all), with kAhead those that follow.
template <int kTogether, int kSlices, bool kAhead, class Load>
__device__ __forceinline__ void read_slices(const Load& load, int k) {
  constexpr int kStep = kTogether == 0 ? kSlices : kTogether;
  if (k % kStep != 0) return;
  const int first = kAhead ? k + kStep : k;
#pragma unroll
  for (int i = kAhead && k == 0 ? 0 : first; i < first + kStep && i < kSlices; ++i) load(i);
}

// acc += a b^T, fragments (MMA, MMA_M or MMA_N, MMA_K). load_a(k), load_b(k) read those of a k-slice from shared
// memory.
template <class Config, int kTogetherA, int kTogetherB, class LoadA, class LoadB, class Acc, class A, class B>
__device__ __forceinline__ void gemm_slices(const LoadA& load_a, const LoadB& load_b, Acc& acc, const A& a,
                                            const B& b) {
  using namespace cute;
  constexpr int kSlices = decltype(size<2>(a))::value;
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    read_slices<kTogetherA, kSlices, kDesign.double_buffered>(load_a, k);
    read_slices<kTogetherB, kSlices, kDesign.double_buffered>(load_b, k);
    gemm(typename Config::TiledMma{}, a(_, _, k), b(_, _, k), acc);
  }
}

// Online softmax as in the papers: the exact row max of every step, O multiplied in all but the kFirst one.
template <bool kFirst, int kRows, class Scores, class Out>
__device__ __forceinline__ void textbook_update(Softmax<kRows>& softmax, Scores& scores, Out& out, float scale) {
  float maxima[kRows];
  Softmax<kRows>::set_maxima(scores, maxima);
  float correction[kRows];
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    const float row_max = fmaxf(softmax.row_max[mi], maxima[mi]);
    correction[mi] = exp2f((softmax.row_max[mi] - row_max) * scale);
    softmax.row_max[mi] = row_max;
    if constexpr (!kFirst) softmax.row_sum[mi][0] *= correction[mi];
  }
  if constexpr (!kFirst) softmax.rescale(out, correction);
  softmax.exponentiate(scores, scale);
}

}  // namespace lab
}  // namespace flash
