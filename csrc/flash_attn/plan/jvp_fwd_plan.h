// The plan of a forward with tangents: a FwdPlan, of one kernel of either family. Plain C++17.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>

#include "plan/fwd_plan.h"

namespace flash {
namespace plan {

// mma.sync family. The registers of a warp hold O and its tangent, S and its tangent, and P and H in 16 bits.
constexpr FwdTile kJvpFwdTiles[] = {{64, 128, 32, 4, 2}, {128, 64, 32, 4, 2}};
// Where a multiprocessor has shared memory for one thread block of the row above alone: as many warps in one.
constexpr FwdTile kSmallJvpFwdTile = {128, 128, 32, 8, 1};

constexpr bool has_small_jvp_fwd_tile(int head_dim) { return head_dim == kSmallJvpFwdTile.head_dim; }

// Of the smallest head dim that holds `head_dim`; head_dim 0: there is none.
constexpr FwdTile jvp_fwd_tile(int head_dim, bool is_small = false) {
  if (is_small && has_small_jvp_fwd_tile(head_dim)) return kSmallJvpFwdTile;
  for (const FwdTile& tile : kJvpFwdTiles) {
    if (head_dim <= tile.head_dim) return tile;
  }
  return FwdTile{};
}

// A tangent for each operand.
constexpr int jvp_fwd_smem_bytes(const FwdTile& tile, Dtype dtype) { return 2 * fwd_smem_bytes(tile, dtype); }

// wgmma family. Two consumers of 64 rows. Registers hold O and its tangent, and S and its tangent or both in 16 bits.
// Q, K and V have tangents of the same size next to them in shared memory. O has a separate buffer: the next Q may land
// before it left.
constexpr Sm90FwdTile kSm90JvpFwdTiles[] = {
    {64, 128, 128, 2, 1, false, 1, 0, 128},
    {128, 128, 64, 2, 1, false, 1, 0, 128},
};

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

// `forced`: the value of FLASH_ATTN_FAMILY, or null.
inline bool jvp_fwd_takes_wgmma(const FwdProblem& problem, const Device& device, const char* forced) {
  const Sm90FwdTile tile = sm90_jvp_fwd_tile(problem.max_head_dim());
  if (forced != nullptr && std::strcmp(forced, "mma_sync") == 0) return false;
  return device.capability == kWgmmaCapability && has_wgmma_kernels(device, tile.head_dim) &&
         problem.fits_tensor_maps && jvp_fwd_work_tiles(problem, tile) <= kMaxWorkTiles;
}

inline FwdPlan plan_jvp_fwd_wgmma(const FwdProblem& problem, const Device& device) {
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

inline FwdPlan plan_jvp_fwd_mma_sync(const FwdProblem& problem, const Device& device) {
  constexpr int kReserved = 1024;  // of a thread block's shared memory, by the driver
  const FwdTile wanted = jvp_fwd_tile(problem.max_head_dim());
  const int bytes = wanted.blocks_per_sm * (jvp_fwd_smem_bytes(wanted, problem.dtype) + kReserved);
  FwdPlan plan;
  plan.small_tile = has_small_jvp_fwd_tile(wanted.head_dim) && bytes > device.smem_per_multiprocessor;
  const FwdTile tile = jvp_fwd_tile(wanted.head_dim, plan.small_tile);
  plan.family = Family::kMmaSync;
  plan.dtype = problem.dtype;
  plan.head_dim = plan.head_dim_v = tile.head_dim;
  plan.block_m = tile.block_m;
  plan.block_n = tile.block_n;
  plan.threads = 32 * tile.warps;
  plan.smem_bytes = jvp_fwd_smem_bytes(tile, problem.dtype);
  set_work_tiles(plan, problem);
  plan.grid = plan.num_work_tiles;
  plan.pdl = true;
  plan.stages.add(Stage::kPrepare, problem.is_varlen);
  plan.stages.add(Stage::kAttention);
  plan.workspace_bytes = 4 * varlen_words(problem.is_varlen, problem.batch);
  return plan;
}

// Nothing: no kernel supports the call.
inline std::optional<FwdPlan> plan_jvp_fwd(const FwdProblem& problem, const Device& device, const char* forced) {
  if (jvp_fwd_tile(problem.max_head_dim()).head_dim == 0 || problem.head_dim_v % 8 != 0) return std::nullopt;
  if (!problem.has_queries() || !problem.has_keys() || problem.has_score_mod()) return std::nullopt;
  if (jvp_fwd_takes_wgmma(problem, device, forced)) return plan_jvp_fwd_wgmma(problem, device);
  const FwdPlan plan = plan_jvp_fwd_mma_sync(problem, device);
  const bool fits = plan.smem_bytes <= device.smem_per_block && plan.grid <= kMaxGridBlocks;
  return fits ? std::optional<FwdPlan>(plan) : std::nullopt;
}

}  // namespace plan
}  // namespace flash
