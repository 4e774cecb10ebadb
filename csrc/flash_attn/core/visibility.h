// Masks: which keys a query row sees, and which rows see a key. Block ranges, trip counts, the m_blocks of the backward
// and the kernels use only these functions of a mask:
//
//   seqlen_q, seqlen_k
//   key_begin(row), key_end(row)        the keys that `row` sees; none when key_end <= key_begin
//   row_begin(key), row_end(key)        the rows that see `key`; none when row_end <= row_begin
//   may_mask_left(), may_mask_right()   false: no row has its first (left), its last (right) keys masked
//   diagonal(row)                       position of `row` on the key axis, for ALiBi
//   bounds(row)                         key_begin() and key_end() of the rows from `row` on, as apply_mask() needs them
//
// The four ends never decrease from one row, or key, to the next: the first and the last row of a tile bound its keys.
// The wgmma forward also requires key_begin and key_end to advance by at most one key per row: the depth of its K/V
// ring covers the blocks that a warpgroup then skips (plan/fwd_policy_sm90.h). Another mask is another such type;
// tests/cpp/test_mask_types.cpp has one.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash {

// Rows and keys are counted in 32 bits, with room for sums of two lengths.
constexpr int kMaxLength = 0x3fffffff;

// The value of an open side of a window.
constexpr int kUnbounded = 0x7fffffff;

// Query i sees key j iff i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right.
// Full attention is {kUnbounded, kUnbounded}; causal attention is {kUnbounded, 0}. Only this file and block_range.h
// compute with the fields, api/scores.h sets them and api/mla.h reads them; plans and kernels call the functions.
struct Window {
  int left = kUnbounded;
  int right = kUnbounded;

  // Whether a row may have its first (left) or its last (right) keys masked.
  FLASH_HOST_DEVICE constexpr bool may_mask_left() const { return left != kUnbounded; }
  FLASH_HOST_DEVICE constexpr bool may_mask_right() const { return right != kUnbounded; }
  FLASH_HOST_DEVICE constexpr bool may_mask() const { return may_mask_left() || may_mask_right(); }

  // Whether the last row sees all keys, and every row its first ones.
  FLASH_HOST_DEVICE constexpr bool shows_all_keys() const { return !may_mask_left() && right >= 0; }

  // The most of `seqlen_k` keys that a row sees.
  FLASH_HOST_DEVICE constexpr int64_t max_keys(int64_t seqlen_k) const {
    if (!may_mask_left() || !may_mask_right()) return seqlen_k;
    const int64_t width = int64_t{left} + right + 1;
    return width < seqlen_k ? width : seqlen_k;
  }
};

// Column bounds of consecutive rows, in 32 bits: row i, counted from the first one, sees keys [begin + i, end + i).
// Valid for up to 2^30 rows.
struct ColBounds {
  static constexpr int kFar = 0x3fffffff;  // an unbounded side: beyond all keys

  int begin = -kFar;
  int end = kFar;

  FLASH_HOST_DEVICE constexpr int key_begin(int i) const { return begin + i; }
  FLASH_HOST_DEVICE constexpr int key_end(int i) const { return end + i; }
};

// The mask of a window over one sequence. Sums are 64-bit: row, shift and window together may exceed 2^31.
struct Visibility {
  using Bounds = ColBounds;

  int seqlen_q = 0;
  int seqlen_k = 0;
  Window window;

  FLASH_HOST_DEVICE constexpr bool may_mask_left() const { return window.may_mask_left(); }
  FLASH_HOST_DEVICE constexpr bool may_mask_right() const { return window.may_mask_right(); }

  // Position of query `row` on the key axis (bottom-right alignment); negative when seqlen_q > seqlen_k.
  FLASH_HOST_DEVICE constexpr int diagonal(int row) const { return row + seqlen_k - seqlen_q; }

  FLASH_HOST_DEVICE constexpr int key_begin(int row) const {
    const int64_t begin = static_cast<int64_t>(diagonal(row)) - window.left;
    return window.left == kUnbounded || begin < 0 ? 0 : begin > seqlen_k ? seqlen_k : static_cast<int>(begin);
  }

  FLASH_HOST_DEVICE constexpr int key_end(int row) const {
    const int64_t end = static_cast<int64_t>(diagonal(row)) + window.right + 1;
    return window.right == kUnbounded || end > seqlen_k ? seqlen_k : end < 0 ? 0 : static_cast<int>(end);
  }

  FLASH_HOST_DEVICE constexpr int row_begin(int key) const {
    if (window.right == kUnbounded) return 0;
    const int64_t row = static_cast<int64_t>(key) + seqlen_q - seqlen_k - window.right;
    return row < 0 ? 0 : row < seqlen_q ? static_cast<int>(row) : seqlen_q;
  }

  FLASH_HOST_DEVICE constexpr int row_end(int key) const {
    if (window.left == kUnbounded) return seqlen_q;
    const int64_t row = static_cast<int64_t>(key) + seqlen_q - seqlen_k + window.left + 1;
    return row < 0 ? 0 : row < seqlen_q ? static_cast<int>(row) : seqlen_q;
  }

  FLASH_HOST_DEVICE constexpr ColBounds bounds(int first_row) const {
    constexpr int64_t kFar = ColBounds::kFar;
    const auto near = [](int64_t key) { return static_cast<int>(key < -kFar ? -kFar : key > kFar ? kFar : key); };
    const int64_t position = diagonal(first_row);
    return {near(window.left == kUnbounded ? -kFar : position - window.left),
            near(window.right == kUnbounded ? kFar : position + window.right + 1)};
  }
};

// masks_right: some row does not see some key before `key_end`. masks_left: some of the `rows` rows does not see some
// key from `key_begin` on. Both bounds grow with the row, so the first row decides on the right and the last row on the
// left.
template <class Bounds>
FLASH_HOST_DEVICE constexpr bool masks_right(const Bounds& bounds, int seqlen_k, int key_end) {
  const int end = bounds.key_end(0);
  return (end < seqlen_k ? end : seqlen_k) < key_end;
}
template <class Bounds>
FLASH_HOST_DEVICE constexpr bool masks_left(const Bounds& bounds, int rows, int key_begin) {
  return bounds.key_begin(rows - 1) > key_begin;
}

}  // namespace flash
