// Grids as plain arithmetic. Plain C++17.
#pragma once

#include <cstdint>

#include "common/block_range.h"

namespace flash {
namespace plan {

constexpr int64_t kMaxGridBlocks = 0x7fffffff;  // of gridDim.x; the kernels use one dimension only

constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

// Row blocks per head: exact for dense batches, varlen slots (see varlen_slot_count) for packed ones.
constexpr int64_t fwd_row_blocks(bool is_varlen, int batch, int seqlen_q, int block_m) {
  return is_varlen ? varlen_slot_count(seqlen_q, batch, block_m)
                   : static_cast<int64_t>(batch) * ((static_cast<int64_t>(seqlen_q) + block_m - 1) / block_m);
}

}  // namespace plan
}  // namespace flash
