// The first key visible to any query of a sequence, and the first query that sees a key. Rows before them may hold
// anything, NaN included, and 0 * NaN is NaN: they are loaded as zeros.
#pragma once

#include "core/visibility.h"

namespace flash {

// The first key that some query of the sequence sees. key_begin() never decreases from row to row, so it is the first
// key of query 0, and some query sees each later key up to the last visible one.
template <class Mask = Visibility>
FLASH_HOST_DEVICE constexpr int first_visible_key(const Mask& mask) {
  return mask.key_begin(0);
}

// The first query that sees a key, as all later ones do; seqlen_q if none does.
template <class Mask = Visibility>
FLASH_HOST_DEVICE constexpr int first_visible_row(const Mask& mask) {
  return mask.seqlen_k == 0 ? mask.seqlen_q : mask.row_begin(0);
}

}  // namespace flash
