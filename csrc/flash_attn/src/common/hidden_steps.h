// Which key blocks of a row block's walk a part of its rows does not see; tests/cpp checks it by brute force.
#pragma once

#include "common/block_range.h"

namespace flash {

// Steps of a row block's walk whose keys no row of a part of it, [row_begin, row_end), sees: `left` of them from
// `begin` on, which the rows before the part see, and the last `right`, which those after it see. Step 0 is never one
// of them.
struct HiddenSteps {
  int begin = 1;
  int left = 0;
  int right = 0;
};

FLASH_HOST_DEVICE constexpr HiddenSteps hidden_steps(const Visibility& visibility, const KeyWalk& walk, int row_begin,
                                                     int row_end, int block_n) {
  const int interior = walk.interior(), count = walk.count();
  HiddenSteps hidden;
  hidden.begin = interior > 1 ? interior : 1;
  const int seen_end = (visibility.key_end(row_end - 1) + block_n - 1) / block_n;
  hidden.right = walk.range.end - seen_end < count - 1 ? walk.range.end - seen_end : count - 1;
  if (visibility.window.left == kUnbounded) return hidden;
  const int first_block = walk.range.begin + (interior == 0);  // at step `begin`, unless all blocks are interior
  const int left = visibility.key_begin(row_begin) / block_n - first_block;
  const int rest = count - hidden.right - hidden.begin;
  hidden.left = left < 0 || rest < 0 ? 0 : left < rest ? left : rest;
  return hidden;
}

}  // namespace flash
