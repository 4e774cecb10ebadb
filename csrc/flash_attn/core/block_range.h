// Which keys a query row sees, which key blocks a row block visits, and in which order.
// All row, column and offset arithmetic of masks lives here; tests/cpp checks it by brute force.
#pragma once

#include <cstdint>

#include "core/fast_div.h"
#include "core/host_device.h"

namespace flash {

// Rows and keys are counted in 32 bits, with room for sums of two lengths.
constexpr int kMaxLength = 0x3fffffff;

// The value of an open side of a window.
constexpr int kUnbounded = 0x7fffffff;

// Query i sees key j iff i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right.
// Full attention is {kUnbounded, kUnbounded}; causal attention is {kUnbounded, 0}.
struct Window {
  int left = kUnbounded;
  int right = kUnbounded;
};

// Sums are taken in 64 bits: row, shift and window together may pass 2^31.
struct Visibility {
  int seqlen_q = 0;
  int seqlen_k = 0;
  Window window;

  // Position of query `row` on the key axis (bottom right alignment); negative when seqlen_q > seqlen_k.
  FLASH_HOST_DEVICE constexpr int diagonal(int row) const { return row + seqlen_k - seqlen_q; }

  // The visible keys of `row` are [key_begin, key_end); none when key_end <= key_begin.
  FLASH_HOST_DEVICE constexpr int key_begin(int row) const {
    const int64_t begin = static_cast<int64_t>(diagonal(row)) - window.left;
    return window.left == kUnbounded || begin < 0 ? 0 : begin > seqlen_k ? seqlen_k : static_cast<int>(begin);
  }

  FLASH_HOST_DEVICE constexpr int key_end(int row) const {
    const int64_t end = static_cast<int64_t>(diagonal(row)) + window.right + 1;
    return window.right == kUnbounded || end > seqlen_k ? seqlen_k : end < 0 ? 0 : static_cast<int>(end);
  }
};

// The limits of rows that follow each other, in 32 bits: row i of them, counted from the first one, sees the keys of
// its sequence in [begin + i, end + i). For up to 2^30 rows.
struct ColBounds {
  static constexpr int kFar = 0x3fffffff;  // of sides that are open: beyond all keys

  int begin = -kFar;
  int end = kFar;
};

FLASH_HOST_DEVICE constexpr ColBounds col_bounds(const Visibility& visibility, int first_row) {
  constexpr int64_t kFar = ColBounds::kFar;
  const auto near = [](int64_t key) { return static_cast<int>(key < -kFar ? -kFar : key > kFar ? kFar : key); };
  const Window& window = visibility.window;
  const int64_t diagonal = visibility.diagonal(first_row);
  return {near(window.left == kUnbounded ? -kFar : diagonal - window.left),
          near(window.right == kUnbounded ? kFar : diagonal + window.right + 1)};
}

// Whether a key before `key_end` is behind what some row with these limits sees: both limits grow with the row, so the
// first row says it. And whether one from `key_begin` on is before what some of `rows` rows sees, as the last row says.
FLASH_HOST_DEVICE constexpr bool masks_right(const ColBounds& bounds, int seqlen_k, int key_end) {
  return (bounds.end < seqlen_k ? bounds.end : seqlen_k) < key_end;
}
FLASH_HOST_DEVICE constexpr bool masks_left(const ColBounds& bounds, int rows, int key_begin) {
  return bounds.begin + (rows - 1) > key_begin;
}

// The key blocks of one row block, walked "edges first": blocks that some row sees only in part come before the
// blocks that every row sees whole, so that the interior loop carries no mask. The order of key blocks is free under
// the online softmax.
struct BlockRange {
  int begin = 0;           // first visited block
  int end = 0;             // one past the last visited block; nothing is visited when end <= begin
  int unmasked_begin = 0;  // blocks [unmasked_begin, unmasked_end) are visible to every row
  int unmasked_end = 0;

  FLASH_HOST_DEVICE constexpr int count() const { return end - begin; }
  FLASH_HOST_DEVICE constexpr int masked_count() const { return count() - (unmasked_end - unmasked_begin); }

  // The block visited at `step` in [0, count()): the right edge, then the left edge, then the interior, each downwards.
  FLASH_HOST_DEVICE constexpr int block_at(int step) const {
    const int masked_right_count = end - unmasked_end;
    if (step < masked_right_count) return end - 1 - step;
    const int masked_blocks = masked_count();
    if (step < masked_blocks) return unmasked_begin - 1 - (step - masked_right_count);
    return unmasked_end - 1 - (step - masked_blocks);
  }

  // The other way round, upwards: the interior, the left edge, the right edge. Thread blocks that start together read
  // the same keys at the same time.
  FLASH_HOST_DEVICE constexpr int block_unmasked_first(int step) const {
    const int unmasked = unmasked_end - unmasked_begin;
    if (step < unmasked) return unmasked_begin + step;
    const int masked_index = step - unmasked;
    const int masked_left_count = unmasked_begin - begin;
    return masked_index < masked_left_count ? begin + masked_index : unmasked_end + masked_index - masked_left_count;
  }

  // The edge that it visits after another one.
  FLASH_HOST_DEVICE constexpr int next_masked(int block) const {
    return block + 1 == unmasked_begin ? unmasked_end : block + 1;
  }
};

// The most key blocks that are whole behind a window for all rows of a row block; 1 if a side is open. Of the window
// alone: shorter sequences have the same walk, and the number of keys is another one where they are packed.
FLASH_HOST_DEVICE constexpr int max_unmasked_blocks(const Window& window, int block_m, int block_n) {
  if (window.left == kUnbounded || window.right == kUnbounded) return 1;
  const int64_t shown = int64_t{window.left} + window.right + 2 - block_m;  // to the first row and to the last
  const int64_t blocks = (shown < kMaxLength ? shown : kMaxLength) / block_n;
  return blocks > 1 ? static_cast<int>(blocks) : 1;
}

// Share `share` of `shares` of a walk's blocks, which are as long as they can be: the last ones may have none.
FLASH_HOST_DEVICE constexpr BlockRange split_range(const BlockRange& range, int split, int splits) {
  const int length = (range.count() + splits - 1) / splits;
  const int64_t first = range.begin + static_cast<int64_t>(split) * length;
  BlockRange own;
  own.begin = first < range.end ? static_cast<int>(first) : range.end;
  own.end = range.end - own.begin < length ? range.end : own.begin + length;
  const auto within = [&own](int block) { return block < own.begin ? own.begin : block > own.end ? own.end : block; };
  own.unmasked_begin = within(range.unmasked_begin);
  own.unmasked_end = within(range.unmasked_end);
  return own;
}

// block_unmasked_first(), but for one block that comes before all others; or with an interior that is loaded from
// another block on than its first, which only those who load need to know: interior blocks are computed alike.
struct KvBlockOrder {
  BlockRange range;
  int first = 0;  // its step in block_unmasked_first()
  int shift = 0;  // of the interior's beginning

  FLASH_HOST_DEVICE constexpr int count() const { return range.count(); }
  FLASH_HOST_DEVICE constexpr int unmasked() const { return range.unmasked_end - range.unmasked_begin; }
  FLASH_HOST_DEVICE constexpr int block(int step) const {
    return range.block_unmasked_first(step > first ? step : step == 0 ? first : step - 1);
  }

  // The block to load for a step, of a walk without a block that comes first.
  FLASH_HOST_DEVICE constexpr int block_to_load(int step) const {
    if (step >= unmasked()) return range.block_unmasked_first(step);
    const int block = range.unmasked_begin + shift + step;
    return block < range.unmasked_end ? block : block - unmasked();
  }

  // The steps after the first one that visit interior blocks are [1, unmasked_steps_end()).
  FLASH_HOST_DEVICE constexpr int unmasked_steps_end() const { return unmasked() + (first >= unmasked()); }

  // Begins with a visited block.
  FLASH_HOST_DEVICE constexpr void start_at(int block) {
    first = block < range.unmasked_begin ? unmasked() + block - range.begin
            : block < range.unmasked_end ? block - range.unmasked_begin
                                         : block - range.begin;
  }

  // The interior from the block on, if there is one, whose number is a multiple of max_unmasked_blocks(), `apart`. Row
  // blocks behind a window, each of which sees other keys, so read the same ones at the same time when they start
  // together: each key comes from memory once, and not all of them do at once.
  FLASH_HOST_DEVICE void align_unmasked(const FastDiv& apart) {
    const int next = apart.divide(range.unmasked_begin + apart.divisor - 1) * apart.divisor - range.unmasked_begin;
    shift = next < unmasked() ? next : 0;
  }
};

// Rows [row_begin, row_end) of the sequence, row_end <= seqlen_q, row_begin < row_end. Both key limits grow with the
// row, so the first and the last row bound the block.
FLASH_HOST_DEVICE constexpr BlockRange block_range(const Visibility& visibility, int row_begin, int row_end,
                                                   int block_n) {
  const int last_row = row_end - 1;
  BlockRange range;
  range.begin = visibility.key_begin(row_begin) / block_n;
  range.end = (visibility.key_end(last_row) + block_n - 1) / block_n;
  if (range.end <= range.begin) return BlockRange{};
  range.unmasked_begin = (visibility.key_begin(last_row) + block_n - 1) / block_n;
  range.unmasked_end = visibility.key_end(row_begin) / block_n;
  if (range.unmasked_end <= range.unmasked_begin) range.unmasked_begin = range.unmasked_end = range.begin;
  return range;
}

// The row blocks that visit key block `n_block`: exactly those m with block_range(m).begin <= n_block < .end. The
// backward walks them; its deterministic order relies on both directions agreeing.
struct RowRange {
  int begin = 0;
  int end = 0;
};

FLASH_HOST_DEVICE constexpr int clamp_row(int64_t row, int seqlen_q) {
  return row < 0 ? 0 : row > seqlen_q ? seqlen_q : static_cast<int>(row);
}

FLASH_HOST_DEVICE constexpr RowRange row_range(const Visibility& visibility, int n_block, int block_m, int block_n) {
  const int seqlen_q = visibility.seqlen_q;
  const int64_t key_begin = static_cast<int64_t>(n_block) * block_n;
  const int64_t shift = static_cast<int64_t>(visibility.seqlen_k) - seqlen_q;
  // First row whose key_end is beyond key_begin, first row whose key_begin is at or beyond the end of the block.
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

// The row blocks of which every row sees all keys [key_begin, key_end): their scores need no mask.
FLASH_HOST_DEVICE constexpr RowRange unmasked_rows(const Visibility& visibility, int key_begin, int key_end,
                                                   int block_m) {
  const int seqlen_q = visibility.seqlen_q;
  const int64_t shift = static_cast<int64_t>(visibility.seqlen_k) - seqlen_q;
  const bool open_right = visibility.window.right == kUnbounded, open_left = visibility.window.left == kUnbounded;
  // First row that sees the last key, and the one behind the last row that sees the first key.
  const int first = open_right ? 0 : clamp_row(key_end - 1 - shift - visibility.window.right, seqlen_q);
  const int last = open_left ? seqlen_q : clamp_row(key_begin - shift + visibility.window.left + 1, seqlen_q);
  if (key_end > visibility.seqlen_k) return RowRange{};
  return {(first + block_m - 1) / block_m, last == seqlen_q ? (last + block_m - 1) / block_m : last / block_m};
}

// Variable-length batches: row blocks are numbered by "slots" so that the grid depends only on host-known sizes. The
// packed rows fall into batch + 2 segments: those before the first sequence, the sequences, and those after the last.
// Segment i owns the slots [varlen_first_slot(i), varlen_first_slot(i + 1)), at least as many as it has row blocks.
FLASH_HOST_DEVICE constexpr int varlen_first_slot(int first_row, int segment, int block_m) {
  return first_row / block_m + segment;
}

FLASH_HOST_DEVICE constexpr int varlen_slot_count(int total_rows, int batch, int block_m) {
  return total_rows / block_m + batch + 2;
}

}  // namespace flash
