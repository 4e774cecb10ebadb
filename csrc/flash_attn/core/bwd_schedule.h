// Schedule of the backward: the order of work tiles, the order of m_blocks within one, and the values of the dQ
// semaphore. Arithmetic only; tests/cpp/test_bwd_schedule.cpp simulates it with few resident thread blocks.
//
// A work tile is one n_block of one K/V head. n_blocks ascend with the launch index, and each visits its m_blocks in
// descending order: under a causal mask all n_blocks of a head start at the same m_block and the longest is launched
// first. Of two n_blocks that reduce into the same dQ tile, the lower one is launched first and comes first in the dQ
// semaphore's order: the thread block waited for is resident or done, so there is no deadlock.
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

// Order of heads x blocks work tiles: a band of `width` heads (1..heads), whose K, V, Q and dO stay in the L2 cache,
// advances together, block by block; then the next band.
struct HeadOrder {
  int heads = 1;
  FastDiv width;
  FastDiv band_size;  // work tiles

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

// Bands of heads; each has one or more bands of the HeadOrder. In a dense call a head is a (batch, K/V head) pair.
// While thread blocks compute a band, others prepare later ones: they compute softmax_d and clear the sums of dQ.
struct BwdBands {
  int count = 1;
  int heads = 0;  // of a band; the last one may have fewer
  int all_heads = 0;
  int dq_tiles = 0;    // of one head: those of all its query heads
  FastDiv work_tiles;  // of a band

  BwdBands() = default;
  BwdBands(int heads_, int all_heads_, int n_blocks, int dq_tiles_)
      : count((all_heads_ + heads_ - 1) / heads_),
        heads(heads_),
        all_heads(all_heads_),
        dq_tiles(dq_tiles_),
        work_tiles(heads_ * n_blocks) {}

  FLASH_HOST_DEVICE int band_of(int work_tile) const { return work_tiles.divide(work_tile); }
  FLASH_HOST_DEVICE int first_dq_tile(int band) const { return band * heads * dq_tiles; }
  FLASH_HOST_DEVICE int end_dq_tile(int band) const {
    return band + 1 < count ? first_dq_tile(band + 1) : all_heads * dq_tiles;
  }
};

struct QStep {
  int head;
  int m_block;
};

// The steps of one work tile: m_blocks in descending order, and for each of them the query heads of the GQA group,
// which share K and V.
struct QBlockOrder {
  RowRange rows;
  int first_head = 0;
  int heads = 1;

  FLASH_HOST_DEVICE constexpr int count() const { return (rows.end - rows.begin) * heads; }
  FLASH_HOST_DEVICE constexpr QStep start() const { return {first_head, rows.end - 1}; }

  // Returns whether the next step has another m_block.
  FLASH_HOST_DEVICE constexpr bool advance(QStep& at) const {
    const bool is_new_m_block = ++at.head == first_head + heads;
    if (is_new_m_block) at = {first_head, at.m_block - 1};
    return is_new_m_block;
  }

  FLASH_HOST_DEVICE constexpr QStep before(const QStep& at) const {
    return at.head > first_head ? QStep{at.head - 1, at.m_block} : QStep{first_head + heads - 1, at.m_block + 1};
  }

  // How far advance() moves a pointer into a tensor of these strides.
  FLASH_HOST_DEVICE constexpr int64_t offset(bool is_new_m_block, int64_t row_stride, int64_t head_stride,
                                             int block_m) const {
    return is_new_m_block ? -(heads - 1) * head_stride - block_m * row_stride : head_stride;
  }
};

// The value of an m_block's dQ semaphore at which `n_block`, which visits it, may reduce: the number of visiting
// n_blocks before it.
template <class Mask>
FLASH_HOST_DEVICE constexpr int dq_semaphore_value(const Mask& mask, int m_block, int n_block, int block_m,
                                                   int block_n) {
  return n_block - mask.key_begin(m_block * block_m) / block_n;
}

}  // namespace flash
