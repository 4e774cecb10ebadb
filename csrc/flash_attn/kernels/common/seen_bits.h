// Which rows see some key, and which keys some row sees, under a mask as data: bits that its plan pass has made.
#pragma once

#include "core/block_range.h"
#include "params/flash.h"

namespace flash {

// The words of a sequence, whose strips of a packed batch are numbered by slots. first: its first row or key in the
// packed tensor. strips: of a mask matrix.
__device__ __forceinline__ const uint32_t* seen_words(const Flash_fwd_params& params, const uint32_t* words, int matrix,
                                                      int strips, int first, int segment) {
  const int slot = params.is_varlen() ? varlen_first_slot(first, segment, kMaskStrip) : 0;
  return words + (static_cast<int64_t>(matrix) * strips + slot) * (kMaskStrip / kMaskWordKeys);
}

__device__ __forceinline__ const uint32_t* seen_rows(const Flash_fwd_params& params, const MaskParams& mask, int batch,
                                                     int head, int q_begin, int segment) {
  return seen_words(params, mask.seen.rows, mask.matrices.index(batch, head), mask.seen.row_strips, q_begin, segment);
}

__device__ __forceinline__ const uint32_t* seen_keys(const Flash_fwd_params& params, const MaskParams& mask, int batch,
                                                     int head, int k_begin, int segment) {
  return seen_words(params, mask.seen.keys, mask.matrices.index(batch, head), mask.seen.key_strips, k_begin, segment);
}

__device__ __forceinline__ bool is_seen(const uint32_t* seen, int index) {
  return seen[index / kMaskWordKeys] >> (index % kMaskWordKeys) & 1u;
}

}  // namespace flash
