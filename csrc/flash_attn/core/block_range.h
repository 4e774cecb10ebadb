// KV block ranges: which n_blocks a work tile visits, in which order, and which m_blocks visit an n_block.
// All row, column and offset arithmetic of masks lives here and in core/visibility.h; tests/cpp checks it by brute
// force.
#pragma once

#include <cstdint>

#include "core/fast_div.h"
#include "core/host_device.h"
#include "core/visibility.h"

namespace flash {

// The n_blocks of one work tile. Masked blocks (some row sees only part of the block) and unmasked ones (every row sees
// all of it) are separate ranges, so that the loop over unmasked blocks needs no mask. The online softmax allows any
// order of KV blocks.
struct BlockRange {
  int begin = 0;           // first visited block
  int end = 0;             // one past the last visited block; nothing is visited when end <= begin
  int unmasked_begin = 0;  // blocks [unmasked_begin, unmasked_end) are visible to every row
  int unmasked_end = 0;

  FLASH_HOST_DEVICE constexpr int count() const { return end - begin; }
  FLASH_HOST_DEVICE constexpr int masked_count() const { return count() - (unmasked_end - unmasked_begin); }

  // The block visited at `step` in [0, count()): masked right, masked left, then unmasked blocks, each downwards.
  FLASH_HOST_DEVICE constexpr int block_at(int step) const {
    const int masked_right_count = end - unmasked_end;
    if (step < masked_right_count) return end - 1 - step;
    const int masked_blocks = masked_count();
    if (step < masked_blocks) return unmasked_begin - 1 - (step - masked_right_count);
    return unmasked_end - 1 - (step - masked_blocks);
  }

  // The reverse order, upwards: unmasked, masked left, masked right. Thread blocks that start together then read the
  // same keys at the same time, which L2 delivers faster.
  FLASH_HOST_DEVICE constexpr int block_unmasked_first(int step) const {
    const int unmasked = unmasked_end - unmasked_begin;
    if (step < unmasked) return unmasked_begin + step;
    const int masked_index = step - unmasked;
    const int masked_left_count = unmasked_begin - begin;
    return masked_index < masked_left_count ? begin + masked_index : unmasked_end + masked_index - masked_left_count;
  }

  // The masked block that block_unmasked_first() visits after the masked block `block`.
  FLASH_HOST_DEVICE constexpr int next_masked(int block) const {
    return block + 1 == unmasked_begin ? unmasked_end : block + 1;
  }
};

// The most unmasked blocks that a window leaves any work tile; 1 if a side is unbounded. A function of the window
// alone: shorter sequences use the same order, and a packed batch has no single number of keys.
FLASH_HOST_DEVICE constexpr int max_unmasked_blocks(const Window& window, int block_m, int block_n) {
  if (!window.may_mask_left() || !window.may_mask_right()) return 1;
  const int64_t visible = window.max_keys(kMaxLength) + 1 - block_m;  // seen by both the first and the last row
  const int64_t blocks = visible / block_n;
  return blocks > 1 ? static_cast<int>(blocks) : 1;
}

// Split `split` of `splits` of a range of n_blocks. Splits are equally long, rounded up: the last ones may be empty.
FLASH_HOST_DEVICE constexpr BlockRange split_range(const BlockRange& range, int split, int splits) {
  const int length = (range.count() + splits - 1) / splits;
  const int64_t first = range.begin + static_cast<int64_t>(split) * length;
  BlockRange part;
  part.begin = first < range.end ? static_cast<int>(first) : range.end;
  part.end = range.end - part.begin < length ? range.end : part.begin + length;
  const auto clamp = [&part](int block) {
    return block < part.begin ? part.begin : block > part.end ? part.end : block;
  };
  part.unmasked_begin = clamp(range.unmasked_begin);
  part.unmasked_end = clamp(range.unmasked_end);
  return part;
}

// The forward's order of n_blocks: block_unmasked_first() with at most one of two changes: one block moved to the front
// (start_at()), or the unmasked blocks rotated (align_unmasked()). Only the loader needs the rotation: all unmasked
// blocks are computed the same way.
struct KvBlockOrder {
  BlockRange range;
  int first = 0;  // step in block_unmasked_first() of the block visited first
  int shift = 0;  // rotation of the unmasked blocks

  FLASH_HOST_DEVICE constexpr int count() const { return range.count(); }
  FLASH_HOST_DEVICE constexpr int unmasked() const { return range.unmasked_end - range.unmasked_begin; }
  FLASH_HOST_DEVICE constexpr int block(int step) const {
    return range.block_unmasked_first(step > first ? step : step == 0 ? first : step - 1);
  }

  // The block to load for a step, for an order without start_at().
  FLASH_HOST_DEVICE constexpr int block_to_load(int step) const {
    if (step >= unmasked()) return range.block_unmasked_first(step);
    const int block = range.unmasked_begin + shift + step;
    return block < range.unmasked_end ? block : block - unmasked();
  }

  // The steps [1, unmasked_steps_end()) visit unmasked blocks; step 0 is first_step()'s.
  FLASH_HOST_DEVICE constexpr int unmasked_steps_end() const { return unmasked() + (first >= unmasked()); }

  // Moves a visited block to the front.
  FLASH_HOST_DEVICE constexpr void start_at(int block) {
    first = block < range.unmasked_begin ? unmasked() + block - range.begin
            : block < range.unmasked_end ? block - range.unmasked_begin
                                         : block - range.begin;
  }

  // Rotates the unmasked blocks so that they begin at a multiple of max_unmasked_blocks() (`period`), if they contain
  // one. Under a window each work tile sees different keys. With a common start, tiles that begin together read the
  // same keys at the same time: each key is read from memory once, a few keys at a time.
  FLASH_HOST_DEVICE void align_unmasked(const FastDiv& period) {
    const int next = period.divide(range.unmasked_begin + period.divisor - 1) * period.divisor - range.unmasked_begin;
    shift = next < unmasked() ? next : 0;
  }
};

// For rows [row_begin, row_end) of the sequence, row_begin < row_end <= seqlen_q.
template <class Mask>
FLASH_HOST_DEVICE constexpr BlockRange block_range(const Mask& mask, int row_begin, int row_end, int block_n) {
  const int last_row = row_end - 1;
  BlockRange range;
  range.begin = mask.key_begin(row_begin) / block_n;
  range.end = (mask.key_end(last_row) + block_n - 1) / block_n;
  if (range.end <= range.begin) return BlockRange{};
  range.unmasked_begin = (mask.key_begin(last_row) + block_n - 1) / block_n;
  range.unmasked_end = mask.key_end(row_begin) / block_n;
  if (range.unmasked_end <= range.unmasked_begin) range.unmasked_begin = range.unmasked_end = range.begin;
  return range;
}

// The m_blocks that visit `n_block`: exactly those m with block_range(m).begin <= n_block < .end. The deterministic
// backward relies on both directions agreeing.
struct RowRange {
  int begin = 0;
  int end = 0;
};

template <class Mask>
FLASH_HOST_DEVICE constexpr RowRange row_range(const Mask& mask, int n_block, int block_m, int block_n) {
  const int64_t key_begin = static_cast<int64_t>(n_block) * block_n;
  if (key_begin >= mask.seqlen_k) return RowRange{};
  const int64_t key_end = key_begin + block_n < mask.seqlen_k ? key_begin + block_n : mask.seqlen_k;
  const int row_begin = mask.row_begin(static_cast<int>(key_begin)),
            row_end = mask.row_end(static_cast<int>(key_end - 1));
  if (row_end <= row_begin) return RowRange{};
  return {row_begin / block_m, (row_end + block_m - 1) / block_m};
}

// The m_blocks of which every row sees all keys [key_begin, key_end): their scores need no mask.
template <class Mask>
FLASH_HOST_DEVICE constexpr RowRange unmasked_rows(const Mask& mask, int key_begin, int key_end, int block_m) {
  if (key_end > mask.seqlen_k) return RowRange{};
  const int first = mask.row_begin(key_end - 1), last = mask.row_end(key_begin);
  return {(first + block_m - 1) / block_m, last == mask.seqlen_q ? (last + block_m - 1) / block_m : last / block_m};
}

FLASH_HOST_DEVICE constexpr int clamp_row(int64_t row, int seqlen_q) {
  return row < 0 ? 0 : row > seqlen_q ? seqlen_q : static_cast<int>(row);
}

// row_range() and unmasked_rows() of a window in closed form, with two thirds of the instructions: the compiler cannot
// see that both ends have the same shift and that the last row sees the last key. tests/cpp compares them with the
// templates above.
FLASH_HOST_DEVICE constexpr RowRange row_range(const Visibility& visibility, int n_block, int block_m, int block_n) {
  const int seqlen_q = visibility.seqlen_q;
  const int64_t key_begin = static_cast<int64_t>(n_block) * block_n;
  const int64_t shift = static_cast<int64_t>(visibility.seqlen_k) - seqlen_q;
  // First row whose key_end exceeds key_begin; first row whose key_begin is at or beyond the end of the block.
  const int64_t first = visibility.window.right == kUnbounded ? 0 : key_begin - shift - visibility.window.right;
  const int64_t last = key_begin + block_n - shift + visibility.window.left;
  const bool open_left = visibility.window.left == kUnbounded || key_begin + block_n > visibility.seqlen_k;
  const int row_begin = clamp_row(first, seqlen_q);
  const int row_end = open_left ? seqlen_q : clamp_row(last, seqlen_q);
  RowRange range;
  if (key_begin >= visibility.seqlen_k || row_end <= row_begin) return range;
  range.begin = row_begin / block_m;
  range.end = (row_end + block_m - 1) / block_m;
  return range;
}

FLASH_HOST_DEVICE constexpr RowRange unmasked_rows(const Visibility& visibility, int key_begin, int key_end,
                                                   int block_m) {
  const int seqlen_q = visibility.seqlen_q;
  const int64_t shift = static_cast<int64_t>(visibility.seqlen_k) - seqlen_q;
  const bool open_right = visibility.window.right == kUnbounded, open_left = visibility.window.left == kUnbounded;
  // First row that sees the last key; one past the last row that sees the first key.
  const int first = open_right ? 0 : clamp_row(key_end - 1 - shift - visibility.window.right, seqlen_q);
  const int last = open_left ? seqlen_q : clamp_row(key_begin - shift + visibility.window.left + 1, seqlen_q);
  if (key_end > visibility.seqlen_k) return RowRange{};
  return {(first + block_m - 1) / block_m, last == seqlen_q ? (last + block_m - 1) / block_m : last / block_m};
}

// Varlen: m_blocks are numbered by "slots", so that the grid depends only on sizes that the host knows. The packed rows
// form batch + 2 segments: rows before the first sequence, the sequences, rows after the last. Segment i owns slots
// [varlen_first_slot(i), varlen_first_slot(i + 1)), at least as many as it has m_blocks.
FLASH_HOST_DEVICE constexpr int varlen_first_slot(int first_row, int segment, int block_m) {
  return first_row / block_m + segment;
}

FLASH_HOST_DEVICE constexpr int varlen_slot_count(int total_rows, int batch, int block_m) {
  return total_rows / block_m + batch + 2;
}

}  // namespace flash
