// What a part of a row block's rows does on the walk over its key blocks, some of which it does not see; tests/cpp
// checks it by brute force.
#pragma once

#include "core/block_range.h"

namespace flash {

// Steps of a row block's walk whose keys no row of a part of it, [row_begin, row_end), sees: `left` of them from
// `begin` on, which the rows before the part see, and the last `right`, which those after it see. Step 0 is never one
// of them. A part behind the last of the rows, whose row_end is no more than its row_begin, does as that last row.
struct SkippedBlocks {
  int begin = 1;  // of the edges
  int left = 0;
  int right = 0;
};

FLASH_HOST_DEVICE constexpr SkippedBlocks skipped_blocks(const Visibility& visibility, const KvBlockOrder& order,
                                                         int row_begin, int row_end, int block_n) {
  const int unmasked = order.unmasked(), count = order.count();
  SkippedBlocks skipped;
  skipped.begin = order.unmasked_steps_end();
  const int seen_end = (visibility.key_end(row_end - 1) + block_n - 1) / block_n;
  const int behind = order.range.end - seen_end;  // negative where the walk is a share that ends before them
  const int right = behind < 0 ? 0 : behind < count ? behind : count;
  skipped.right = right - (order.first >= count - right);
  if (visibility.window.left == kUnbounded) return skipped;
  const int first_row = row_begin < row_end ? row_begin : row_end - 1;
  const int before = visibility.key_begin(first_row) / block_n - order.range.begin;
  const int left = before < 0 ? 0 : before < count - right ? before : count - right;
  skipped.left = left - (order.first >= unmasked && order.first < unmasked + left);
  return skipped;
}

// What who computes the part needs to know of the walk.
struct WarpgroupTripCount {
  static constexpr int kNoBlock = -1;

  SkippedBlocks skipped;
  int count = 0;  // steps, but for what is hidden at the end
  ColBounds bounds;
  int first_to_mask = kNoBlock;  // the block of step 0, if it may need a mask
  int first_masked_block = 0;    // the block of the first step behind the interior that is not hidden, if there is one
};

FLASH_HOST_DEVICE constexpr WarpgroupTripCount warpgroup_trip_count(const Visibility& visibility,
                                                                    const KvBlockOrder& order, int row_begin,
                                                                    int row_end, int block_n) {
  WarpgroupTripCount steps;
  steps.skipped = skipped_blocks(visibility, order, row_begin, row_end, block_n);
  steps.count = order.count() - steps.skipped.right;
  steps.bounds = col_bounds(visibility, row_begin);
  const int first = order.block(0), key = first * block_n;
  const bool masks = masks_right(steps.bounds, visibility.seqlen_k, key + block_n) ||
                     masks_left(steps.bounds, row_end - row_begin, key);
  if (masks) steps.first_to_mask = first;
  const int masked_blocks = steps.skipped.begin < steps.count ? steps.skipped.begin : steps.count;
  steps.first_masked_block = order.block(masked_blocks + steps.skipped.left);
  return steps;
}

}  // namespace flash
