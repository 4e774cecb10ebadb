// How attention against a KV cache is spread over the GPU: thread blocks, shares, cuts and workspace, from sizes that
// the host knows. The lengths themselves are only read on the device. Plain C++17.
#pragma once

#include <cstdint>

#include "core/kv_schedule.h"
#include "plan/grid.h"
#include "plan/tiles.h"

namespace flash {
namespace plan {

constexpr int kReservedSmemBytes = 1024;  // what the driver takes of each thread block's shared memory

struct KvResidency {
  int blocks_per_sm;
  int stages;  // buffers of each ring
};

// As many thread blocks per multiprocessor as the registers were compiled for, if each still gets two buffers.
constexpr KvResidency kv_residency(const KvTile& tile, int smem_per_sm, int smem_per_block) {
  for (int blocks = tile.blocks_per_sm; blocks > 0; --blocks) {
    const int share = smem_per_sm / blocks - kReservedSmemBytes;
    const int limit = share < smem_per_block ? share : smem_per_block;
    const int stages = (limit - kv_smem_bytes(tile, 0)) / kv_stage_bytes(tile);
    if (stages >= 2 || blocks == 1) return {blocks, stages < kMaxKvStages ? stages : kMaxKvStages};
  }
  return {1, 0};
}

// What a call knows on the host.
struct KvProblem {
  int batch;
  int seqlen_q;
  int heads;
  int heads_k;
  int head_dim;
  int capacity;    // rows that the cache holds per sequence
  int num_splits;  // 0: chosen by shares; n: at most n parts per sequence
  bool batch_invariant;
  bool is_packed = false;  // seqlen_q is then the sum of the queries of all sequences
  int packed_keys = 0;     // of a packed sequence in the mean
};

struct KvDevice {
  int multiprocessors;
  int smem_per_sm;
  int smem_per_block;
};

struct KvPlan {
  int tile_size;      // index into kKvTiles
  int stages;         // 0: the device has too little shared memory
  int row_tiles;      // tiles of one K/V head and sequence of a dense batch
  int64_t items;      // of one K/V head: tiles of all sequences, or slots of a packed batch (varlen_first_slot())
  bool is_too_large;  // more than kMaxKvTiles: nothing below is set
  int thread_blocks;
  bool in_clusters;            // better launched in pairs, where the kernel can (kernels/decode/cluster_pair.h)
  bool combines_one_row;       // by a thread block of the merge, whose warps add up parts each
  int64_t min_blocks_per_cta;  // key blocks of a thread block
  SplitPoints split_points;
  int run_blocks;  // batch-invariant: key blocks that are summed before they are merged; else unbounded
  int max_runs;    // of one tile, when cuts.rule is kChunks
  int slot_rows;   // rows of a partial result
  int64_t slots;   // partial results that the workspace holds
};

// A thread block should have this many bytes of K and V to read, else the merge costs more than the split saves; half
// as many where tiles alone would leave half of the multiprocessors idle, because a key costs time rather than
// bandwidth.
constexpr int64_t kMinCtaBytes = 128 * 1024;
constexpr int kRunKeys = 512;
constexpr int kCombinedParts = 8;  // of a row that a warp of the merge reads at once
constexpr int64_t kMaxRunWorkspaceBytes = int64_t{64} << 20;
constexpr int64_t kMaxKvTiles = 0x7fffffff;  // of all K/V heads: their key blocks can be counted in 64 bits

constexpr int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Key blocks of a tile over a full cache; one without keys takes a place too.
constexpr int64_t kv_most_blocks(int capacity, int block_n) { return capacity > 0 ? ceil_div(capacity, block_n) : 1; }

constexpr int64_t kv_slot_floats(const KvTile& tile, int slot_rows) {
  return static_cast<int64_t>(slot_rows) * (tile.head_dim + 2);
}

// Batch-invariant: a tile is cut between all its runs, or not at all where it has one, where the call asks for no
// split, or where the partial results of all runs would take too much memory.
constexpr void plan_runs(const KvProblem& problem, const KvTile& tile, KvPlan& plan) {
  const int block_n = kv_block_n(tile);
  const int64_t tiles = static_cast<int64_t>(problem.batch) * plan.row_tiles * problem.heads_k;
  plan.run_blocks = kRunKeys / block_n;
  plan.max_runs = static_cast<int>(ceil_div(problem.capacity, kRunKeys));
  const int64_t slots = tiles * plan.max_runs;
  const int64_t slot_bytes = 4 * kv_slot_floats(tile, plan.slot_rows);
  const bool fits = slot_bytes == 0 || slots <= kMaxRunWorkspaceBytes / slot_bytes;
  const bool cut = fits && plan.max_runs > 1 && problem.num_splits != 1;
  plan.split_points = cut ? SplitPoints{SplitRule::kChunks, plan.run_blocks} : SplitPoints{SplitRule::kWhole, 0};
  plan.slots = cut ? slots : plan.thread_blocks;
}

// Thread blocks among which the line of work is shared: as many as are resident, or somewhat fewer where tiles of equal
// lengths then need no cut and no merge.
constexpr int64_t splitting_ctas(int64_t tiles, int64_t resident) {
  const int64_t whole = tiles > 0 ? ceil_div(tiles, ceil_div(tiles, resident)) : 0;
  return whole * 10 >= resident * 9 ? whole : resident;
}

// Whether sequences of equal lengths may be cut into halves, which two thread blocks merge between them
// (kv_is_cluster_half()): shares are rounded up, so that with somewhat more thread blocks than two for each tile they
// still are halves of tiles of fewer than 2 / (1 - 2 tiles / thread_blocks) key blocks. Where there are only shorter
// ones, pairs do not pay.
constexpr bool kv_in_clusters(int64_t tiles, int64_t thread_blocks) {
  return thread_blocks % 2 == 0 && 2 * tiles <= thread_blocks && 2 * tiles * 20 >= thread_blocks * 19;
}

constexpr KvPlan kv_plan(const KvProblem& problem, const KvDevice& device) {
  KvPlan plan{};
  const int group = problem.heads_k > 0 ? problem.heads / problem.heads_k : 1;
  const int64_t all_rows = static_cast<int64_t>(problem.seqlen_q) * group;
  const int64_t rows = problem.is_packed ? ceil_div(all_rows, problem.batch > 0 ? problem.batch : 1) : all_rows;
  plan.tile_size = kv_tile_size(problem.head_dim, rows);
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size);
  const KvResidency residency = kv_residency(tile, device.smem_per_sm, device.smem_per_block);
  const int block_n = kv_block_n(tile);
  plan.stages = residency.stages;
  plan.row_tiles = static_cast<int>(kv_row_tiles(problem.head_dim, rows));
  plan.items = problem.is_packed ? varlen_slot_count(static_cast<int>(all_rows), problem.batch, tile.rows())
                                 : static_cast<int64_t>(problem.batch) * plan.row_tiles;
  plan.slot_rows = static_cast<int>(rows < tile.rows() && !problem.is_packed ? rows : tile.rows());
  plan.is_too_large = plan.items > kMaxKvTiles / (problem.heads_k > 0 ? problem.heads_k : 1);
  if (plan.is_too_large) return plan;
  const bool by_shares = problem.num_splits == 0 && !problem.batch_invariant;
  // Of packed sequences of their mean length: these are cut as the same sequences in a dense batch.
  const int64_t tiles = static_cast<int64_t>(problem.batch) * plan.row_tiles * problem.heads_k;
  const int64_t least_bytes = 2 * tiles <= device.multiprocessors ? kMinCtaBytes / 2 : kMinCtaBytes;
  plan.min_blocks_per_cta = by_shares ? ceil_div(least_bytes, static_cast<int64_t>(block_n) * tile.head_dim * 4) : 1;
  // More thread blocks than the fullest cache has shares for would stay idle. The bound changes no share.
  const int64_t most_blocks = plan.items * problem.heads_k * kv_most_blocks(problem.capacity, block_n);
  const int64_t resident = static_cast<int64_t>(device.multiprocessors) * residency.blocks_per_sm;
  const int64_t sharing = by_shares ? splitting_ctas(tiles, resident) : resident;
  const int64_t useful = ceil_div(most_blocks, plan.min_blocks_per_cta);
  plan.thread_blocks = static_cast<int>(useful < sharing ? useful : sharing);
  // Decides in which order more than kCombinedParts parts are added up: by the mean, as a dense batch would.
  const int64_t mean_blocks =
      tiles * kv_most_blocks(problem.is_packed ? problem.packed_keys : problem.capacity, block_n);
  const int64_t merged = ceil_div(mean_blocks, plan.min_blocks_per_cta);
  plan.combines_one_row = tiles * kCombinedParts < (merged < sharing ? merged : sharing);
  plan.in_clusters = by_shares && kv_in_clusters(tiles, plan.thread_blocks);
  plan.run_blocks = kUnbounded;
  if (problem.batch_invariant) {
    plan_runs(problem, tile, plan);
    return plan;
  }
  plan.split_points = by_shares ? SplitPoints{SplitRule::kAnywhere, static_cast<int>(2 * plan.min_blocks_per_cta)}
                      : problem.num_splits == 1 ? SplitPoints{SplitRule::kWhole, 0}
                                                : SplitPoints{SplitRule::kParts, problem.num_splits};
  plan.slots = plan.split_points.rule == SplitRule::kWhole ? 0 : 2 * static_cast<int64_t>(plan.thread_blocks);
  return plan;
}

// Whether some tile of the fullest cache may be cut, so that partial results have to be merged.
constexpr bool kv_may_split(const KvPlan& plan, int capacity, int block_n) {
  const int64_t blocks = kv_most_blocks(capacity, block_n);
  switch (plan.split_points.rule) {
    case SplitRule::kWhole: return false;
    case SplitRule::kAnywhere: return blocks > plan.split_points.value;
    default: return blocks > 1;
  }
}

// A plan tensor: header, one record per thread block, then the workspace. Units of 4 bytes.
constexpr int64_t kv_schedule_words(const KvPlan& plan) {
  return static_cast<int64_t>(sizeof(SchedHeader) + plan.thread_blocks * sizeof(SchedEntry)) / 4;
}

constexpr int64_t kv_workspace_words(const KvPlan& plan, int head_dim) {
  return plan.slots * kv_slot_floats(kv_tile(head_dim, plan.tile_size), plan.slot_rows);
}

}  // namespace plan
}  // namespace flash
