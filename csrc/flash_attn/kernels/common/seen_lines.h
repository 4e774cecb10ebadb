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

// The keys of a word that a row sees by the window. The bounds of row 0 are uniform, so that a lane only adds its row.
__device__ __forceinline__ uint32_t window_word(const Visibility& window, int row, int key) {
  const ColBounds bounds = window.bounds(0);
  return MaskFactors::interval_word(bounds.key_begin(row), min(bounds.key_end(row), window.seqlen_k), key);
}

// What a row sees by the factors of rows and the window. key: a multiple of kMaskWordKeys.
__device__ __forceinline__ uint32_t word_of_row(const MaskFactors& factors, const Visibility& window, int row,
                                                int key) {
  const int valid_row = min(row, window.seqlen_q - 1);
  return window_word(window, valid_row, key) & factors.row_word(valid_row, key);
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

// What a lane's two rows of a strip see by `bits` and the map; the strip begins with `row` and is in one block of the
// map. Both are read before either is looked at.
__device__ __forceinline__ void read_words_of_strip(const MaskFactors& factors, const int (&rows)[2], int row, int key,
                                                    uint32_t (&words)[2]) {
  const MappedBlock block = factors.block_map == nullptr ? MappedBlock::kPartial : factors.mapped(row, key);
  words[0] = words[1] = ~0u;
  if (factors.bits != nullptr && block == MappedBlock::kPartial) {
#pragma unroll
    for (int half = 0; half < 2; ++half) words[half] = factors.bits_word(rows[half], key);
  }
  if (block == MappedBlock::kHidden) words[0] = words[1] = 0u;
}

// word_of_row() of a lane's two rows of a strip.
__device__ __forceinline__ void words_of_strip(const MaskFactors& factors, const Visibility& window, int row, int key,
                                               uint32_t (&words)[2]) {
  const int last = window.seqlen_q - 1, lane = threadIdx.x % 32;
  const int rows[2] = {min(row + lane, last), min(row + 32 + lane, last)};
  Intervals keys[2];
  if (factors.query_ranges != nullptr) {
#pragma unroll
    for (int half = 0; half < 2; ++half) keys[half] = factors.keys_of(rows[half]);
  }
  read_words_of_strip(factors, rows, row, key, words);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    words[half] &= window_word(window, rows[half], key);
    if (factors.query_ranges != nullptr) words[half] &= MaskFactors::word_of(keys[half], key);
  }
}

// Lines of 16 keys of S^T from `key` on, a multiple of 16, and 64 rows from `row` on. words: of a lane's two rows, from
// the word of `key` on; without key_hidden.
__device__ __forceinline__ SeenLines<2> lines_of_keys(const MaskFactors& factors, const uint32_t (&words)[2],
                                                      int seqlen_k, int row, int key) {
  const int lane = threadIdx.x % 32;
  uint32_t by_rows = 0;  // 16 keys of a row of each half
#pragma unroll
  for (int half = 0; half < 2; ++half) by_rows |= (words[half] >> key % kMaskWordKeys & 0xffffu) << 16 * half;
  SeenLines<2> seen{{transpose_bits(by_rows)}};
  if (factors.key_hidden != nullptr) {
    const Intervals hidden = factors.hidden_rows_of(min(key + lane % 16, seqlen_k - 1));
    seen.words[0] &= ~MaskFactors::word_of(hidden, row + 32 * (lane / 16));
  }
  return seen;
}

__device__ __forceinline__ SeenLines<2> seen_by_keys(const MaskFactors& factors, const Visibility& window, int row,
                                                     int key) {
  uint32_t words[2];
  words_of_strip(factors, window, row, key / kMaskWordKeys * kMaskWordKeys, words);
  return lines_of_keys(factors, words, window.seqlen_k, row, key);
}

// The same of a tile of keys from `first_key` on, where `tile_keys` has what rows see by ranges and window.
__device__ __forceinline__ SeenLines<2> seen_by_keys(const MaskFactors& factors, const TileIntervals* tile_keys,
                                                     const Visibility& window, int row, int key, int first_key) {
  const int lane = threadIdx.x % 32, first = key / kMaskWordKeys * kMaskWordKeys;
  uint32_t words[2] = {~0u, ~0u};
  if (factors.bits != nullptr || factors.block_map != nullptr) {
    const int last = window.seqlen_q - 1;
    const int rows[2] = {min(row + lane, last), min(row + 32 + lane, last)};
    read_words_of_strip(factors, rows, row, first, words);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) words[half] &= tile_keys[32 * half + lane].word(first - first_key);
  return lines_of_keys(factors, words, window.seqlen_k, row, key);
}

}  // namespace flash
