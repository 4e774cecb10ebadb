// Which keys and queries of a sequence take part at all. The others may hold anything, NaN included: a weight of 0
// times NaN is NaN, so their rows are loaded as zeros.
#pragma once

#include "core/block_range.h"

namespace flash {

// The first key that some query of the sequence sees: masks stand at the bottom right, so the first query sees it, and
// those behind it are seen up to the last one.
FLASH_HOST_DEVICE constexpr int first_unmasked_key(const Visibility& visibility) { return visibility.key_begin(0); }

// The first query that sees a key, as all behind it do; seqlen_q if none does.
FLASH_HOST_DEVICE constexpr int first_unmasked_row(const Visibility& visibility) {
  if (visibility.seqlen_k == 0) return visibility.seqlen_q;
  if (visibility.window.right == kUnbounded) return 0;
  const int64_t row = int64_t{visibility.seqlen_q} - visibility.seqlen_k - visibility.window.right;
  return row < 0 ? 0 : row < visibility.seqlen_q ? static_cast<int>(row) : visibility.seqlen_q;
}

}  // namespace flash
