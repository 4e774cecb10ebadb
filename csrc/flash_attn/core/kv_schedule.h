// Stream-K schedule of attention over a KV cache. The n_blocks of all tiles are linearised: sequences, then their row
// tiles, then the head tiles of these (one K/V head or a pair), then the n_blocks that the tile visits. Each CTA takes
// an equal range. A tile that a range boundary splits leaves partial results, which are combined afterwards. Lengths
// are known only on the device, so the host decides just the number of CTAs. tests/cpp checks the arithmetic by brute
// force.
#pragma once

#include <cstdint>

#include "core/block_range.h"
#include "core/host_device.h"

namespace flash {

// Where a tile may be split.
enum class SplitRule : int {
  kAnywhere,     // between any two n_blocks, but tiles of at most `value` n_blocks are not split
  kEqualSplits,  // into at most `value` splits of equal size
  kFixedSplits,  // where the n_block is a multiple of `value`
  kNowhere
};

struct SplitPoints {
  SplitRule rule = SplitRule::kNowhere;
  int value = 0;

  // The first permitted split point at or after `offset` of a tile of `count` n_blocks whose first one is
  // `first_block`.
  FLASH_HOST_DEVICE constexpr int next(int first_block, int count, int offset) const {
    if (offset <= 0) return 0;
    if (offset >= count || rule == SplitRule::kNowhere) return count;
    if (rule == SplitRule::kAnywhere) return count <= value ? count : offset;
    if (rule == SplitRule::kFixedSplits) {
      const int64_t block = static_cast<int64_t>(first_block) + offset;
      const int64_t point = (block + value - 1) / value * value - first_block;
      return point < count ? static_cast<int>(point) : count;
    }
    const int split_blocks = (count - 1) / value + 1;  // count + value may pass 2^31
    const int64_t point = (static_cast<int64_t>(offset) + split_blocks - 1) / split_blocks * split_blocks;
    return point < count ? static_cast<int>(point) : count;
  }
};

// n_blocks [from, to) of a tile, counted from its first one.
struct BlockSpan {
  int from = 0;
  int to = 0;

  FLASH_HOST_DEVICE constexpr bool empty() const { return from >= to; }
};

FLASH_HOST_DEVICE constexpr int clamp_offset(int64_t offset, int count) {
  return offset < 0 ? 0 : offset > count ? count : static_cast<int>(offset);
}

// In 32 bits the minimum and the maximum are one instruction each.
FLASH_HOST_DEVICE constexpr int clamp_offset(int offset, int count) {
  const int from_zero = offset > 0 ? offset : 0;
  return from_zero < count ? from_zero : count;
}

// What CTA `index` computes of the tile at [tile_begin, tile_begin + count) of the linearised work.
FLASH_HOST_DEVICE constexpr BlockSpan block_span(const SplitPoints& split_points, int first_block, int count,
                                                 int64_t tile_begin, int64_t cta_blocks, int index) {
  BlockSpan span;
  span.from = split_points.next(first_block, count, clamp_offset(index * cta_blocks - tile_begin, count));
  span.to = split_points.next(first_block, count, clamp_offset((index + 1) * cta_blocks - tile_begin, count));
  return span;
}

// block_span() for SplitRule::kAnywhere and kNowhere. Index: int64_t, or int where the linearised work has fewer than
// kMaxBlocks32 n_blocks, which takes half the instructions.
constexpr int kMaxBlocks32 = 1 << 30;

template <class Index>
FLASH_HOST_DEVICE constexpr BlockSpan block_span_anywhere(const SplitPoints& split_points, int count, Index tile_begin,
                                                          Index cta_blocks, int index) {
  const Index first = index * cta_blocks - tile_begin;
  const BlockSpan span{clamp_offset(first, count), clamp_offset(first + cta_blocks, count)};
  if (split_points.rule == SplitRule::kAnywhere && count > split_points.value) return span;
  return {span.from > 0 ? count : 0, span.to > 0 ? count : 0};
}

// Whether a span is half of its tile and the CTA ranges 2 i and 2 i + 1 that share the tile hold nothing else: in a
// launch of 2-CTA clusters the two CTAs combine it through DSMEM.
FLASH_HOST_DEVICE constexpr bool kv_is_cluster_half(const BlockSpan& span, int count, int64_t cta_blocks, int index) {
  return count == 2 * cta_blocks && span.from == index % 2 * cta_blocks && span.to == span.from + cta_blocks;
}

// Workspace slot of a partial result: a CTA range begins inside at most one tile (slot 0), and leaves at most one other
// tile unfinished (slot 1).
FLASH_HOST_DEVICE constexpr int kv_slot(int index, const BlockSpan& span) {
  return 2 * index + (span.from == 0 ? 1 : 0);
}

// n_blocks of each CTA range.
FLASH_HOST_DEVICE constexpr int64_t blocks_per_cta(int64_t total, int thread_blocks, int64_t min_blocks_per_cta) {
  const int64_t cta_blocks = thread_blocks > 0 ? (total + thread_blocks - 1) / thread_blocks : total;
  return cta_blocks > min_blocks_per_cta ? cta_blocks : min_blocks_per_cta;
}

// Combine after SplitRule::kAnywhere and kEqualSplits. A warp loads this many partial results of a row at a time. If a
// tile has more, all warps of a CTA add up one row; otherwise each warp has a row. Sizes are passed by reference: a
// kernel loads its parameters where it uses them.
constexpr int kCombineLoads = 8;
constexpr int kCombineWarps = 4;

FLASH_HOST_DEVICE constexpr int kv_combine_rows(const bool& one_row) { return one_row ? 1 : kCombineWarps; }

// CTAs per tile, or per CTA boundary that may split one.
FLASH_HOST_DEVICE constexpr int kv_combine_blocks(const int& slot_rows, const bool& one_row) {
  return (slot_rows + kv_combine_rows(one_row) - 1) / kv_combine_rows(one_row);
}

// With few tiles of a dense batch, the combine has CTAs for each tile; otherwise for each CTA boundary.
FLASH_HOST_DEVICE constexpr bool kv_has_few_tiles(const int& work_items, const int& head_tiles,
                                                  const int& thread_blocks) {
  return static_cast<int64_t>(work_items) * head_tiles < thread_blocks;
}

// CTAs of the combine.
constexpr int64_t kv_combine_grid(SplitRule rule, bool is_varlen, int work_items, int head_tiles, int thread_blocks,
                                  int slot_rows, bool one_row) {
  const int64_t tiles = static_cast<int64_t>(work_items) * head_tiles;
  if (rule == SplitRule::kFixedSplits) return tiles;
  const bool by_tile = !is_varlen && kv_has_few_tiles(work_items, head_tiles, thread_blocks);
  return (by_tile ? tiles : thread_blocks - 1) * kv_combine_blocks(slot_rows, one_row);
}

// A schedule made once for all layers of a step (KvCachePlan): header, then one entry per CTA.
struct SchedHeader {
  int64_t cta_blocks = 1;
  int64_t total = 0;
};

struct SchedEntry {
  int64_t work_item_begin = 0;  // offset in the linearised work of the work item in which the CTA range begins
  int work_item = 0;  // sequence * row tiles + row tile; the number of work items where the CTA range is empty
  int padding = 0;
};

// Derived from a request's lengths. Without `fits` the request has no keys.
struct KvLengths {
  int first_row = 0;  // row of the cache that is key 0
  int seqlen_k = 0;   // keys, the appended ones included
  bool fits = false;
};

FLASH_HOST_DEVICE constexpr KvLengths kv_lengths(int cached, int leftpad, int seqlen_new, int capacity) {
  KvLengths lengths;
  lengths.fits = cached >= 0 && static_cast<int64_t>(cached) + seqlen_new <= capacity;
  const int total = lengths.fits ? cached + seqlen_new : 0;
  lengths.first_row = leftpad < 0 ? 0 : leftpad > total ? total : leftpad;
  lengths.seqlen_k = total - lengths.first_row;
  return lengths;
}

// Rows of the rotary tables that a request needs, from `cached` on: one for each new key and one for each query; with
// `one_position` all queries use the first.
FLASH_HOST_DEVICE constexpr int64_t kv_rotary_rows(int64_t cached, int seqlen_q, int seqlen_new, bool one_position) {
  const int positions = one_position && seqlen_q > 1 ? 1 : seqlen_q;
  return cached + (positions > seqlen_new ? positions : seqlen_new);
}

// The query tokens [begin, end) of a tile of packed rows: row r is head r % group of token r / group.
struct KvTokens {
  int begin = 0;
  int end = 0;
};

// The n_blocks that a tile visits. A fully masked tile still takes one, because its rows have to be written.
FLASH_HOST_DEVICE constexpr int kv_count(const BlockRange& range) { return range.count() > 0 ? range.count() : 1; }

}  // namespace flash
