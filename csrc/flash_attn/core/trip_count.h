// Trip counts: the part of a work tile's KV block order that one warpgroup computes, which has only some of its rows.
// tests/cpp checks it by brute force.
#pragma once

#include "core/block_range.h"

namespace flash {

// Steps of a work tile whose blocks are fully masked for rows [row_begin, row_end) of one warpgroup: `left` steps from
// `begin` on (blocks that only earlier rows see) and the last `right` steps (blocks that only later rows see). Step 0
// is never skipped. A warpgroup after the last row (row_end <= row_begin) acts like the last row.
struct SkippedBlocks {
  int begin = 1;  // first step of masked blocks
  int left = 0;
  int right = 0;
};

template <class Mask>
FLASH_HOST_DEVICE constexpr SkippedBlocks skipped_blocks(const Mask& mask, const KvBlockOrder& order, int row_begin,
                                                         int row_end, int block_n) {
  const int unmasked = order.unmasked(), count = order.count();
  SkippedBlocks skipped;
  skipped.begin = order.unmasked_steps_end();
  const int visible_end = (mask.key_end(row_end - 1) + block_n - 1) / block_n;
  const int after = order.range.end - visible_end;  // negative where a split ends before these blocks
  const int right = after < 0 ? 0 : after < count ? after : count;
  skipped.right = right - (order.first >= count - right);
  if (!mask.may_mask_left()) return skipped;
  const int first_row = row_begin < row_end ? row_begin : row_end - 1;
  const int before = mask.key_begin(first_row) / block_n - order.range.begin;
  const int left = before < 0 ? 0 : before < count - right ? before : count - right;
  skipped.left = left - (order.first >= unmasked && order.first < unmasked + left);
  return skipped;
}

// A consumer warpgroup's view of the order.
template <class Bounds>
struct WarpgroupTripCount {
  static constexpr int kNoBlock = -1;

  SkippedBlocks skipped;
  int count = 0;  // steps without the ones skipped at the end
  Bounds bounds;
  int first_to_mask = kNoBlock;  // n_block of step 0 if it may need a mask
  int first_masked_block = 0;    // n_block of the first masked step that is not skipped, if any
};

template <class Mask>
FLASH_HOST_DEVICE constexpr WarpgroupTripCount<typename Mask::Bounds> warpgroup_trip_count(const Mask& mask,
                                                                                           const KvBlockOrder& order,
                                                                                           int row_begin, int row_end,
                                                                                           int block_n) {
  WarpgroupTripCount<typename Mask::Bounds> steps;
  steps.skipped = skipped_blocks(mask, order, row_begin, row_end, block_n);
  steps.count = order.count() - steps.skipped.right;
  steps.bounds = mask.bounds(row_begin);
  const int first = order.block(0), key = first * block_n;
  const bool masks =
      masks_right(steps.bounds, mask.seqlen_k, key + block_n) || masks_left(steps.bounds, row_end - row_begin, key);
  if (masks) steps.first_to_mask = first;
  const int masked_blocks = steps.skipped.begin < steps.count ? steps.skipped.begin : steps.count;
  steps.first_masked_block = order.block(masked_blocks + steps.skipped.left);
  return steps;
}

// The same for descending order, from order.range.end - 1 to order.range.begin: skipped blocks come first and last. A
// warpgroup without rows, or whose rows see no key, skips all blocks.
template <class Bounds>
struct DescendingTripCount {
  int skipped_first = 0;
  int count = 0;  // blocks that are computed, from first_block downwards
  int skipped_last = 0;
  int first_block = 0;
  int unmasked_begin = 0;  // n_blocks that every row of the warpgroup sees wholly
  int unmasked_end = 0;
  Bounds bounds;
};

template <class Mask>
FLASH_HOST_DEVICE constexpr DescendingTripCount<typename Mask::Bounds> descending_trip_count(const Mask& mask,
                                                                                             const KvBlockOrder& order,
                                                                                             int row_begin, int row_end,
                                                                                             int block_n) {
  DescendingTripCount<typename Mask::Bounds> steps;
  BlockRange own;
  if (row_begin < row_end) own = block_range(mask, row_begin, row_end, block_n);
  steps.bounds = mask.bounds(row_begin);
  steps.count = own.count();
  steps.skipped_first = order.range.end - (own.count() > 0 ? own.end : order.range.begin);
  if (own.count() == 0) return steps;
  steps.skipped_last = own.begin - order.range.begin;
  steps.first_block = own.end - 1;
  steps.unmasked_begin = own.unmasked_begin;
  steps.unmasked_end = own.unmasked_end;
  return steps;
}

}  // namespace flash
