// In which order the backward visits its tiles: how thread blocks are numbered, how each walks, and whose turn it is to
// add to a tile of dQ. Arithmetic only; tests/cpp/test_bwd_schedule.cpp simulates it with few resident thread blocks.
//
// A thread block owns one block of keys of one K/V head. Key blocks ascend with the launch index, and each walks its
// row blocks downwards: under a causal mask all of a head start on the same rows and the longest is launched first. Of
// two that share a row block the left one is launched earlier and is the first there, so that whoever is waited for is
// running or done.
#pragma once

#include <cstdint>

#include "core/block_range.h"
#include "core/fast_div.h"
#include "core/host_device.h"

namespace flash {

struct HeadBlock {
  int head;
  int block;
};

// The numbers of heads x blocks thread blocks: `width` heads (1..heads), a band, advance together, block by block; then
// come the next `width`.
struct HeadOrder {
  int heads = 1;
  FastDiv width;
  FastDiv band_size;  // thread blocks

  HeadOrder() = default;
  HeadOrder(int heads_, int blocks, int width_) : heads(heads_), width(width_), band_size(width_ * blocks) {}

  // Each (head, block) occurs once, and the blocks of a head ascend.
  FLASH_HOST_DEVICE HeadBlock at(int index) const {
    const int band = band_size.divide(index);
    const int first_head = band * width.divisor, offset = index - band * band_size.divisor;
    const int heads_left = heads - first_head;
    const bool is_whole = heads_left >= width.divisor;  // only the last band may have fewer heads
    const int block = is_whole ? width.divide(offset) : offset / heads_left;
    return {first_head + offset - block * (is_whole ? width.divisor : heads_left), block};
  }
};

// The grid of the backward; dense: heads are (batch, K/V head) pairs.
struct BwdGrid {
  int64_t blocks = 0;
  HeadOrder order;
  FastDiv heads_k;
};

struct QStep {
  int head;
  int row_block;
};

// The steps of one thread block: its row blocks from the last to the first, and for each of them the query heads of the
// group, which read the same keys.
struct QBlockOrder {
  RowRange rows;
  int first_head = 0;
  int heads = 1;

  FLASH_HOST_DEVICE constexpr int count() const { return (rows.end - rows.begin) * heads; }
  FLASH_HOST_DEVICE constexpr QStep start() const { return {first_head, rows.end - 1}; }

  // Returns whether the next step has other rows.
  FLASH_HOST_DEVICE constexpr bool advance(QStep& at) const {
    const bool other_rows = ++at.head == first_head + heads;
    if (other_rows) at = {first_head, at.row_block - 1};
    return other_rows;
  }

  FLASH_HOST_DEVICE constexpr QStep before(const QStep& at) const {
    return at.head > first_head ? QStep{at.head - 1, at.row_block} : QStep{first_head + heads - 1, at.row_block + 1};
  }

  // By how much a pointer into a tensor of these strides moves with advance().
  FLASH_HOST_DEVICE constexpr int64_t offset(bool other_rows, int64_t row_stride, int64_t head_stride,
                                             int block_m) const {
    return other_rows ? -(heads - 1) * head_stride - block_m * row_stride : head_stride;
  }
};

// How many thread blocks add to the dQ of a row block before the one of `n_block`, which visits it.
FLASH_HOST_DEVICE constexpr int dq_semaphore_value(const Visibility& visibility, int row_block, int n_block,
                                                   int block_m, int block_n) {
  return n_block - visibility.key_begin(row_block * block_m) / block_n;
}

}  // namespace flash
