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

// Whether half as many rows per CTA are faster: where whole m_blocks leave multiprocessors idle, and under a causal
// mask or window over short sequences, whose diagonal blocks are half wasted (docs/tuning/fwd_sm80.md).
constexpr int kShortRows = 512;

constexpr int kSm90ShortRows = 1024;

// The wgmma family at head dim 64: two consumer groups, so that one starts or ends a work tile while the other
// computes. Under a causal mask trip counts are short in longer sequences too, which matters where masked calls have no
// tile of their own.
constexpr bool sm90_prefers_short_tile(int head_dim, int64_t rows_per_sequence, bool masked_right) {
  return rows_per_sequence <= (masked_right && !sm90_splits_masked(head_dim) ? 4 : 1) * kSm90ShortRows;
}

// Rows of a TMA box that never leaves its page, given that n_blocks begin at multiples of `block_n`: the greatest
// common divisor, if it is a multiple of the swizzle's period of 8 rows; else 0.
constexpr int page_box_rows(int page_size, int block_n) {
  const int rows = std::gcd(page_size, block_n);
  return rows % 8 == 0 ? rows : 0;
}

// Whether the wgmma family hands out work tiles of equal trip counts as it does variable ones, in bands and by a
// semaphore, instead of statically head by head (docs/tuning/fwd_sm90.md).
constexpr bool sm90_dynamic_scheduler_for_equal_tiles(int head_dim) { return 96 < head_dim && head_dim <= 128; }

// Whether the mma.sync family takes its short tiles; `block_m`: rows of the others.
constexpr bool takes_short_tile(const FwdProblem& problem, const Device& device, int block_m) {
  if (problem.batch_invariant) return false;
  return problem.blocks(block_m) <= device.multiprocessors || (problem.masked_right() && problem.rows() <= kShortRows);
}

// The same for the wgmma family. Not where equal short tiles, without a second consumer group, are two waves and the
// others one.
constexpr bool sm90_takes_short_tile(const FwdProblem& problem, const Device& device, const Sm90FwdTile& plain,
                                     const Sm90FwdTile& short_tile) {
  if (problem.batch_invariant) return false;
  const bool equal_tiles = !problem.masked_right() && short_tile.consumer_groups == 1;
  if (equal_tiles && problem.blocks(plain.block_m) <= device.multiprocessors &&
      problem.blocks(short_tile.block_m) > device.multiprocessors) {
    return false;
  }
  return sm90_prefers_short_tile(plain.head_dim, problem.rows(), problem.masked_right());
}

// Heads of the backward's grid, each with the same number of n_blocks: the sequences of a packed batch share the slots
// of a K/V head.
constexpr int64_t bwd_heads(bool is_varlen, int64_t batch, int64_t heads_k) {
  return is_varlen ? heads_k : batch * heads_k;
}

// How many n_blocks of a head run at a time: they read the same rows, and where they are ordered (deterministic mode)
// each adds to dQ after the ones before it, so that the last of them starts late by about one step for each
// (docs/tuning/bwd_sm90.md). A head of few steps under a causal mask is better off with few of them. With too few, the
// rows of all heads of a band leave the L2 cache as soon as n_blocks are no longer in step: at times with 8 of them,
// and earlier with groups of heads, which all have rows of their own, and in long sequences; a causal mask hides half
// of the rows. Without an order nothing waits: the more n_blocks read the same rows at a time, the less power the L2
// cache takes (measured with 128 keys). m_blocks: of one head; group: heads of q for one of K and V; block_n: keys of a
// CTA.
constexpr int kRunningNBlocks = 16;
constexpr int kMostRunningNBlocks = 32;

constexpr int running_n_blocks(bool is_ordered, bool is_causal, int64_t m_blocks, int64_t group, int block_n) {
  if (!is_ordered) return block_n <= 64 ? kRunningNBlocks : kMostRunningNBlocks;
  const int64_t fewest = is_causal ? 3 : 8, most = !is_causal ? kMostRunningNBlocks : group > 1 ? kRunningNBlocks : 8;
  const int64_t of_steps = product(m_blocks, group) / 8, of_length = m_blocks / 32;
  const int64_t wanted = of_steps > most ? most : of_steps < fewest ? fewest : of_steps;
  return static_cast<int>(of_length < wanted                ? wanted
                          : of_length < kMostRunningNBlocks ? of_length
                                                            : kMostRunningNBlocks);
}

// Heads of a band (HeadOrder), so that about `running` n_blocks of each head run at a time. resident_blocks: CTAs that
// the GPU holds at a time.
constexpr int interleave_width(int64_t resident_blocks, int64_t heads, int64_t blocks_per_head,
                               int running = kRunningNBlocks) {
  const int64_t most = blocks_per_head < running ? blocks_per_head : running;
  const int64_t filling = resident_blocks / (most < 1 ? 1 : most);
  const int64_t width = filling < heads ? filling : heads;
  return width < 1 ? 1 : static_cast<int>(width);
}

// Whether each CTA of the wgmma family takes whole heads and accumulates dQ in shared memory: where rows are few
// enough. A CTA for each n_block balances better, but takes half as long again with the passes before and after
// (docs/tuning/bwd_sm90.md). The sums of dQ have the order of the deterministic mode, but a subnormal number or the
// sign of a zero may differ from what global memory adds up: batch-invariant calls have one way.
constexpr bool prefers_dq_in_smem(const BwdProblem& problem, const Device& device) {
  if (problem.batch_invariant || problem.is_varlen || !problem.is_plain() || problem.accumulates_dkv) return false;
  if (problem.stage != BwdStage::kAll) return false;
  if (problem.heads != problem.heads_k || problem.seqlen_q == 0 || problem.seqlen_k == 0) return false;
  if (problem.seqlen_q > kSharedDqRows || problem.max_head_dim() > kSm90SharedDqTile.head_dim) return false;
  const int64_t heads = problem.batch * problem.heads, multiprocessors = device.multiprocessors;
  if (heads > kMaxGridBlocks) return false;
  const int64_t n_blocks = (problem.seqlen_k + kSm90SharedDqTile.block_n - 1) / kSm90SharedDqTile.block_n;
  const int64_t rounds = (heads + multiprocessors - 1) / multiprocessors;
  const int64_t waves = (heads * n_blocks + multiprocessors - 1) / multiprocessors;
  return 2 * rounds * n_blocks <= 3 * waves;
}

// Whether the wgmma family computes dQ in a pass of its own, which has 7 products instead of 5 but no fp32 sum to clear
// and to convert: where sequences are short and many, since each pass has a last wave of its own. Other bits than those
// of one pass: batch-invariant calls have one way, as calls that share a sum of dQ, and no other number of
// multiprocessors chooses another. Packed sequences count with their mean length.
constexpr int kTwoPassKeys = 512;          // at most, in a sequence
constexpr int kCausalTwoPassKeys = 1024;   // the same where a mask hides later keys
constexpr int kOrderedTwoPassKeys = 2048;  // the same in deterministic mode, whose one pass adds in order
constexpr int kTwoPassMBlocks = 384;       // of 128 rows, at least: three waves of most Hopper GPUs

constexpr bool prefers_dq_pass(const BwdProblem& problem) {
  if (problem.batch_invariant || !problem.is_plain() || problem.accumulates_dkv) return false;
  if (problem.stage != BwdStage::kAll) return false;
  const int head_dim = problem.max_head_dim();
  if (head_dim <= kSm90SharedDqTile.head_dim || head_dim > kSm90TwoPassTile.head_dim) return false;
  const int64_t sequences = problem.is_varlen && problem.batch > 0 ? problem.batch : 1;
  const int64_t keys = problem.seqlen_k / sequences, rows = problem.seqlen_q / sequences;
  const int64_t m_blocks = problem.batch * problem.heads * ((rows + kSm90DqBlockM - 1) / kSm90DqBlockM);
  if (m_blocks < kTwoPassMBlocks) return false;
  if (!problem.window.may_mask_right()) return keys <= kTwoPassKeys;
  return keys <= (problem.deterministic ? kOrderedTwoPassKeys : kCausalTwoPassKeys);
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
