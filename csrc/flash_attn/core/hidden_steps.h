// What a part of a row block's rows does on the walk over its key blocks, some of which it does not see; tests/cpp
// checks it by brute force.
#pragma once

#include "core/block_range.h"

namespace flash {

// Steps of a row block's walk whose keys no row of a part of it, [row_begin, row_end), sees: `left` of them from
// `begin` on, which the rows before the part see, and the last `right`, which those after it see. Step 0 is never one
// of them. A part behind the last of the rows, whose row_end is no more than its row_begin, does as that last row.
struct HiddenSteps {
  int begin = 1;  // of the edges
  int left = 0;
  int right = 0;
};

FLASH_HOST_DEVICE constexpr HiddenSteps hidden_steps(const Visibility& visibility, const KeyWalk& walk, int row_begin,
                                                     int row_end, int block_n) {
  const int interior = walk.interior(), count = walk.count();
  HiddenSteps hidden;
  hidden.begin = walk.interior_steps_end();
  const int seen_end = (visibility.key_end(row_end - 1) + block_n - 1) / block_n;
  const int behind = walk.range.end - seen_end;  // negative where the walk is a share that ends before them
  const int right = behind < 0 ? 0 : behind < count ? behind : count;
  hidden.right = right - (walk.first >= count - right);
  if (visibility.window.left == kUnbounded) return hidden;
  const int first_row = row_begin < row_end ? row_begin : row_end - 1;
  const int before = visibility.key_begin(first_row) / block_n - walk.range.begin;
  const int left = before < 0 ? 0 : before < count - right ? before : count - right;
  hidden.left = left - (walk.first >= interior && walk.first < interior + left);
  return hidden;
}

// What who computes the part needs to know of the walk.
struct PartSteps {
  static constexpr int kNoBlock = -1;

  HiddenSteps hidden;
  int count = 0;  // steps, but for what is hidden at the end
  RowLimits limits;
  int masked_first = kNoBlock;  // the block of step 0, if it may need a mask
  int first_edge = 0;           // the block of the first step behind the interior that is not hidden, if there is one
};

FLASH_HOST_DEVICE constexpr PartSteps part_steps(const Visibility& visibility, const KeyWalk& walk, int row_begin,
                                                 int row_end, int block_n) {
  PartSteps steps;
  steps.hidden = hidden_steps(visibility, walk, row_begin, row_end, block_n);
  steps.count = walk.count() - steps.hidden.right;
  steps.limits = row_limits(visibility, row_begin);
  const int first = walk.block(0), key = first * block_n;
  const bool masks = hides_right(steps.limits, visibility.seqlen_k, key + block_n) ||
                     hides_left(steps.limits, row_end - row_begin, key);
  if (masks) steps.masked_first = first;
  const int edges = steps.hidden.begin < steps.count ? steps.hidden.begin : steps.count;
  steps.first_edge = walk.block(edges + steps.hidden.left);
  return steps;
}

}  // namespace flash
