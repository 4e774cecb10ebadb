// The plan of the decode kernels: tile, variant, the split of the n_blocks over the CTAs, the combine and the memory of
// all. It is made on the host, from sizes and options; only the device reads lengths. Plain C++17.
#pragma once

#include <cstdint>

#include "core/kv_schedule.h"
#include "plan/device.h"
#include "plan/kv_head_pairs.h"
#include "plan/kv_wgmma.h"
#include "plan/problem.h"

namespace flash {
namespace plan {

constexpr int kReservedSmemBytes = 1024;  // the driver's part of each CTA's shared memory

struct KvResidency {
  int blocks_per_sm;
  int stages;  // of each K/V ring
};

// As many CTAs per multiprocessor as the registers were compiled for, if each still gets two stages.
constexpr KvResidency kv_residency(const KvTile& tile, int smem_per_sm, int smem_per_block) {
  for (int blocks = tile.blocks_per_sm; blocks > 0; --blocks) {
    const int available = smem_per_sm / blocks - kReservedSmemBytes;
    const int limit = available < smem_per_block ? available : smem_per_block;
    const int stages = (limit - kv_smem_bytes(tile, 0)) / kv_stage_bytes(tile);
    if (stages >= 2 || blocks == 1) return {blocks, stages < kMaxKvStages ? stages : kMaxKvStages};
  }
  return {1, 0};
}

struct DecodePlan {
  // ---- the schedule: by the sizes alone ----
  int tile_size;       // index into kKvTiles
  int stages;          // 0: the GPU has too little shared memory
  int tile_heads;      // K/V heads of a tile: 1, or 2 neighbouring ones
  int head_tiles;      // tiles of all K/V heads
  int block_n;         // keys
  int row_tiles;       // tiles of one head tile and sequence of a dense batch
  int64_t work_items;  // row tiles of all sequences, or varlen slots; each of all K/V heads
  bool is_too_large;   // more than kMaxKvTiles: nothing below is set
  int thread_blocks;
  bool combines_one_row;       // all warps of a CTA of the combine add up one row
  int64_t min_blocks_per_cta;  // of each CTA
  SplitPoints split_points;
  int split_blocks;         // n_blocks of a fixed split (batch-invariant); else unbounded
  int max_splits;           // of one tile, when the split rule is kFixedSplits
  int slot_rows;            // rows of a partial result
  int64_t slots;            // partial results that the workspace holds
  bool combines;            // some tile of a full cache may be split
  int64_t combine_blocks;   // CTAs of the combine
  int64_t schedule_words;   // header and an entry for each CTA, in 4-byte words
  int64_t workspace_words;  // partial results

  // ---- the kernel: by the options too ----
  bool by_wgmma;     // the wgmma kernel; else KvVariant::
  bool is_plain;     // kPlain (kernels/decode/variant.h)
  bool swaps_ab;     // kSwapAb; then is_plain too
  bool masks_bits;   // kMaskBits
  bool in_clusters;  // CTAs are launched as clusters of two (kernels/decode/cluster_pair.h)
};

// A CTA should have this many bytes of K and V to read, else the combine costs more than the split saves; half as many
// where unsplit tiles would leave half of the multiprocessors idle, because there a key costs latency rather than
// bandwidth.
constexpr int64_t kMinCtaBytes = 128 * 1024;
constexpr int kSplitKeys = 512;
constexpr int64_t kMaxSplitWorkspaceBytes = int64_t{64} << 20;
constexpr int64_t kMaxKvTiles = 0x7fffffff;  // of all K/V heads: their n_blocks can be counted in 64 bits

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// n_blocks of a tile over a full cache; a fully masked tile takes one too.
constexpr int64_t kv_max_blocks(int capacity, int block_n) { return capacity > 0 ? ceil_div(capacity, block_n) : 1; }

constexpr int64_t kv_slot_floats(const KvTile& tile, int slot_rows) {
  return static_cast<int64_t>(slot_rows) * (tile.head_dim + 2);
}

// CTAs among which the linearised work is split: as many as are resident, or somewhat fewer where tiles of equal
// lengths then need no split and no combine.
constexpr int64_t splitting_ctas(int64_t tiles, int64_t resident) {
  const int64_t unsplit_ctas = tiles > 0 ? ceil_div(tiles, ceil_div(tiles, resident)) : 0;
  return unsplit_ctas * 10 >= resident * 9 ? unsplit_ctas : resident;
}

// Whether sequences of equal lengths may be split into halves that a 2-CTA cluster combines (kv_is_cluster_half()): CTA
// ranges are rounded up, so that with somewhat more CTAs than two for each tile they still are halves of tiles of fewer
// than 2 / (1 - 2 tiles / thread_blocks) n_blocks. Where there are only shorter tiles, clusters do not pay.
constexpr bool kv_in_clusters(int64_t tiles, int64_t thread_blocks) {
  return thread_blocks % 2 == 0 && 2 * tiles <= thread_blocks && 2 * tiles * 20 >= thread_blocks * 19;
}

// A tile has two K/V heads where their rows fit the smallest one and there are still tiles for all CTAs that are
// resident: with fewer, more of them would be split. Not in batch-invariant mode, where a row's arithmetic may not
// depend on the batch, nor in the forward, where it is that of the same rows in a packed batch.
constexpr int kv_tile_heads(const DecodeProblem& problem, const Device& device) {
  const KvTile tile = kv_tile(problem.head_dim, 0, problem.kv_dtype);
  if (!kv_may_pair_heads(tile) || problem.batch_invariant || problem.is_forward) return 1;
  if (problem.heads_k % 2 != 0 || problem.rows() > tile.rows() / 2) return 1;
  const KvResidency residency = kv_residency(tile, device.smem_per_multiprocessor, device.smem_per_block);
  const int64_t resident = static_cast<int64_t>(device.multiprocessors) * residency.blocks_per_sm;
  const int64_t tiles = static_cast<int64_t>(problem.batch) * (problem.heads_k / 2);
  return tiles >= ceil_div(resident * 9, 10) ? 2 : 1;  // nine tenths as in splitting_ctas()
}

// Tiles and their rows.
constexpr void plan_tiles(const DecodeProblem& problem, const Device& device, DecodePlan& plan) {
  plan.tile_heads = kv_tile_heads(problem, device);
  plan.head_tiles = problem.heads_k / plan.tile_heads;
  const int64_t rows = problem.rows() * plan.tile_heads;
  plan.tile_size = kv_tile_size(problem.head_dim, rows, problem.kv_dtype);
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  plan.stages = kv_residency(tile, device.smem_per_multiprocessor, device.smem_per_block).stages;
  plan.row_tiles = static_cast<int>(kv_row_tiles(problem.head_dim, rows, problem.kv_dtype));
  plan.work_items = problem.is_packed
                        ? varlen_slot_count(static_cast<int>(problem.all_rows()), problem.batch, tile.rows())
                        : static_cast<int64_t>(problem.batch) * plan.row_tiles;
  plan.slot_rows = static_cast<int>(rows < tile.rows() && !problem.is_packed ? rows : tile.rows());
  plan.is_too_large = plan.work_items > kMaxKvTiles / (plan.head_tiles > 0 ? plan.head_tiles : 1);
  plan.block_n = kv_block_n(tile) / plan.tile_heads;
}

// Number of CTAs, and where they may split a tile. `even`: evenly, wherever that splits a tile.
constexpr void plan_splits(const DecodeProblem& problem, const Device& device, bool even, DecodePlan& plan) {
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  const int block_n = plan.block_n;
  // Packed sequences count with their mean length, so that they are split as the same sequences in a dense batch.
  const int64_t tiles = static_cast<int64_t>(problem.batch) * plan.row_tiles * plan.head_tiles;
  const int64_t least_bytes = 2 * tiles <= device.multiprocessors ? kMinCtaBytes / 2 : kMinCtaBytes;
  plan.min_blocks_per_cta =
      even ? ceil_div(least_bytes, static_cast<int64_t>(kv_block_n(tile)) * tile.head_dim * 2 * tile.kv_bytes) : 1;
  // More CTAs than a full cache has CTA ranges for would idle. The bound changes no range.
  const int64_t max_blocks = plan.work_items * plan.head_tiles * kv_max_blocks(problem.capacity, block_n);
  const KvResidency residency = kv_residency(tile, device.smem_per_multiprocessor, device.smem_per_block);
  const int64_t resident = static_cast<int64_t>(device.multiprocessors) * residency.blocks_per_sm;
  const int64_t ctas = even ? splitting_ctas(tiles, resident) : resident;
  const int64_t useful = ceil_div(max_blocks, plan.min_blocks_per_cta);
  plan.thread_blocks = static_cast<int>(useful < ctas ? useful : ctas);
  // Decides the order in which more than kCombineLoads partial results are added up: by the mean length, as a dense
  // batch would.
  const int64_t mean_blocks =
      tiles * kv_max_blocks(problem.is_packed ? problem.packed_keys : problem.capacity, block_n);
  const int64_t work_parts = ceil_div(mean_blocks, plan.min_blocks_per_cta);
  plan.combines_one_row = tiles * kCombineLoads < (work_parts < ctas ? work_parts : ctas);
  plan.in_clusters = even && kv_in_clusters(tiles, plan.thread_blocks);
  plan.split_blocks = kUnbounded;
  plan.split_points = even ? SplitPoints{SplitRule::kAnywhere, static_cast<int>(2 * plan.min_blocks_per_cta)}
                      : problem.num_splits == 1 ? SplitPoints{SplitRule::kNowhere, 0}
                                                : SplitPoints{SplitRule::kEqualSplits, problem.num_splits};
  plan.slots = plan.split_points.rule == SplitRule::kNowhere ? 0 : 2 * static_cast<int64_t>(plan.thread_blocks);
}

// Batch-invariant: a tile is split at all its fixed split points, or not at all where it has none, where the call asks
// for no split, or where the partial results would take too much memory.
constexpr void plan_fixed_splits(const DecodeProblem& problem, DecodePlan& plan) {
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  const int64_t tiles = static_cast<int64_t>(problem.batch) * plan.row_tiles * plan.head_tiles;
  plan.split_blocks = kSplitKeys / plan.block_n;
  plan.max_splits = static_cast<int>(ceil_div(problem.capacity, kSplitKeys));
  const int64_t slots = tiles * plan.max_splits;
  const int64_t slot_bytes = 4 * kv_slot_floats(tile, plan.slot_rows);
  const bool fits = slot_bytes == 0 || slots <= kMaxSplitWorkspaceBytes / slot_bytes;
  const bool is_split = fits && plan.max_splits > 1 && problem.num_splits != 1;
  plan.split_points =
      is_split ? SplitPoints{SplitRule::kFixedSplits, plan.split_blocks} : SplitPoints{SplitRule::kNowhere, 0};
  plan.slots = is_split ? slots : plan.thread_blocks;
}

// Whether some tile of a full cache may be split, which needs a combine.
constexpr bool kv_may_split(const SplitPoints& split_points, int64_t max_blocks) {
  switch (split_points.rule) {
    case SplitRule::kNowhere: return false;
    case SplitRule::kAnywhere: return max_blocks > split_points.value;
    default: return max_blocks > 1;
  }
}

// The combine and the memory of partial results.
constexpr void plan_combine(const DecodeProblem& problem, DecodePlan& plan) {
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  plan.combines = kv_may_split(plan.split_points, kv_max_blocks(problem.capacity, plan.block_n));
  plan.schedule_words = static_cast<int64_t>(sizeof(SchedHeader) + plan.thread_blocks * sizeof(SchedEntry)) / 4;
  plan.workspace_words = plan.slots * kv_slot_floats(tile, plan.slot_rows);
  if (!plan.combines) return;
  plan.combine_blocks = kv_combine_grid(plan.split_points.rule, problem.is_packed, static_cast<int>(plan.work_items),
                                        plan.head_tiles, plan.thread_blocks, plan.slot_rows, plan.combines_one_row);
}

// Whether KvVariant::kPlain supports the call.
constexpr bool kv_is_plain(const DecodeProblem& problem, const DecodePlan& plan) {
  const DecodeOptions& options = problem.options;
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  const bool whole_steps =
      options.page_size == 0 || (options.page_size % kv_page_rows(tile) == 0 && !options.has_leftpad);
  const bool any_split_point =
      plan.split_points.rule == SplitRule::kAnywhere || plan.split_points.rule == SplitRule::kNowhere;
  const int64_t max_blocks = plan.work_items * plan.head_tiles * (problem.capacity / plan.block_n + 1);
  return tile.has_plain && !options.v_per_channel && !problem.is_packed && !options.has_score_mod &&
         !options.has_rotary && !options.has_mask_bits && problem.head_dim == tile.head_dim && options.q_vectors &&
         options.kv_vector_bytes == 16 && whole_steps && any_split_point && plan.split_blocks == kUnbounded &&
         max_blocks < kMaxBlocks32;
}

// The variant of the kernel.
constexpr void plan_variant(const DecodeProblem& problem, const Device& device, DecodePlan& plan) {
  plan.by_wgmma = kv_takes_wgmma(problem, device);
  plan.is_plain = kv_is_plain(problem, plan);
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  const bool has_hopper_code = device.capability >= 90;  // clusters; and kSwapAb, which is not measured before
  plan.swaps_ab = plan.is_plain && has_hopper_code && kv_may_swap_ab(tile) && plan.slot_rows <= kKvSwapRows;
  plan.masks_bits = problem.options.has_mask_bits;
  plan.in_clusters =
      plan.in_clusters && plan.combines && has_hopper_code && kv_may_cluster(plan.is_plain, plan.tile_size);
}

inline DecodePlan plan_decode(const DecodeProblem& problem, const Device& device) {
  DecodePlan plan{};
  plan_tiles(problem, device, plan);
  if (plan.is_too_large) return plan;
  const bool even = problem.num_splits == 0 && !problem.batch_invariant;
  plan_splits(problem, device, even, plan);
  if (problem.batch_invariant) plan_fixed_splits(problem, plan);
  plan_combine(problem, plan);
  plan_variant(problem, device, plan);
  return plan;
}

}  // namespace plan
}  // namespace flash
