// How the mma.sync MLA decode kernel shares out a call. Plain C++17.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/block_range.h"
#include "plan/device.h"

namespace flash {
namespace plan {

constexpr int kMlaKeys = 32;                            // of a step
constexpr int kMlaLargeSmem = 147 * 1024;               // of a tile of 32 rows
constexpr int kMlaLeastSteps = 4, kMaxMlaSplits = 128;  // estimated, not measured

struct MlaProblem {
  int64_t batch, tokens, heads;  // tokens: of each request; of a packed batch in all
  int64_t capacity;              // keys of a request
  bool is_packed;
  int64_t num_splits;  // the most, 0 for any
  bool may_split;      // rows may depend on the batch
};

struct MlaPlan {
  int tile_rows = 16, stages = 2, row_tiles = 0, splits = 1;  // row_tiles: of a request; of a packed batch all
};

constexpr MlaPlan plan_mla(const Device& device, const MlaProblem& problem) {
  const auto quotient = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  MlaPlan plan;
  const int64_t batch = std::max<int64_t>(problem.batch, 1);
  const int64_t rows = (problem.is_packed ? quotient(problem.tokens, batch) : problem.tokens) * problem.heads;
  if (device.smem_per_block >= kMlaLargeSmem) {
    plan.stages = 3;
    if (rows > 16) plan.tile_rows = 32;
  }
  const int64_t row_tiles = quotient(rows, plan.tile_rows);
  plan.row_tiles = static_cast<int>(row_tiles);
  if (problem.is_packed) {
    plan.row_tiles = varlen_slot_count(static_cast<int>(problem.tokens * problem.heads),
                                       static_cast<int>(problem.batch), plan.tile_rows);
  }
  const int64_t steps = quotient(problem.capacity, kMlaKeys), tiles = std::max<int64_t>(batch * row_tiles, 1);
  int64_t splits = std::min<int64_t>({device.multiprocessors / tiles, steps / kMlaLeastSteps, kMaxMlaSplits});
  if (problem.num_splits > 0) splits = std::min(splits, problem.num_splits);
  if (problem.may_split) plan.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  return plan;
}

}  // namespace plan
}  // namespace flash
