// Keys and queries of a sequence that take part at all. The others may hold anything, NaN included, and 0 * NaN is NaN:
// their rows are loaded as zeros.
#pragma once

#include "core/visibility.h"

namespace flash {

// The first key that some query of the sequence sees. Ends of rows never move back, so query 0 has the first one, and
// every later key up to the last visible one is seen by some query.
template <class Mask = Visibility>
FLASH_HOST_DEVICE constexpr int first_unmasked_key(const Mask& mask) {
  return mask.key_begin(0);
}

// The first query that sees any key, as all later ones do; seqlen_q if none does.
template <class Mask = Visibility>
FLASH_HOST_DEVICE constexpr int first_unmasked_row(const Mask& mask) {
  return mask.seqlen_k == 0 ? mask.seqlen_q : mask.row_begin(0);
}

}  // namespace flash
