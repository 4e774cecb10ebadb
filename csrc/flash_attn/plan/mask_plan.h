// The plan of a mask as data: sizes of the block lists and of what makes them (kernels/auxiliary/mask_plan.cu). Plain
// C++17.
#pragma once

#include <cstdint>

#include "core/block_list.h"
#include "core/block_range.h"
#include "plan/grid.h"
#include "plan/problem.h"

namespace flash {
namespace plan {

// Rows or keys of the tiles and blocks that lists are made of, for a kernel's: whole strips.
constexpr int list_size(int size) { return size < kMaskStrip ? kMaskStrip : size; }

// 4-byte words of one BlockCount, of the bounds of a strip, and of its seen bits.
constexpr int64_t kBlockCountWords = sizeof(BlockCount) / 4;
constexpr int64_t kStripBoundsWords = sizeof(IntervalBounds) / 4;
constexpr int64_t kStripSeenWords = kMaskStrip / kMaskWordKeys;

// Lists of one direction: for tiles of rows the blocks of keys that they visit, or for tiles of keys those of rows.
struct MaskPlan {
  int64_t matrices = 0;  // 0: the call has no mask
  bool of_keys = false;
  int tile = 0, block = 0;                 // rows or keys
  int64_t tiles = 0;                       // of a mask matrix
  int64_t capacity = 0;                    // blocks of a tile, at most
  int64_t row_strips = 0, key_strips = 0;  // of a mask matrix

  constexpr int64_t strips() const { return product(matrices, row_strips + key_strips); }
  constexpr int64_t groups() const { return (strips() + kGroupStrips - 1) / kGroupStrips; }
  constexpr int64_t entry_words() const { return product(matrices, tiles, capacity); }
  constexpr int64_t count_words() const { return product(matrices, tiles, kBlockCountWords); }
  constexpr int64_t seen_words() const { return product(strips(), kStripSeenWords); }
  constexpr int64_t bounds_words() const { return product(strips() + groups(), kStripBoundsWords); }
  constexpr int64_t words() const { return entry_words() + count_words() + seen_words() + bounds_words(); }
};

// Of a packed batch a sequence may have all rows or keys.
constexpr MaskPlan plan_mask(const Problem& problem, bool of_keys, int tile, int block) {
  const int sequences = problem.is_varlen ? static_cast<int>(problem.batch) : 1;
  const auto parts = [&](int64_t length, int size) {
    return m_blocks(problem.is_varlen, sequences, static_cast<int>(length), size);
  };
  const int64_t own = of_keys ? problem.seqlen_k : problem.seqlen_q,
                other = of_keys ? problem.seqlen_q : problem.seqlen_k;
  MaskPlan plan;
  plan.matrices = problem.mask_matrices;
  plan.of_keys = of_keys;
  plan.tile = tile;
  plan.block = block;
  plan.tiles = parts(own, tile);
  plan.capacity = (other + block - 1) / block;
  plan.row_strips = parts(problem.seqlen_q, kMaskStrip);
  plan.key_strips = parts(problem.seqlen_k, kMaskStrip);
  if (problem.is_varlen && problem.has_key_lengths) {
    plan.key_strips = product(problem.batch, key_strips_of_sequence(static_cast<int>(problem.seqlen_k)));
  }
  return plan;
}

}  // namespace plan
}  // namespace flash
