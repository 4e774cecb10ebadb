// Where the scores of a sequence begin in a larger matrix, of which the call computes a part (context parallelism):
// ALiBi and dropout count documents, heads, rows and columns from there. The window is relative to the part.
#pragma once

#include "params/flash.h"

namespace flash {

struct Origin {
  int document;
  int head;
  int row;
  int col;  // with dropout a multiple of kDropoutColumns (core/dropout_mask.h)
};

__device__ __forceinline__ Origin origin_of(const Flash_fwd_params& params, int batch) {
  if (params.origins_ptr == nullptr) return {batch, 0, 0, 0};
  const int64_t* const origin = params.origins_ptr + kOriginWords * batch;
  return {static_cast<int>(origin[0]), static_cast<int>(origin[1]), static_cast<int>(origin[2]),
          static_cast<int>(origin[3])};
}

// Position of `row` of a sequence on the axis of its keys, for ALiBi.
template <class Mask>
__device__ __forceinline__ int alibi_diagonal(const Flash_fwd_params& params, int batch, const Mask& mask, int row) {
  if (params.origins_ptr == nullptr) return mask.diagonal(row);
  const Origin origin = origin_of(params, batch);
  return row + origin.row - origin.col;
}

}  // namespace flash
