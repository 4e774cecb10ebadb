// What the warps that share the rows of a tile exchange through shared memory: each has some of the keys of a block,
// and multiplies the probabilities of all of them by its columns of V.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/sm80/operand_layouts.h"
#include "kernels/sm80/stage_accumulator.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace sm80 {

template <class Config>
struct RowExchange {
  using Element = typename Config::Element;
  using SmemLayoutP = SwizzledTile<Config::kBlockM, Config::kBlockN>;
  static constexpr int kRowBarrier = 1;  // + the index of the warps' rows: a named barrier of the warps that share them
  static constexpr int kRowThreads = 32 * Config::kColWarps;

  char* const smem;  // P, then a number of each warp and row

  __device__ __forceinline__ auto probabilities() const {
    return cute::make_tensor(cute::make_smem_ptr(reinterpret_cast<Element*>(smem)), SmemLayoutP{});  // (M, N)
  }

  // Each row's largest score among the warp's keys, also in `maxima`. A barrier of all threads follows, and another one
  // precedes the next call.
  template <class Scores, int kRows>
  __device__ __forceinline__ void publish_maxima(const Scores& scores, const typename Config::Coords& coords,
                                                 float (&maxima)[kRows]) const {
    using namespace cute;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      maxima[mi] = scores(mi, 0);
#pragma unroll
      for (int ni = 1; ni < size<1>(scores); ++ni) maxima[mi] = fmaxf(maxima[mi], scores(mi, ni));
      maxima[mi] = quad_max(maxima[mi]);
      if (threadIdx.x % 4 == 0) numbers(col_warp())[coords.row(mi)] = maxima[mi];
    }
  }

  template <int kRows>
  __device__ __forceinline__ void read_maxima(const typename Config::Coords& coords, float (&maxima)[kRows]) const {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int warp = 0; warp < Config::kColWarps; ++warp) {
        maxima[mi] = fmaxf(maxima[mi], numbers(warp)[coords.row(mi)]);
      }
    }
  }

  // On return the rows of probabilities() are complete.
  template <class Accumulator>
  __device__ __forceinline__ void publish_probabilities(const Accumulator& acc_s) const {
    stage_accumulator<Element>(typename Config::TiledMma{}, acc_s, probabilities());
    sync_rows();
  }

  // Sums of whole rows, in the first lane of each quad; the others become 0, as Softmax::finalize() adds up a quad.
  template <int kRows>
  __device__ __forceinline__ void add_row_sums(const typename Config::Coords& coords,
                                               float (&row_sum)[kRows][1]) const {
    sync_rows();  // maxima of the last step have been read
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const float sum = quad_sum(row_sum[mi][0]);
      if (threadIdx.x % 4 == 0) numbers(col_warp())[coords.row(mi)] = sum;
    }
    sync_rows();
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < Config::kColWarps; ++warp) sum += numbers(warp)[coords.row(mi)];
      row_sum[mi][0] = threadIdx.x % 4 == 0 ? sum : 0.0f;
    }
  }

 private:
  __device__ __forceinline__ static int col_warp() { return threadIdx.x / 32 / Config::kRowWarps; }

  __device__ __forceinline__ static void sync_rows() {
    sync_named(kRowBarrier + threadIdx.x / 32 % Config::kRowWarps, kRowThreads);
  }

  __device__ __forceinline__ float* numbers(int warp) const {
    constexpr int kProbabilityBytes = sizeof(Element) * Config::kBlockM * Config::kBlockN;
    return reinterpret_cast<float*>(smem + kProbabilityBytes) + warp * Config::kBlockM;
  }
};

}  // namespace sm80
}  // namespace flash
