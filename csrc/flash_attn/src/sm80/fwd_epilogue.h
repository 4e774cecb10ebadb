// Normalises the output, stores it through shared memory in whole 16-byte chunks, and writes the LSE.
#pragma once

#include <cute/tensor.hpp>

#include "common/row_store.h"
#include "sm80/fwd_mainloop.h"

namespace flash {

template <class Config>
__device__ __forceinline__ void store_lse(const FwdMainloop<Config>& mainloop) {
  const RowBlock& block = mainloop.block;
  if (threadIdx.x % 4 != 0) return;
  const Flash_fwd_params& params = mainloop.params;
  const float sink = row_sink(params, block);
  float* const lse = params.softmax_lse_ptr + lse_offset(block, params);
#pragma unroll
  for (int mi = 0; mi < FwdMainloop<Config>::kRows; ++mi) {
    const int row = block.row_begin + mainloop.coords.row(mi);
    if (row < block.row_end) lse[row] = mainloop.softmax.lse(mi, params.softmax_scale_log2, sink);
  }
}

// The staged rows take the place of the rows of Q, which only their own warp has read.
template <class Config>
__device__ __forceinline__ void store_o(FwdMainloop<Config>& mainloop) {
  using namespace cute;
  using Element = typename Config::Element;
  const Flash_fwd_params& params = mainloop.params;
  const RowBlock& block = mainloop.block;

  const float sink = row_sink(params, block);
  auto out = row_col_view(mainloop.acc_o);
#pragma unroll
  for (int mi = 0; mi < size<0>(out); ++mi) {
    const float factor = mainloop.softmax.finish(mi, params.dropout.keep_scale, params.softmax_scale_log2, sink);
#pragma unroll
    for (int ni = 0; ni < size<1>(out); ++ni) out(mi, ni) *= factor;
  }
  auto staged = mainloop.smem_q();
  stage_accumulator<Element>(typename Config::TiledMma{}, mainloop.acc_o, staged);
  __syncthreads();
  Element* const rows =
      static_cast<Element*>(params.o_ptr) + q_offset(block, params.o_strides) + block.row_begin * params.o_strides.row;
  store_rows<typename Config::RowCopyT>(staged, rows, params.o_strides.row, block.row_end - block.row_begin, params.d);
}

}  // namespace flash
