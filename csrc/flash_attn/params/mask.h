// Parameters of the pass that plans masks as data.
#pragma once

#include <cuda_runtime_api.h>

#include "params/flash.h"

namespace flash {

// IntervalBounds of strips: halves of neighbours lie next to each other.
struct StripBounds {
  struct alignas(16) Stored {
    Intervals intervals;
  };

  Stored* __restrict__ outer = nullptr;
  Stored* __restrict__ inner = nullptr;

  FLASH_HOST_DEVICE IntervalBounds at(int64_t i) const { return {outer[i].intervals, inner[i].intervals}; }
  FLASH_HOST_DEVICE void set(int64_t i, const IntervalBounds& bounds) const {
    outer[i].intervals = bounds.outer;
    inner[i].intervals = bounds.inner;
  }
};

// Of the pass that makes the lists of one direction: for tiles of `tile` rows the blocks of `block` keys that they
// visit, or with of_keys for tiles of keys the blocks of rows. Both are multiples of kMaskStrip.
struct MaskPlanParams {
  Flash_fwd_params call;
  MaskParams mask;
  int matrices = 1;  // mask.matrices.count()
  bool of_keys = false;
  int tile = 0, block = 0;
  // Workspace: of each mask matrix bounds of query_ranges of the strips of rows, then of key_hidden of those of keys,
  // as in SeenBits (kernels/common/seen_bits.h); and of every kGroupStrips of them together.
  StripBounds bounds, group_bounds;
};

// Fills lists and seen bits. Two launches; nothing is read back.
cudaError_t run_mask_plan(const MaskPlanParams& params, cudaStream_t stream);

// Contiguous rows of bools, bytes of any values, as rows of whole words, the first one in the lowest bit.
struct PackBitsParams {
  const uint8_t* bools = nullptr;
  uint32_t* bits = nullptr;
  int64_t rows = 0, cols = 0;
  int device = 0;

  FLASH_HOST_DEVICE int64_t row_words() const { return (cols + kMaskWordKeys - 1) / kMaskWordKeys; }
  FLASH_HOST_DEVICE int64_t words() const { return rows * row_words(); }
};
cudaError_t run_pack_bits(const PackBitsParams& params, cudaStream_t stream);

}  // namespace flash
