// Grid sizes and schedulers. Plain C++17.
#pragma once

#include <cstdint>
#include <numeric>

#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "plan/device.h"
#include "plan/problem.h"
#include "plan/tiles.h"

namespace flash {
namespace plan {

constexpr int64_t kMaxGridBlocks = 0x7fffffff;  // of gridDim.x; the kernels use one dimension only

// m_blocks (or n_blocks) per head: exact for dense batches, varlen slots (see varlen_slot_count) for packed ones.
constexpr int64_t m_blocks(bool is_varlen, int batch, int rows, int block) {
  return is_varlen ? varlen_slot_count(rows, batch, block)
                   : static_cast<int64_t>(batch) * ((static_cast<int64_t>(rows) + block - 1) / block);
}

// Longest sequences of the short tiles (kShort).
constexpr int kShortRows = 512;       // mma.sync, with a mask on the right (docs/tuning/fwd_sm80.md)
constexpr int kSm90ShortRows = 1024;  // wgmma (docs/tuning/fwd_sm90.md)

// Whether the wgmma family takes its short tiles. At head dim 64 they have two consumer groups: one starts or ends a
// work tile while the other computes. Under a causal mask trip counts are short in longer sequences too, if masked
// calls have no other tile.
constexpr bool sm90_prefers_short_tile(int head_dim, int64_t rows_per_sequence, bool masked_right) {
  return rows_per_sequence <= (masked_right && !sm90_splits_masked(head_dim) ? 4 : 1) * kSm90ShortRows;
}

// Rows of a TMA box that never crosses a page, if n_blocks begin at multiples of `block_n`: the greatest common divisor
// if that is a multiple of the swizzle's period of 8 rows; otherwise 0.
constexpr int page_box_rows(int page_size, int block_n) {
  const int rows = std::gcd(page_size, block_n);
  return rows % 8 == 0 ? rows : 0;
}

// Whether the wgmma family hands out work tiles of equal trip counts in bands and by a semaphore, like those of
// variable ones, instead of statically head by head (docs/tuning/fwd_sm90.md).
constexpr bool sm90_dynamic_scheduler_for_equal_tiles(int head_dim) { return 96 < head_dim && head_dim <= 128; }

// Heads of the backward's grid, each with the same number of n_blocks: the sequences of a packed batch share the slots
// of a K/V head.
constexpr int64_t bwd_heads(bool is_varlen, int64_t batch, int64_t heads_k) {
  return is_varlen ? heads_k : batch * heads_k;
}

// n_blocks of a head that run at a time, unless a policy says otherwise (plan/bwd_policy_sm90.h).
constexpr int kRunningNBlocks = 16;

// Heads of a band (HeadOrder), so that about `running` n_blocks of each head run at a time. resident_blocks: CTAs that
// the GPU holds at a time.
constexpr int interleave_width(int64_t resident_blocks, int64_t heads, int64_t blocks_per_head,
                               int running = kRunningNBlocks) {
  const int64_t most = blocks_per_head < running ? blocks_per_head : running;
  const int64_t filling = resident_blocks / (most < 1 ? 1 : most);
  const int64_t width = filling < heads ? filling : heads;
  return width < 1 ? 1 : static_cast<int>(width);
}

// `block_n`: keys of a CTA.
inline BwdGrid bwd_grid(bool is_varlen, int batch, int heads_k, int seqlen_k, int block_n, int64_t resident_blocks,
                        int running = kRunningNBlocks) {
  BwdGrid grid;
  grid.blocks = product(heads_k, m_blocks(is_varlen, batch, seqlen_k, block_n));
  if (grid.blocks == 0 || grid.blocks > kMaxGridBlocks) return grid;  // the launch fails for the second
  const int64_t heads = bwd_heads(is_varlen, batch, heads_k);
  const int64_t blocks_per_head = grid.blocks / heads;
  grid.order = HeadOrder(static_cast<int>(heads), static_cast<int>(blocks_per_head),
                         interleave_width(resident_blocks, heads, blocks_per_head, running));
  grid.heads_k = FastDiv(heads_k);
  return grid;
}

// Rows of softmax_d for one head: padded to multiples of the gap for dense batches, a gap of spare rows per sequence
// for packed ones, so that sequence i starts at row cu_seqlens_q[i] + gap * i.
constexpr int64_t kSoftmaxDGap = 128;

constexpr int64_t softmax_d_rows(bool is_varlen, int64_t batch, int64_t seqlen_q) {
  return is_varlen ? seqlen_q + kSoftmaxDGap * batch : (seqlen_q + kSoftmaxDGap - 1) / kSoftmaxDGap * kSoftmaxDGap;
}

}  // namespace plan
}  // namespace flash
