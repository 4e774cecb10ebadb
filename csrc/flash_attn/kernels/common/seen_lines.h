// Masks as data on the scores of a warp, a bit for each: its lanes share the work.
#pragma once

#include "core/mask_factors.h"
#include "core/visibility.h"
#include "kernels/common/transpose_bits.h"

namespace flash {

// What a warp sees of its scores. A line is a row of scores, or a key of S^T; a warp has 16. Lane l makes words l / 16,
// l / 16 + 2, ... of line l % 16, and gets those of the two lines of its scores from other lanes.
template <int kWords>
struct SeenLines {
  static_assert(kWords % 2 == 0 && kWords <= 4, "two or four words of a line");
  uint32_t words[kWords / 2];

  // The bits of this thread's scores in one of its two lines: pairs, 8 apart, from 2 (lane % 4) on.
  __device__ __forceinline__ uint32_t of_thread(int line) const {
    const int lane = threadIdx.x % 32;
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const uint32_t word =
          __shfl_sync(0xffffffffu, words[j / 2], lane / 4 + 8 * line + 16 * (j % 2)) >> 2 * (lane % 4);
      bits |= ((word & 0x3u) | (word >> 6 & 0xcu) | (word >> 12 & 0x30u) | (word >> 18 & 0xc0u)) << (8 * j);
    }
    return bits;
  }
};

// What a row sees by the factors of rows and the window. key: a multiple of kMaskWordKeys.
__device__ __forceinline__ uint32_t word_of_row(const MaskFactors& factors, const Visibility& window, int row,
                                                int key) {
  const int valid_row = min(row, window.seqlen_q - 1);
  return MaskFactors::interval_word(window.key_begin(valid_row), window.key_end(valid_row), key) &
         factors.row_word(valid_row, key);
}

// Lines are 16 rows from `row` on. key: a multiple of kMaskWordKeys. By all lanes of a warp.
template <int kKeys>
__device__ __forceinline__ SeenLines<kKeys / kMaskWordKeys> seen_by_rows(const MaskFactors& factors,
                                                                         const Visibility& window, int row, int key) {
  const int lane = threadIdx.x % 32;
  SeenLines<kKeys / kMaskWordKeys> seen;
#pragma unroll
  for (int i = 0; i < kKeys / 64; ++i) {
    const int first = key + 64 * i;
    seen.words[i] = word_of_row(factors, window, row + lane % 16, first + kMaskWordKeys * (lane / 16));
    if (factors.key_hidden == nullptr) continue;
    uint32_t hidden = 0;  // 16 rows of a key of each half
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int hidden_key = min(first + kMaskWordKeys * half + lane, window.seqlen_k - 1);
      hidden |= (MaskFactors::word_of(factors.hidden_rows_of(hidden_key), row) & 0xffffu) << 16 * half;
    }
    seen.words[i] &= ~transpose_bits(hidden);
  }
  return seen;
}

// word_of_row() of a lane's two rows of a strip, which begins with `row` and is in one block of the map. Both are read
// before either is looked at.
__device__ __forceinline__ void words_of_strip(const MaskFactors& factors, const Visibility& window, int row, int key,
                                               uint32_t (&words)[2]) {
  const int last = window.seqlen_q - 1, lane = threadIdx.x % 32;
  const int rows[2] = {min(row + lane, last), min(row + 32 + lane, last)};
  Intervals keys[2];
  if (factors.query_ranges != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) keys[half] = factors.keys_of(rows[half]);
  }
  const MappedBlock block = factors.block_map == nullptr ? MappedBlock::kPartial : factors.mapped(row, key);
  uint32_t bits[2] = {~0u, ~0u};
  if (factors.bits != nullptr && block == MappedBlock::kPartial) {
#pragma unroll
    for (int half = 0; half < 2; ++half) bits[half] = factors.bits_word(rows[half], key);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    words[half] =
        MaskFactors::interval_word(window.key_begin(rows[half]), window.key_end(rows[half]), key) & bits[half];
    if (factors.query_ranges != nullptr) words[half] &= MaskFactors::word_of(keys[half], key);
    if (block == MappedBlock::kHidden) words[half] = 0u;
  }
}

// Lines are 16 keys of S^T from `key` on, a multiple of 16; 64 rows from `row` on.
__device__ __forceinline__ SeenLines<2> seen_by_keys(const MaskFactors& factors, const Visibility& window, int row,
                                                     int key) {
  const int lane = threadIdx.x % 32;
  uint32_t words[2], by_rows = 0;  // 16 keys of a row of each half
  words_of_strip(factors, window, row, key / kMaskWordKeys * kMaskWordKeys, words);
#pragma unroll
  for (int half = 0; half < 2; ++half) by_rows |= (words[half] >> key % kMaskWordKeys & 0xffffu) << 16 * half;
  SeenLines<2> seen{{transpose_bits(by_rows)}};
  if (factors.key_hidden != nullptr) {
    const Intervals hidden = factors.hidden_rows_of(min(key + lane % 16, window.seqlen_k - 1));
    seen.words[0] &= ~MaskFactors::word_of(hidden, row + 32 * (lane / 16));
  }
  return seen;
}

}  // namespace flash
