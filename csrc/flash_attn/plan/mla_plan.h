// How the mma.sync MLA decode kernel shares out a call. Plain C++17.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/device.h"

namespace flash {
namespace plan {

constexpr int kMlaKeys = 32;                            // of a step
constexpr int kMlaLargeSmem = 147 * 1024;               // of a tile of 32 rows
constexpr int kMlaLeastSteps = 4, kMaxMlaSplits = 128;  // estimated, not measured

struct MlaPlan {
  int tile_rows = 16, row_tiles = 0, splits = 1;
};

// rows: tokens x heads of a request. num_splits: the most, 0 for any. may_split: rows may depend on the batch.
constexpr MlaPlan plan_mla(const Device& device, int batch, int64_t rows, int64_t capacity, int64_t num_splits,
                           bool may_split) {
  MlaPlan plan;
  if (rows > 16 && device.smem_per_block >= kMlaLargeSmem) plan.tile_rows = 32;
  plan.row_tiles = static_cast<int>((rows + plan.tile_rows - 1) / plan.tile_rows);
  const int64_t tiles = std::max<int64_t>(static_cast<int64_t>(batch) * plan.row_tiles, 1);
  const int64_t steps = (capacity + kMlaKeys - 1) / kMlaKeys;
  int64_t splits = std::min<int64_t>({device.multiprocessors / tiles, steps / kMlaLeastSteps, kMaxMlaSplits});
  if (num_splits > 0) splits = std::min(splits, num_splits);
  if (may_split) plan.splits = static_cast<int>(std::max<int64_t>(splits, 1));
  return plan;
}

}  // namespace plan
}  // namespace flash
