// Grids as plain arithmetic. Plain C++17.
#pragma once

#include <cstdint>
#include <numeric>

#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "plan/tiles.h"

namespace flash {
namespace plan {

constexpr int64_t kMaxGridBlocks = 0x7fffffff;  // of gridDim.x; the kernels use one dimension only

// Blocks of rows (or of keys) per head: exact for dense batches, varlen slots (see varlen_slot_count) for packed ones.
constexpr int64_t m_blocks(bool is_varlen, int batch, int rows, int block) {
  return is_varlen ? varlen_slot_count(rows, batch, block)
                   : static_cast<int64_t>(batch) * ((static_cast<int64_t>(rows) + block - 1) / block);
}

// A forward, as far as the choice of its kernels depends on it. Packed sequences count as so many of their mean length:
// a dense batch and the same sequences packed are one shape, and take kernels with the same bits.
struct FwdShape {
  bool is_varlen;
  int64_t batch, heads, heads_k;
  int head_dim;
  int64_t seqlen_q, seqlen_k;  // of a sequence; of all sequences of a packed batch
  Window window;
  int multiprocessors;
  int64_t page_rows = -1;        // of all pages; -1: K and V are not paged
  bool batch_invariant = false;  // only options and head dims may choose a kernel

  constexpr int64_t sequences() const { return batch > 0 ? batch : 1; }
  constexpr int64_t rows() const { return is_varlen ? (seqlen_q + sequences() - 1) / sequences() : seqlen_q; }
  // The maximum lengths that a caller of the packed functions names and the width of a block table may be loose, and
  // change no bit of a result.
  constexpr int64_t keys() const {
    const int64_t own = is_varlen ? seqlen_k / sequences() : seqlen_k, paged = page_rows / sequences();
    return page_rows < 0 ? own : is_varlen || paged < own ? paged : own;
  }
  constexpr int64_t all_rows() const { return heads * (is_varlen ? seqlen_q : batch * seqlen_q); }  // as the LSE has
  // Blocks of so many rows, of all sequences and heads.
  constexpr int64_t blocks(int rows_of_block) const {
    return batch * heads * ((rows() + rows_of_block - 1) / rows_of_block);
  }
  constexpr bool masked_right() const { return window.right != kUnbounded; }
};

// Whether half as many rows per thread block are faster: where whole blocks leave multiprocessors idle, and under a
// causal mask or window over short sequences, whose diagonal blocks are half wasted (docs/tuning/fwd_sm80.md).
constexpr int kShortRows = 512;

constexpr int kSm90ShortRows = 1024;

// The wgmma family at head dim 64: two teams of consumers, whose row blocks begin and end beside each other's. Under a
// causal mask row blocks are short in longer sequences too, which matters where masked calls have no tile of their own.
constexpr bool sm90_prefers_short_tile(int head_dim, int64_t rows_per_sequence, bool masked_right) {
  return rows_per_sequence <= (masked_right && !sm90_splits_masked(head_dim) ? 4 : 1) * kSm90ShortRows;
}

// Rows of a TMA box that never leaves its page, where blocks of `block_n` keys begin at multiples of it: their greatest
// common divisor, if whole groups of 8 rows, the period of the swizzle, fit it; else 0.
constexpr int page_box_rows(int page_size, int block_n) {
  const int rows = std::gcd(page_size, block_n);
  return rows % 8 == 0 ? rows : 0;
}

// Whether the wgmma family hands out row blocks of equal length as it does unequal ones, in sections and drawn from a
// semaphore, instead of one head after the other in equal shares (docs/tuning/fwd_sm90.md).
constexpr bool sm90_dynamic_scheduler_for_equal_tiles(int head_dim) { return 96 < head_dim && head_dim <= 128; }

// Whether a launch of the wgmma family hands out row blocks by a semaphore. `uneven`: they see unequal numbers of keys;
// `tiles`: of 128 rows, of all heads and shares of the keys. Where the multiprocessors hold all of these at a time,
// they hold all tiles of the family too, which have no fewer rows.
constexpr bool sm90_dynamic_scheduler(int head_dim, bool uneven, int64_t tiles, int multiprocessors) {
  return tiles > multiprocessors && (uneven || sm90_dynamic_scheduler_for_equal_tiles(head_dim));
}

// Whether the mma.sync family takes its short tiles; `block_m`: rows of the others.
constexpr bool takes_short_tile(const FwdShape& shape, int block_m) {
  if (shape.batch_invariant) return false;
  return shape.blocks(block_m) <= shape.multiprocessors || (shape.masked_right() && shape.rows() <= kShortRows);
}

// Whether the wgmma family does. Not where equal short tiles, without a second team, are of two waves and the others
// of one.
constexpr bool sm90_takes_short_tile(const FwdShape& shape, const Sm90FwdTile& plain, const Sm90FwdTile& short_tile) {
  if (shape.batch_invariant) return false;
  const bool may_be_even = !shape.masked_right() && short_tile.consumer_groups == 1;
  if (may_be_even && shape.blocks(plain.block_m) <= shape.multiprocessors &&
      shape.blocks(short_tile.block_m) > shape.multiprocessors) {
    return false;
  }
  return sm90_prefers_short_tile(plain.head_dim, shape.rows(), shape.masked_right());
}

// Heads of the backward's grid, each with the same number of blocks of keys: the sequences of a packed batch share the
// slots of a K/V head.
constexpr int64_t bwd_heads(bool is_varlen, int64_t batch, int64_t heads_k) {
  return is_varlen ? heads_k : batch * heads_k;
}

// How many blocks of keys of a head run at a time: they share the rows they read, and in deterministic mode each adds
// to dQ after the ones before it, so that the last of them starts late by about one step for each
// (docs/tuning/bwd_sm90.md). A head with few row blocks under a causal mask is better off with few of them. With too
// few, the rows of all heads that advance together leave the L2 cache, earlier with 64 keys, whose heads are wide; half
// of the rows where a causal mask hides the others. Nothing waits in the other mode: there the more of them read the
// same rows at a time, the less power the L2 cache takes (measured with 128 keys). `block_n`: keys of a thread block.
constexpr int kRunningKeyBlocks = 16;
constexpr int kUnorderedKeyBlocks = 32;

constexpr int running_key_blocks(bool is_deterministic, bool is_causal, int64_t m_blocks, int block_n) {
  const bool is_wide = block_n <= 64;
  if (!is_deterministic) return is_wide ? kRunningKeyBlocks : kUnorderedKeyBlocks;
  const int fewest = is_causal ? 4 : 8, most = is_wide ? kRunningKeyBlocks : 8;
  const int64_t wanted = m_blocks / (is_wide ? 4 : 8);
  return wanted > most ? most : wanted < fewest ? fewest : static_cast<int>(wanted);
}

// How many heads advance together (HeadOrder), so that about `running` blocks of keys of each run at a time.
// resident_blocks: thread blocks that the GPU holds at a time.
constexpr int interleave_width(int64_t resident_blocks, int64_t heads, int64_t blocks_per_head,
                               int running = kRunningKeyBlocks) {
  const int64_t most = blocks_per_head < running ? blocks_per_head : running;
  const int64_t filling = resident_blocks / (most < 1 ? 1 : most);
  const int64_t width = filling < heads ? filling : heads;
  return width < 1 ? 1 : static_cast<int>(width);
}

// A backward, as far as the choice of the kernel depends on it.
struct BwdShape {
  bool is_varlen;
  bool is_plain;  // without dropout and score modifiers
  int64_t batch, heads, heads_k, seqlen_q, seqlen_k;
  int head_dim;
  int multiprocessors;
  bool batch_invariant = false;
};

// Whether the wgmma family lets each thread block take whole heads and sum up dQ in shared memory: where rows are few
// enough. Thread blocks for each block of keys balance better, but take half as long again with the passes before and
// after (docs/tuning/bwd_sm90.md). Their sums of dQ have the order of the deterministic mode, but a subnormal number or
// the sign of a zero may differ from what memory adds up: batch-invariant calls have one way.
constexpr bool prefers_dq_in_smem(const BwdShape& shape) {
  if (shape.batch_invariant || shape.is_varlen || !shape.is_plain || shape.heads != shape.heads_k) return false;
  if (shape.seqlen_q == 0 || shape.seqlen_q > kSharedDqRows || shape.seqlen_k == 0) return false;
  if (sm90_bwd_tile(shape.head_dim, shape.head_dim).head_dim != kSm90SharedDqTile.head_dim) return false;
  const int64_t heads = shape.batch * shape.heads, multiprocessors = shape.multiprocessors;
  if (heads > kMaxGridBlocks) return false;
  const int64_t key_blocks = (shape.seqlen_k + kSm90SharedDqTile.block_n - 1) / kSm90SharedDqTile.block_n;
  const int64_t rounds = (heads + multiprocessors - 1) / multiprocessors;
  const int64_t waves = (heads * key_blocks + multiprocessors - 1) / multiprocessors;
  return 2 * rounds * key_blocks <= 3 * waves;
}

// `block_n`: keys of a thread block.
inline BwdGrid bwd_grid(bool is_varlen, int batch, int heads_k, int seqlen_k, int block_n, int64_t resident_blocks,
                        int running = kRunningKeyBlocks) {
  BwdGrid grid;
  grid.blocks = heads_k * m_blocks(is_varlen, batch, seqlen_k, block_n);
  if (grid.blocks == 0 || grid.blocks > kMaxGridBlocks) return grid;  // the launch refuses the second
  const int64_t heads = bwd_heads(is_varlen, batch, heads_k);
  const int64_t blocks_per_head = grid.blocks / heads;
  grid.order = HeadOrder(static_cast<int>(heads), static_cast<int>(blocks_per_head),
                         interleave_width(resident_blocks, heads, blocks_per_head, running));
  grid.heads_k = FastDiv(heads_k);
  return grid;
}

// Rows of softmax_d for one head: padded to the gap for dense batches, a gap of spare rows per sequence for packed
// ones, so that sequence i starts at row cu_seqlens_q[i] + gap * i.
constexpr int64_t kSoftmaxDGap = 128;

constexpr int64_t softmax_d_rows(bool is_varlen, int64_t batch, int64_t seqlen_q) {
  return is_varlen ? seqlen_q + kSoftmaxDGap * batch : (seqlen_q + kSoftmaxDGap - 1) / kSoftmaxDGap * kSoftmaxDGap;
}

}  // namespace plan
}  // namespace flash
