// Epilogue of the forward's softmax, for all kernel families: o_scale = 1 / row_sum, and the LSE.
#pragma once

#include <cute/tensor_impl.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/sequence.h"
#include "kernels/common/softmax.h"

namespace flash {

// o_scale: the factor of the output rows; `sink`: row_sink(). Call it before store_lse(), which needs the sums of whole
// rows.
template <int kRows, class Flag, int kSums>
__device__ __forceinline__ void finalize_rows(Softmax<kRows, Flag, kSums>& softmax, float (&o_scale)[kRows],
                                              const Flash_fwd_params& params, float sink) {
  softmax.finalize(o_scale, params.dropout.keep_scale, params.softmax_scale_log2, sink);
}

template <int kRows, class Accumulator>
__device__ __forceinline__ void normalize(Softmax<kRows>& softmax, Accumulator& acc_o, const Flash_fwd_params& params,
                                          float sink) {
  float o_scale[kRows];
  finalize_rows(softmax, o_scale, params, sink);
  auto out = row_col_view(acc_o);
  softmax.rescale(out, o_scale);
}

// `row_begin`: row of the sequence that is row 0 of coords. `offset`: of a split in the LSE.
template <int kRows, class Flag, int kSums, class Coords>
__device__ __forceinline__ void store_lse(const Softmax<kRows, Flag, kSums>& softmax, const Flash_fwd_params& params,
                                          const WorkTile& tile, const Coords& coords, int row_begin, float sink,
                                          int64_t offset = 0) {
  if (threadIdx.x % 4 != 0) return;
  float* const lse = params.softmax_lse_ptr + offset + lse_offset(tile, params);
  const float scale_log2 = params.softmax_scale_log2;  // 1: scores are logits to base 2
  const float scale = scale_log2 == 1.0f ? Softmax<kRows, Flag, kSums>::kLn2 : params.scale_softmax;
  float values[kRows];  // computed without branches: nothing overlaps the end of a work tile
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) values[mi] = softmax.lse(mi, scale_log2, scale, sink);
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    const int row = row_begin + coords.row(mi);
    if (row < tile.row_end) lse[row] = values[mi];
  }
}

}  // namespace flash
