// The conversion of dQ: fp32 tiles in accumulator order to rows of Elements.
#pragma once

#include "kernels/common/row_store.h"
#include "kernels/common/sequence.h"

namespace flash {

// One m_block per thread block. stage(tile) converts its fp32 tile into `staged`, a tile in shared memory.
template <class Config, class Smem, class Stage>
__device__ __forceinline__ void convert_dq(const Flash_bwd_params& params, const Smem& staged, const Stage& stage) {
  using Element = typename Config::Element;
  const WorkTile tile = work_tile_at(params, Config::kBlockM, reversed_block());
  if (tile.empty()) return;
  const int64_t index = first_dq_tile(params, tile.batch, tile.head, tile.q_begin, tile.segment, Config::kBlockM) +
                        tile.row_begin / Config::kBlockM;
  stage(params.dq_accum_ptr + index * Config::kDqTile);
  __syncthreads();
  Element* const rows =
      static_cast<Element*>(params.dq_ptr) +
      matrix_offset(params.dq_strides, params.is_varlen(), tile.batch, tile.q_begin + tile.row_begin, tile.head);
  store_rows<typename Config::RowCopyT>(staged, rows, params.dq_strides.row, tile.row_end - tile.row_begin, params.d);
}

}  // namespace flash
