// Policy of the wgmma backward: the schedule of a call, and how many n_blocks of a head run at a time. Plain C++17.
// Every threshold names its measurement, H200 unless it says H100; docs/tuning/bwd_sm90.md lists the alternatives that
// were tried.
#pragma once

#include <cstdint>

#include "plan/bwd_tiles.h"
#include "plan/device.h"
#include "plan/grid.h"
#include "plan/problem.h"

namespace flash {
namespace plan {

// kOnePass: dK, dV and dQ by one kernel, dQ summed in global memory. kSharedDq: the same, but a CTA takes whole heads
// and sums dQ in shared memory. kTwoPass: dK and dV by one kernel, dQ by another one: 7 products instead of 5, but no
// fp32 sum to clear and convert. Above head dim 128 every call is kTwoPass (has_dq_pass()).
enum class BwdSchedule { kOnePass, kSharedDq, kTwoPass };

enum class BwdMaskKind { kAny, kOpenRight, kMaskedRight };
enum class BwdMode { kAny, kDefault, kDeterministic };

// Short sequences leave kOnePass.
struct BwdThreshold {
  BwdSchedule schedule;
  int head_dim;  // of the kernel
  BwdMaskKind mask;
  BwdMode mode;
  int64_t longest;  // rows of a sequence for kSharedDq, keys for kTwoPass
  const char* figure;
};

constexpr BwdThreshold kBwdThresholds[] = {
    {BwdSchedule::kSharedDq, 64, BwdMaskKind::kAny, BwdMode::kAny, kSharedDqRows,
     "full 291 to 372, causal 174 to 254 TFLOPS"},
    {BwdSchedule::kTwoPass, 128, BwdMaskKind::kOpenRight, BwdMode::kAny, 256,
     "full s 128 1.12 times as fast, s 256 1.00, s 512 0.94 (H200)"},
    {BwdSchedule::kTwoPass, 128, BwdMaskKind::kMaskedRight, BwdMode::kDefault, 256,
     "causal s 128, 256 1.18, 1.14 times as fast, s 512 0.93, s 1024 0.92 (H200; s 512 alone with two buffers of K)"},
    {BwdSchedule::kTwoPass, 128, BwdMaskKind::kMaskedRight, BwdMode::kDeterministic, 2048,
     "not published: one pass adds to dQ in order, two passes add nothing"},
};
static_assert(kBwdThresholds[0].head_dim == kSm90SharedDqTile.head_dim);
static_assert(kBwdThresholds[1].head_dim == kSm90TwoPassTile.head_dim);

// The longest sequence of this schedule; 0: no call of this kind takes it.
constexpr int64_t longest_sequence(BwdSchedule schedule, int max_head_dim, bool masked_right, bool deterministic) {
  const int head_dim = sm90_bwd_tile(max_head_dim, max_head_dim).head_dim;
  const BwdMaskKind mask = masked_right ? BwdMaskKind::kMaskedRight : BwdMaskKind::kOpenRight;
  const BwdMode mode = deterministic ? BwdMode::kDeterministic : BwdMode::kDefault;
  for (const BwdThreshold& row : kBwdThresholds) {
    const bool fits_mask = row.mask == BwdMaskKind::kAny || row.mask == mask;
    const bool fits_mode = row.mode == BwdMode::kAny || row.mode == mode;
    if (row.schedule == schedule && row.head_dim == head_dim && fits_mask && fits_mode) return row.longest;
  }
  return 0;
}

constexpr int64_t longest_sequence(BwdSchedule schedule, const BwdProblem& problem) {
  return longest_sequence(schedule, problem.max_head_dim(), problem.window.may_mask_right(), problem.deterministic);
}

// Whether the length may choose the schedule. Schedules differ in their bits: batch-invariant calls and calls that
// share a sum of dQ always take kOnePass. The short schedules have no dropout, score modifiers, masks as data or sums
// of dK and dV.
constexpr bool may_leave_one_pass(const BwdProblem& problem) {
  return !problem.batch_invariant && problem.is_plain() && !problem.has_mask() && !problem.accumulates_dkv &&
         problem.stage == BwdStage::kAll;
}

// kSharedDq: dense batches without grouped heads. CTAs of whole heads balance worse than one for each n_block, but that
// takes half as long again with the kernels before and after: they may take up to 1.5 times as many waves. Their order
// is that of the deterministic mode.
constexpr bool prefers_dq_in_smem(const BwdProblem& problem, const Device& device) {
  if (!may_leave_one_pass(problem) || problem.is_varlen || problem.heads != problem.heads_k) return false;
  if (problem.seqlen_q == 0 || problem.seqlen_k == 0) return false;
  if (problem.seqlen_q > longest_sequence(BwdSchedule::kSharedDq, problem)) return false;
  const int64_t heads = problem.batch * problem.heads, multiprocessors = device.multiprocessors;
  if (heads > kMaxGridBlocks) return false;
  const int64_t n_blocks = (problem.seqlen_k + kSm90SharedDqTile.block_n - 1) / kSm90SharedDqTile.block_n;
  const int64_t rounds = (heads + multiprocessors - 1) / multiprocessors;
  const int64_t waves = (heads * n_blocks + multiprocessors - 1) / multiprocessors;
  return 2 * rounds * n_blocks <= 3 * waves;
}

// kTwoPass at head dim 128: many short sequences, since each kernel has a last wave. The number of multiprocessors must
// not choose the bits, so the bound is a constant: three waves of m_blocks of 128 rows on most Hopper GPUs. Packed
// sequences count with their mean length.
constexpr int kTwoPassMBlocks = 384;

constexpr bool prefers_dq_pass(const BwdProblem& problem) {
  const int64_t longest = longest_sequence(BwdSchedule::kTwoPass, problem);
  if (!may_leave_one_pass(problem) || longest == 0) return false;
  const int64_t keys = problem.keys(), rows = problem.rows();
  const int64_t m_blocks = problem.batch * problem.heads * ((rows + kSm90DqBlockM - 1) / kSm90DqBlockM);
  return m_blocks >= kTwoPassMBlocks && keys <= longest;
}

// sm90_long_bwd_tile(): of many rows, packed ones by their mean length. H200, relative to the other tile.
// kSm90TallBwdTile: causal 1024 0.97, 2048 1.005, 4096 1.024, 8192 1.063, 16384 1.052; without a mask 0.95 to 1.0, with
// a window 0.97. kSm90OneKBwdTile: full 2048 1.005, 4096 1.016, 8192 to 32768 1.021 to 1.025, causal 2048 0.993, 16384
// 1.023: a step is shorter, the way from one work tile to the next is longer.
constexpr int kLongRows = 4096;
constexpr int kOneKRows = 2048;

constexpr bool prefers_long_tile(const BwdProblem& problem) {
  const int64_t rows = problem.rows();
  const bool is_causal = problem.window.may_mask_right();
  if (problem.window.may_mask_left() || problem.max_head_dim() > kSm90OneKBwdTile.head_dim) return false;
  if (problem.max_head_dim() <= kSm90TallBwdTile.head_dim) {
    return may_leave_one_pass(problem) && is_causal && rows >= kLongRows;
  }
  return problem.is_plain() && !problem.has_mask() && !problem.accumulates_dkv &&
         rows >= (is_causal ? kLongRows : kOneKRows);
}

// n_blocks of a head that run at a time: they read the same rows, and in deterministic mode each adds to a tile of dQ
// after the one before it, so that the last one starts about one step later for each of them.
// - Few steps: as many n_blocks as an eighth of the steps, within the bounds of the row.
// - Too few n_blocks: the rows of all heads of a band leave L2 as soon as the n_blocks are out of step, first with
//   grouped heads, whose rows differ, and in long sequences, which have one for 32 m_blocks. A mask on the right hides
//   half of the rows.
struct RunningNBlocks {
  bool masked_right;
  bool grouped_heads;
  int fewest;
  int most;
  const char* figure;
};

constexpr RunningNBlocks kOrderedNBlocks[] = {
    {false, false, 8, 32, "full s 16384 0.76 to 0.98 of the other mode's speed (H100)"},
    {false, true, 8, 32, "the same row without groups"},
    {true, false, 3, 8, "d 64 causal s 1024 265 to 288 TFLOPS"},
    {true, true, 3, 16, "32 heads on 8, causal s 8192: 0.86 to 0.96 of the other mode's speed (H100)"},
};
constexpr int kStepsOfNBlock = 8;
constexpr int kMBlocksOfNBlock = 32;  // causal s 128k 0.73 to 0.98 of the other mode's speed (H100)

// Of any call with an order.
constexpr int kMostOrderedNBlocks = 32;

// Without an order nothing waits, and the more n_blocks read the same rows at a time, the less power L2 takes: d 128
// full s 8192 492 to 510, causal s 16384 493 to 558 TFLOPS with 32 of them. More of them exist only in sequences
// of more than 4096 keys: 32 heads of 32768 1.06 (d 128) and 1.12 (d 64) times as fast, 16384 0.98 to 1.02 (H200). Not
// measured with 64 keys.
constexpr int kMostRunningNBlocks = 128;

// Under a map of blocks the n_blocks of a head are out of step, and what they read and add to stays in L2 only if all
// that run are of one head or two: 16 heads, s 32k, blocks at 10, 25, 50 % 1.36, 1.26, 1.23 times as fast (H200, with
// kListedPlain; by a simulation of L2 misses fall from 0.6 to 0.7 of the accesses of a step to 0.03 to 0.1).
constexpr int kRunningOutOfStep = 128;

// m_blocks: of one head; group: query heads of a K/V head; block_n: keys of a CTA.
constexpr int running_n_blocks(bool is_ordered, bool masked_right, int64_t m_blocks, int64_t group, int block_n) {
  if (!is_ordered) return block_n <= 64 ? kRunningNBlocks : kMostRunningNBlocks;
  const RunningNBlocks& row = kOrderedNBlocks[2 * masked_right + (group > 1)];
  const int64_t steps = product(m_blocks, group) / kStepsOfNBlock;
  const int64_t by_steps = steps < row.fewest ? row.fewest : steps < row.most ? steps : row.most;
  const int64_t by_length = m_blocks / kMBlocksOfNBlock;
  const int64_t running = by_length > by_steps ? by_length : by_steps;
  return running < kMostOrderedNBlocks ? static_cast<int>(running) : kMostOrderedNBlocks;
}

}  // namespace plan
}  // namespace flash
