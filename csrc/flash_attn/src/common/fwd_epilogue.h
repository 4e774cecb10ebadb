// The end of the forward's softmax, for all kernel families: output divided by the row sums, and the LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/accumulator.h"
#include "common/sequence.h"
#include "common/softmax.h"

namespace flash {

// Before store_lse(), which needs the sums of whole rows.
template <int kRows, class Accumulator>
__device__ __forceinline__ void normalize(Softmax<kRows>& softmax, Accumulator& acc_o, const Flash_fwd_params& params,
                                          const RowBlock& block) {
  using namespace cute;
  const float sink = row_sink(params, block);
  auto out = row_col_view(acc_o);
#pragma unroll
  for (int mi = 0; mi < size<0>(out); ++mi) {
    const float factor = softmax.finish(mi, params.dropout.keep_scale, params.softmax_scale_log2, sink);
#pragma unroll
    for (int ni = 0; ni < size<1>(out); ++ni) out(mi, ni) *= factor;
  }
}

// `row_begin`: what the rows of `coords` count from.
template <int kRows, class Coords>
__device__ __forceinline__ void store_lse(const Softmax<kRows>& softmax, const Flash_fwd_params& params,
                                          const RowBlock& block, const Coords& coords, int row_begin) {
  if (threadIdx.x % 4 != 0) return;
  const float sink = row_sink(params, block);
  float* const lse = params.softmax_lse_ptr + lse_offset(block, params);
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    const int row = row_begin + coords.row(mi);
    if (row < block.row_end) lse[row] = softmax.lse(mi, params.softmax_scale_log2, sink);
  }
}

}  // namespace flash
