// Keys outside the visible range of a row become -inf. Runs on masked blocks only.
#pragma once

#include <cute/tensor_impl.hpp>

#include "core/bwd_schedule.h"
#include "core/visibility.h"
#include "kernels/common/sequence.h"
#include "params/flash.h"

namespace flash {

// The mask type of a kernel of this configuration (core/visibility.h). Windows are run-time fields, so one type covers
// all.
template <class Config>
using MaskOf = Visibility;

// The mask of a work tile's sequence.
template <class Config, class Tile>
__device__ __forceinline__ MaskOf<Config> mask_of(const Flash_fwd_params& params, const Tile& tile) {
  return {tile.seqlen_q, tile.seqlen_k, params.window};
}

// The m_blocks and query heads that a work tile of the backward visits.
template <class Config>
__device__ __forceinline__ QBlockOrder q_block_order(const Flash_bwd_params& params, const BwdWorkTile& tile) {
  const MaskOf<Config> mask = mask_of<Config>(params, tile);
  const RowRange m_blocks = row_range(mask, tile.n_block, Config::kBlockM, Config::kBlockN);
  return {m_blocks, tile.head_k * params.h_h_k_ratio, params.h_h_k_ratio};
}

// Masks keys [col_begin, col_end) for `rows` rows with these column bounds. Left and right are tested separately
// because most masked blocks touch one side only. Columns are compared as distances from the thread's first column,
// which are compile-time constants.
template <class Scores, class Coords, class Bounds>
__device__ __forceinline__ void apply_bounds(Scores& scores, const Coords& coords, const Bounds& bounds, int rows,
                                             int seqlen_k, int col_begin, int col_end) {
  using namespace cute;
  const auto distance = [&](int ni) { return coords.col(ni) - coords.col(0); };
  if (masks_right(bounds, seqlen_k, col_end)) {
#pragma unroll
    for (int mi = 0; mi < size<0>(scores); ++mi) {
      const int limit = min(bounds.key_end(coords.row(mi)), seqlen_k) - col_begin - coords.col(0);
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        if (distance(ni) >= limit) scores(mi, ni) = -INFINITY;
      }
    }
  }
  if (masks_left(bounds, rows, col_begin)) {
#pragma unroll
    for (int mi = 0; mi < size<0>(scores); ++mi) {
      const int limit = bounds.key_begin(coords.row(mi)) - col_begin - coords.col(0);
#pragma unroll
      for (int ni = 0; ni < size<1>(scores); ++ni) {
        if (distance(ni) < limit) scores(mi, ni) = -INFINITY;
      }
    }
  }
}

// For rows [row_begin, row_end).
template <class Scores, class Coords, class Mask>
__device__ __forceinline__ void apply_mask(Scores& scores, const Coords& coords, const Mask& mask, int row_begin,
                                           int row_end, int col_begin, int col_end) {
  apply_bounds(scores, coords, mask.bounds(row_begin), row_end - row_begin, mask.seqlen_k, col_begin, col_end);
}

}  // namespace flash
