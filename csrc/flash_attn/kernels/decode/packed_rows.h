// Tiles whose rows are the (query token, query head) pairs of a head tile, which is one K/V head or two neighbouring
// ones: row r is head r % tile_group of token r / tile_group.
#pragma once

#include "kernels/common/score_mod.h"
#include "params/kvcache.h"

namespace flash {
namespace decode {

struct PackedRow {
  int token;
  int head;  // query head
};

__device__ __forceinline__ PackedRow packed_row(const Flash_kvcache_params& params, int head_tile, int row) {
  const int token = params.tile_group.divide(row), heads = params.tile_query_heads;
  return {token, head_tile * heads + row - token * heads};
}

// Accumulator coordinates of a warp for masks and biases, whose rows are query tokens. Computed where they are used, so
// that they take no registers elsewhere.
struct PackedCoords {
  const FastDiv& group;
  int row0;    // packed row of the warp's accumulator row 0
  int token0;  // row() counts tokens from this one

  __device__ __forceinline__ int packed(int mi) const {
    return row0 + threadIdx.x % 32 / 4 + (mi % 2) * 8 + (mi / 2) * 16;
  }
  __device__ __forceinline__ int row(int mi) const { return group.divide(packed(mi)) - token0; }
  __device__ __forceinline__ int col(int ni) const { return threadIdx.x % 4 * 2 + ni % 2 + ni / 2 * 8; }
};

// ScoreMod of packed rows: slopes differ between the rows.
template <class Scores>
__device__ __forceinline__ void modify_packed_scores(Scores& scores, const Flash_kvcache_params& params,
                                                     const PackedCoords& coords, int batch, int head_tile,
                                                     int diagonal0, int col0) {
  using namespace cute;
  ScoreMod mod(params);
  mod.apply_cap(scores);
  if (params.alibi_slopes_ptr == nullptr) return;
#pragma unroll
  for (int mi = 0; mi < size<0>(scores); ++mi) {
    // Rows beyond the last one have no head; any slope will do.
    const PackedRow row = packed_row(params, head_tile, coords.packed(mi));
    mod.slope_log2 = ScoreMod::head_slope_log2(params, batch, min(row.head, params.h - 1));
    const int diagonal = diagonal0 + coords.row(mi);
#pragma unroll
    for (int ni = 0; ni < size<1>(scores); ++ni) scores(mi, ni) += mod.bias(diagonal, col0 + coords.col(ni));
  }
}

}  // namespace decode
}  // namespace flash
