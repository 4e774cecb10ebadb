// Keys and queries of a sequence that take part at all. The others may hold anything, NaN included, and 0 * NaN is NaN:
// their rows are loaded as zeros.
#pragma once

#include "core/block_range.h"

namespace flash {

// The first key that some query of the sequence sees: masks are aligned at the bottom right, so query 0 sees it, and
// every later key up to the last visible one is seen by some query.
FLASH_HOST_DEVICE constexpr int first_unmasked_key(const Visibility& visibility) { return visibility.key_begin(0); }

// The first query that sees any key, as all later ones do; seqlen_q if none does.
FLASH_HOST_DEVICE constexpr int first_unmasked_row(const Visibility& visibility) {
  if (visibility.seqlen_k == 0) return visibility.seqlen_q;
  if (visibility.window.right == kUnbounded) return 0;
  const int64_t row = int64_t{visibility.seqlen_q} - visibility.seqlen_k - visibility.window.right;
  return row < 0 ? 0 : row < visibility.seqlen_q ? static_cast<int>(row) : visibility.seqlen_q;
}

}  // namespace flash
