// Which calls the wgmma decode kernel runs. Plain C++17.
#pragma once

#include "plan/device.h"
#include "plan/kv_tiles.h"
#include "plan/problem.h"

namespace flash {
namespace plan {

constexpr int kKvWgmmaThreads = 384, kKvWgmmaStages = 5, kKvWgmmaSmem = 212 * 1024;
constexpr int kKvWgmmaRows = 64;  // packed rows of a tile

constexpr bool has_kv_wgmma(int head_dim) { return head_dim == 64 || head_dim == 128; }

// Its tile is the largest of kKvTiles. A batch-invariant row may not depend on the number of rows.
constexpr bool kv_takes_wgmma(const DecodeProblem& problem, const Device& device) {
  const DecodeOptions& options = problem.options;
  if (!has_kv_wgmma(problem.head_dim) || is_eight_bit(problem.kv_dtype) || problem.batch_invariant) return false;
  const bool has_kernel = device.capability == kWgmmaCapability && device.smem_per_block >= kKvWgmmaSmem &&
                          (device.wgmma_head_dims >> head_dim_index(problem.head_dim) & 1);
  const int size = kv_tile_size(problem.head_dim, problem.rows());
  return has_kernel && kv_tile(problem.head_dim, size).rows() == kKvWgmmaRows && !options.has_score_mod &&
         !options.has_rotary && !options.has_mask_bits && options.q_vectors && options.kv_vector_bytes == 16;
}

}  // namespace plan
}  // namespace flash
