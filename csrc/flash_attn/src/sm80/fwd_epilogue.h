// Normalises the output, stores it through shared memory in whole 16-byte chunks, and writes the LSE.
#pragma once

#include <cute/tensor.hpp>

#include "sm80/fwd_mainloop.h"

namespace flash {

template <class Config>
__device__ __forceinline__ void store_lse(const FwdMainloop<Config>& mainloop) {
  const RowBlock& block = mainloop.block;
  if (threadIdx.x % 4 != 0) return;
  float* const lse = mainloop.params.softmax_lse_ptr + lse_offset(block, mainloop.params);
#pragma unroll
  for (int mi = 0; mi < FwdMainloop<Config>::kRows; ++mi) {
    const int row = block.row_begin + mainloop.coords.row(mi);
    if (row < block.row_end) lse[row] = mainloop.softmax.lse(mi, mainloop.score_mod.softmax_scale());
  }
}

// Each warp stages and stores the rows that it owns, in the place of the rows of Q that only it has read.
template <class Config>
__device__ __forceinline__ void store_o(FwdMainloop<Config>& mainloop) {
  using namespace cute;
  using Element = typename Config::Element;
  const Flash_fwd_params& params = mainloop.params;
  const RowBlock& block = mainloop.block;

  auto out = row_col_view(mainloop.acc_o);
#pragma unroll
  for (int mi = 0; mi < size<0>(out); ++mi) {
    const float factor = mainloop.softmax.finish(mi, params.dropout.keep_scale);
#pragma unroll
    for (int ni = 0; ni < size<1>(out); ++ni) out(mi, ni) *= factor;
  }

  auto staged = mainloop.smem_q();
  {
    const auto store =
        make_tiled_copy_C(typename Config::StagedStore{}, typename Config::TiledMma{}).get_thread_slice(threadIdx.x);
    auto values = convert<Element>(mainloop.acc_o);
    copy(typename Config::StagedStore{}, store.retile_S(values), store.partition_D(staged));
  }
  __syncwarp();

  constexpr int kChunk = Config::RowCopyT::kChunk;
  constexpr int kLanesPerRow = Config::RowCopyT::kThreadsPerRow;
  constexpr int kRowsPerPass = 32 / kLanesPerRow;
  const int lane = threadIdx.x % 32;
  const int col = (lane % kLanesPerRow) * kChunk;
  Element* const base =
      static_cast<Element*>(params.o_ptr) + q_offset(block, params.o_strides) + block.row_begin * params.o_strides.row;
#pragma unroll
  for (int band = threadIdx.x / 32 * 16; band < Config::kBlockM; band += 16 * Config::kWarps) {
#pragma unroll
    for (int pass = 0; pass < 16; pass += kRowsPerPass) {
      const int row = band + pass + lane / kLanesPerRow;
#pragma unroll
      for (int j = col; j < Config::kHeadDim; j += Config::kAtomCols) {
        if (block.row_begin + row < block.row_end && j < params.d) {
          *reinterpret_cast<uint4*>(base + row * params.o_strides.row + j) =
              *reinterpret_cast<const uint4*>(&staged(row, j));
        }
      }
    }
  }
}

}  // namespace flash
