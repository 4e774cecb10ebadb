// Which MLA decode kernel runs a call, and how it shares out the call. Plain C++17.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/block_range.h"
#include "plan/family.h"
#include "plan/grid.h"

namespace flash {
namespace plan {

constexpr int kMlaKeys = 32;               // of a step of mma.sync
constexpr int kMlaLargeSmem = 147 * 1024;  // of a tile of 32 rows
constexpr int kMlaWgmmaRows = 64, kMlaWgmmaKeys = 64, kMlaWgmmaStages = 2, kMlaWgmmaThreads = 384;
constexpr int kMlaWgmmaSmem = 227 * 1024;
constexpr int kMlaBoxCols = 64;  // 128 bytes, the period of the swizzle
constexpr int kMlaHeadDim = 64;  // by which kernels are selected and built

// Estimated, not measured. In keys, by the time that a multiprocessor takes to read them: until a thread block's first
// keys have arrived; launch and latency of the combine; a row's partial results, written and read.
constexpr int kMlaStartKeys = 128, kMlaCombineKeys = 128, kMlaLeastKeys = 128, kMaxMlaSplits = 128;
constexpr int kMlaPartialBytes = 2 * 512 * 4, kMlaKeyBytes = 1152;
// wgmma is 1.2 to 2.6 times as fast with 64 rows, 1.17 times with 16 over pages of one row (H200).
constexpr int kMlaWgmmaLeastRows = 16;

struct MlaProblem {
  int64_t batch, tokens, heads;  // tokens: of each request; of a packed batch in all
  int64_t capacity;              // keys of a request
  bool is_packed;
  int64_t num_splits;  // the most, 0 for any
  bool may_split;      // rows may depend on the batch
  bool batch_invariant = false;
  int page_size = 1;
  bool fits_page_maps = false;  // strides of the pages (tensor_map_holds())
  bool has_fp8_rows = false;    // which the wgmma kernel alone reads, one by one
};

struct MlaPlan {
  int tile_rows = 16, stages = 2, keys = kMlaKeys;  // keys: of a step
  int row_tiles = 0, splits = 1;                    // row_tiles: of a request; of a packed batch all
  int box_rows = 0;                                 // of a TMA box of keys; 0: keys are copied one by one
  Family family = Family::kMmaSync;
};

constexpr int64_t mla_quotient(int64_t x, int64_t y) { return (x + y - 1) / y; }

// `rows`: of a request. One token's rows decide for a batch-invariant call, and not the pages: the two kernels round
// differently.
inline MlaPlan mla_kernel(const Device& device, const MlaProblem& problem, int64_t rows, const char* forced) {
  MlaPlan plan;
  const auto is_forced = [forced](const char* name) { return forced != nullptr && std::strcmp(forced, name) == 0; };
  const bool has_wgmma = device.capability == kWgmmaCapability && device.smem_per_block >= kMlaWgmmaSmem &&
                         (device.wgmma_head_dims >> head_dim_index(kMlaHeadDim) & 1);
  const int64_t deciding = problem.batch_invariant ? problem.heads : rows;
  const bool has_boxes = problem.fits_page_maps && !problem.has_fp8_rows;
  const int box_rows = has_boxes ? page_box_rows(problem.page_size, kMlaWgmmaKeys) : 0;
  const bool prefers_wgmma = !is_forced("mma_sync") && (is_forced("wgmma") || deciding >= kMlaWgmmaLeastRows);
  if (has_wgmma && (prefers_wgmma || problem.has_fp8_rows)) {
    plan.family = Family::kWgmma;
    plan.box_rows = box_rows;
    plan.tile_rows = kMlaWgmmaRows, plan.stages = kMlaWgmmaStages, plan.keys = kMlaWgmmaKeys;
  } else if (device.smem_per_block >= kMlaLargeSmem) {
    plan.stages = 3;
    if (rows > 16) plan.tile_rows = 32;
  }
  return plan;
}

// Time, in keys, of all thread blocks one after the other, and of the combine. rows: of a tile.
constexpr int64_t mla_cost(const Device& device, const MlaPlan& plan, int64_t tiles, int64_t rows, int64_t capacity,
                           int64_t splits) {
  const int64_t keys = mla_quotient(mla_quotient(capacity, plan.keys), splits) * plan.keys;
  const int64_t cost = mla_quotient(tiles * splits, device.multiprocessors) * (kMlaStartKeys + keys);
  if (splits == 1) return cost;
  return cost + kMlaCombineKeys + tiles * splits * rows * kMlaPartialBytes / kMlaKeyBytes / device.multiprocessors;
}

// The fastest of one split and those that fill one to four waves.
constexpr int64_t mla_splits(const Device& device, const MlaPlan& plan, const MlaProblem& problem, int64_t tiles,
                             int64_t rows) {
  int64_t best = 1, best_cost = mla_cost(device, plan, tiles, rows, problem.capacity, 1);
  for (int waves = 1; waves <= 4; ++waves) {
    int64_t splits =
        std::min<int64_t>({waves * device.multiprocessors / tiles, problem.capacity / kMlaLeastKeys, kMaxMlaSplits});
    if (problem.num_splits > 0) splits = std::min(splits, problem.num_splits);
    if (splits <= best) continue;
    const int64_t cost = mla_cost(device, plan, tiles, rows, problem.capacity, splits);
    if (cost < best_cost) best = splits, best_cost = cost;
  }
  return best;
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null.
inline MlaPlan plan_mla(const Device& device, const MlaProblem& problem, const char* forced = nullptr) {
  const int64_t batch = std::max<int64_t>(problem.batch, 1);
  const int64_t rows = (problem.is_packed ? mla_quotient(problem.tokens, batch) : problem.tokens) * problem.heads;
  MlaPlan plan = mla_kernel(device, problem, rows, forced);
  const int64_t row_tiles = mla_quotient(rows, plan.tile_rows), tiles = std::max<int64_t>(batch * row_tiles, 1);
  plan.row_tiles = static_cast<int>(row_tiles);
  if (problem.is_packed) {
    plan.row_tiles = varlen_slot_count(static_cast<int>(problem.tokens * problem.heads),
                                       static_cast<int>(problem.batch), plan.tile_rows);
  }
  const int64_t tile_rows = std::min<int64_t>(rows, plan.tile_rows);
  if (problem.may_split) plan.splits = static_cast<int>(mla_splits(device, plan, problem, tiles, tile_rows));
  return plan;
}

}  // namespace plan
}  // namespace flash
