// Mask bits over packed rows: scores that they hide, and the values of keys that no row of a warp sees.
#pragma once

#include "kernels/decode/packed_rows.h"
#include "params/kvcache.h"

namespace flash {
namespace decode {

// Hides scores of a step whose first key is the mask's key `first`. Returns a bit for each key of the step that some
// row of the warp sees: after all other masks.
template <class Scores>
__device__ __forceinline__ uint32_t apply_mask_bits(Scores& scores, const Flash_kvcache_params& params,
                                                    const PackedCoords& coords, int batch, int head_tile, int first) {
  using namespace cute;
  uint32_t seen = 0;
#pragma unroll
  for (int mi = 0; mi < size<0>(scores); ++mi) {
    // Rows beyond the last one are computed as if they were it, and not stored.
    const PackedRow row = packed_row(params, head_tile, coords.packed(mi));
    const int head = min(row.head, params.h - 1), token = min(row.token, params.mask_bits.rows - 1);
    const uint32_t word = params.mask_bits.word(batch, head, token, first) >> coords.col(0);
#pragma unroll
    for (int ni = 0; ni < size<1>(scores); ++ni) {
      const uint32_t bit = 1u << (ni % 2 + ni / 2 * 8);
      if ((word & bit) == 0) scores(mi, ni) = -INFINITY;
      if (scores(mi, ni) != -INFINITY) seen |= bit;
    }
  }
  return __reduce_or_sync(0xffffffffu, seen << coords.col(0));
}

// Of a pair of 16-bit values of keys `key` and `key` + 1, the bits that remain: 0 * NaN is NaN.
__device__ __forceinline__ uint32_t seen_pair(uint32_t seen, int key) {
  return (seen >> key & 1 ? 0x0000ffffu : 0u) | (seen >> key & 2 ? 0xffff0000u : 0u);
}

}  // namespace decode
}  // namespace flash
