// Which tiles of scores add to which tile of a bias's gradient. tests/cpp/test_score_bias.cpp checks this file by brute
// force.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash {

FLASH_HOST_DEVICE constexpr int64_t floor_divide(int64_t a, int64_t b) { return (a >= 0 ? a : a - b + 1) / b; }

// Each thread block owns a tile of the result, or with several chunks a part of its sums, and adds tiles of dS in a
// fixed order.
//
// attn_bias: a tile of the result is a tile of scores, of batch entries, heads, rows or columns together where the
// bias has one. rel_bias: tiles of keys begin at multiples of kBlockN from the diagonal, so that an element of a tile
// has the same distance in all of them; an offset near the diagonal has a tile of its own, all others on either side
// add up to one number.
struct BiasTiles {
  static constexpr int kBlockM = 128, kBlockN = 64;
  static constexpr int kDistances = kBlockM + kBlockN - 1;  // of a tile's elements
  static constexpr int kBins = 192;                         // floats of a chunk's sums by distance
  static_assert(kBins >= kDistances);

  bool of_table = false;
  int64_t batches = 1, heads = 1;          // of the result
  int64_t all_batches = 1, all_heads = 1;  // of the scores; packed sequences are one batch
  int64_t rows = 1, cols = 1;              // of the result
  bool sums_rows = false, sums_cols = false;
  int64_t m_blocks = 1, n_blocks = 1;      // of the scores
  int64_t near_begin = 0, near_count = 0;  // of_table: offsets from the diagonal that have tiles
  int reach = 0;
  int64_t chunks = 1;

  // ---- tiles of the result, and the scores that each adds ----

  struct Owner {
    int64_t batch, head, m_block, n_block;  // of_table: n_block is the offset's number, then those beyond on both sides
  };

  FLASH_HOST_DEVICE constexpr int64_t classes() const { return near_count + 2; }
  FLASH_HOST_DEVICE constexpr int64_t own_m_blocks() const { return of_table || sums_rows ? 1 : m_blocks; }
  FLASH_HOST_DEVICE constexpr int64_t own_n_blocks() const { return of_table ? classes() : sums_cols ? 1 : n_blocks; }
  FLASH_HOST_DEVICE constexpr int64_t owners() const { return batches * heads * own_m_blocks() * own_n_blocks(); }
  FLASH_HOST_DEVICE constexpr Owner owner(int64_t index) const {
    const int64_t n = index % own_n_blocks(), above = index / own_n_blocks();
    const int64_t m = above % own_m_blocks(), matrix = above / own_m_blocks();
    return {matrix / heads, matrix % heads, m, n};
  }

  // What an owner visits: items in this order, each a tile of scores, of_table a row of tiles.
  FLASH_HOST_DEVICE constexpr int64_t items() const {
    const int64_t m = of_table || sums_rows ? m_blocks : 1, n = !of_table && sums_cols ? n_blocks : 1;
    return (all_batches / batches) * (all_heads / heads) * m * n;
  }
  FLASH_HOST_DEVICE constexpr Owner item(const Owner& owner, int64_t index) const {
    Owner at = owner;
    if (!of_table && sums_cols) {
      at.n_block = index % n_blocks;
      index /= n_blocks;
    }
    if (of_table || sums_rows) {
      at.m_block = index % m_blocks;
      index /= m_blocks;
    }
    const int64_t own_heads = all_heads / heads;
    if (heads != all_heads) at.head = index % own_heads;
    index /= own_heads;
    if (batches != all_batches) at.batch = index;
    return at;
  }
  FLASH_HOST_DEVICE constexpr int64_t first_item(int64_t chunk) const { return chunk * items() / chunks; }

  // ---- of_table ----

  // Of rows from a diagonal position on, the tiles of keys of a class: from begin on as far as they begin before end.
  struct Keys {
    int begin, end;
  };

  FLASH_HOST_DEVICE constexpr Keys keys_of_class(int64_t index, int64_t diagonal, int seqlen_k) const {
    const int64_t first = diagonal + kBlockN * floor_divide(-diagonal, kBlockN);  // the tile that holds key 0
    const int64_t near = diagonal + kBlockN * near_begin, far = near + kBlockN * near_count;
    int64_t begin = near + kBlockN * index, end = begin + 1;
    if (index == near_count) begin = first, end = near;
    if (index > near_count) begin = far > first ? far : first, end = seqlen_k;
    if (end > seqlen_k) end = seqlen_k;
    if (begin + kBlockN <= 0 || begin >= end) return {0, 0};
    return {static_cast<int>(begin), static_cast<int>(end)};
  }

  // The offsets that are near: whose tiles hold a distance within reach, or two that are clamped to different ends.
  FLASH_HOST_DEVICE constexpr void set_near(int64_t seqlen_q, int64_t seqlen_k, bool has_origins) {
    int64_t begin = floor_divide(-int64_t{reach} - kBlockN + 1, kBlockN) + 1;
    int64_t end = -floor_divide(-(int64_t{reach} + kBlockM - 1), kBlockN);
    if (!has_origins) {  // no score is so far from the diagonal
      const int64_t least = floor_divide(-seqlen_k - kBlockN, kBlockN),
                    most = floor_divide(seqlen_q + kBlockM, kBlockN);
      begin = begin > least ? begin : least;
      end = end < most + 1 ? end : most + 1;
    }
    near_begin = begin;
    near_count = end > begin ? end - begin : 0;
  }

  // The distance of bin `bin` of a near offset.
  FLASH_HOST_DEVICE constexpr int64_t distance(int64_t index, int64_t bin) const {
    return kBlockN * (near_begin + index) + bin - (kBlockM - 1);
  }
  FLASH_HOST_DEVICE constexpr int64_t partial_index(int64_t head, int64_t chunk, int64_t index) const {
    return ((head * chunks + chunk) * classes() + index) * kBins;
  }

  FLASH_HOST_DEVICE constexpr int64_t results() const {
    return of_table ? heads * (2 * int64_t{reach} + 1) : batches * heads * rows * cols;
  }
  FLASH_HOST_DEVICE constexpr int64_t partial_floats() const {
    if (of_table) return heads * chunks * classes() * kBins;
    return chunks > 1 ? chunks * results() : 0;
  }
};

}  // namespace flash
