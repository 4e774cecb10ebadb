// The plan of a forward with tangents by the wgmma family: a FwdPlan, of one kernel. Plain C++17.
#pragma once

#include <cstdint>
#include <cstring>

#include "plan/fwd_plan.h"

namespace flash {
namespace plan {

// Two consumers of 64 rows. Registers hold O and its tangent, and S and its tangent or both in 16 bits. Q, K and V have
// tangents of the same size next to them in shared memory. O has a separate buffer: the next Q may land before it left.
constexpr Sm90FwdTile kSm90JvpFwdTiles[] = {
    {64, 128, 128, 2, 1, false, 1, 0, 128},
    {128, 128, 64, 2, 1, false, 1, 0, 128},
};

// Of the smallest head dim that holds `head_dim`; head_dim 0: there is none.
constexpr Sm90FwdTile sm90_jvp_fwd_tile(int head_dim) {
  for (const Sm90FwdTile& tile : kSm90JvpFwdTiles) {
    if (head_dim <= tile.head_dim) return tile;
  }
  return Sm90FwdTile{};
}

// sizeof(sm90::FwdStorage) with a tangent for each operand.
constexpr int sm90_jvp_fwd_smem_bytes(Sm90FwdTile tile, Dtype dtype) {
  tile.head_dim *= 2;
  return sm90_fwd_smem_bytes(tile, FwdVariant::kPlain, dtype);
}

constexpr int64_t jvp_fwd_work_tiles(const FwdProblem& problem, const Sm90FwdTile& tile) {
  const int64_t tiles_of_head = m_blocks(problem.is_varlen, problem.is_varlen ? static_cast<int>(problem.batch) : 1,
                                         static_cast<int>(problem.seqlen_q), tile.block_m);
  return product(tiles_of_head, problem.heads, problem.is_varlen ? 1 : problem.batch);
}

// Whether these kernels support the call. `forced`: the value of FLASH_ATTN_FAMILY, or null.
inline bool jvp_fwd_supports(const FwdProblem& problem, const Device& device, const char* forced) {
  const Sm90FwdTile tile = sm90_jvp_fwd_tile(problem.max_head_dim());
  if (forced != nullptr && std::strcmp(forced, "mma_sync") == 0) return false;
  return tile.head_dim > 0 && device.capability == kWgmmaCapability && has_wgmma_kernels(device, tile.head_dim) &&
         problem.has_queries() && problem.has_keys() && !problem.has_score_mod() && problem.fits_tensor_maps &&
         jvp_fwd_work_tiles(problem, tile) <= kMaxWorkTiles;
}

// Of a call that they support.
inline FwdPlan plan_jvp_fwd(const FwdProblem& problem, const Device& device) {
  const Sm90FwdTile tile = sm90_jvp_fwd_tile(problem.max_head_dim());
  FwdPlan plan;
  plan.family = Family::kWgmma;
  plan.dtype = problem.dtype;
  plan.head_dim = plan.head_dim_v = tile.head_dim;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.kv_stages = tile.kv_stages;
  plan.q_stages = tile.q_stages;
  plan.threads = sm90_fwd_threads(tile, plan.variant);
  plan.smem_bytes = sm90_jvp_fwd_smem_bytes(tile, problem.dtype);
  plan.num_work_tiles = jvp_fwd_work_tiles(problem, tile);
  plan.grid = plan.num_work_tiles < device.multiprocessors ? plan.num_work_tiles : device.multiprocessors;
  FwdProblem bytes = problem;  // the keys of a head and their tangents
  bytes.head_dim *= 2;
  bytes.head_dim_v *= 2;
  set_tile_order(plan, bytes, device);
  plan.pdl = problem.is_varlen || plan.is_dynamic;  // after run_prepare()
  plan.stages.add(Stage::kPrepare, plan.pdl);
  plan.stages.add(Stage::kAttention);
  plan.workspace_bytes = 4 * (varlen_words(problem.is_varlen, problem.batch) + plan.is_dynamic);
  return plan;
}

}  // namespace plan
}  // namespace flash
