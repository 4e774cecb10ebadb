// Which of the last keys of a sequence each query sees, in bits: the tree of a draft. tests/cpp/test_mask_bits.cpp
// checks this file by brute force.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "core/mask_factors.h"

namespace flash {

struct MaskBits {
  const uint32_t* __restrict__ words = nullptr;  // (sequences or 1, heads, rows, row_words) of kMaskWordKeys keys each
  MaskMatrices matrices;
  int rows = 0;  // queries of a sequence
  int row_words = 0;
  int keys = 0;  // the last ones of a sequence; all earlier ones are seen

  FLASH_HOST_DEVICE bool given() const { return words != nullptr; }

  // Key 0 of the mask is this key of a sequence; negative if the sequence has fewer keys than the mask.
  FLASH_HOST_DEVICE int first_key(int seqlen_k) const { return seqlen_k - keys; }

  // What a row sees of the kMaskWordKeys keys from the mask's key `first` on. Earlier keys are seen, those beyond
  // row_words are not.
  FLASH_HOST_DEVICE uint32_t word(int batch, int head, int row, int first) const {
    if (first <= -kMaskWordKeys) return ~0u;
    const uint32_t* const of_row = words + (static_cast<int64_t>(matrices.index(batch, head)) * rows + row) * row_words;
    const int index = first < 0 ? -1 : first / kMaskWordKeys;
    const uint32_t low = index < 0 ? ~0u : index < row_words ? of_row[index] : 0u;
    const uint32_t high = index + 1 < row_words ? of_row[index + 1] : 0u;
    const int shift = first - index * kMaskWordKeys;
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << kMaskWordKeys | low) >> shift);
  }
};

}  // namespace flash
