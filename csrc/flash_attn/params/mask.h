// Parameters of the pass that plans masks as data.
#pragma once

#include <cuda_runtime_api.h>

#include "params/flash.h"

namespace flash {

// Of the pass that makes the lists of one direction: for tiles of `tile` rows the blocks of `block` keys that they
// visit, or with of_keys for tiles of keys the blocks of rows. Both are multiples of kMaskStrip.
struct MaskPlanParams {
  Flash_fwd_params call;
  MaskParams mask;
  int matrices = 1;  // mask.matrices.count()
  bool of_keys = false;
  int tile = 0, block = 0;
  // Workspace: bounds of query_ranges and of key_hidden, of the strips of SeenBits (kernels/common/seen_bits.h).
  IntervalBounds* __restrict__ row_bounds = nullptr;
  IntervalBounds* __restrict__ key_bounds = nullptr;
};

// Fills lists and seen bits. Two launches; nothing is read back.
cudaError_t run_mask_plan(const MaskPlanParams& params, cudaStream_t stream);

}  // namespace flash
