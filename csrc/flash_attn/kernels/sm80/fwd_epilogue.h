// The epilogue of the mma.sync forward: normalises O and stores it through shared memory in 16-byte vectors.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/fwd_epilogue.h"
#include "kernels/common/row_store.h"
#include "kernels/sm80/fwd_mainloop.h"
#include "kernels/sm80/stage_accumulator.h"

namespace flash {
namespace sm80 {

// O is staged over Q without a barrier: each warp overwrites only rows that it alone has read, or that the last step's
// barrier follows.
template <class Config>
__device__ __forceinline__ void store_o(FwdMainloop<Config>& mainloop) {
  using namespace cute;
  using Element = typename Config::Element;
  const Flash_fwd_params& params = mainloop.params;
  const WorkTile& tile = mainloop.tile;
  normalize(mainloop.softmax, mainloop.acc_o, params, row_sink(params, tile));
  auto staged = mainloop.smem_q();
  stage_accumulator<Element>(typename Config::TiledMma{}, mainloop.acc_o, staged);
  __syncthreads();
  Element* const rows =
      static_cast<Element*>(params.o_ptr) + q_offset(tile, params.o_strides) + tile.row_begin * params.o_strides.row;
  store_rows<typename Config::RowCopyT>(staged, rows, params.o_strides.row, tile.row_end - tile.row_begin, params.d);
}

}  // namespace sm80
}  // namespace flash
