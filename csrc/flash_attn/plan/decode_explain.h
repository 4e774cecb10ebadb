// A decode plan by names and values, as a user sees it. Plain C++17.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>

#include "plan/decode_plan.h"

namespace flash {
namespace plan {

using Explanation = std::map<std::string, std::variant<bool, int64_t, std::string>>;

inline const char* family_name(Family family) {
  switch (family) {
    case Family::kMmaSync: return "mma_sync";
    case Family::kWgmma: return "wgmma";
    default: return "split_kv";
  }
}

inline const char* cut_rule_name(SplitRule rule) {
  switch (rule) {
    case SplitRule::kAnywhere: return "anywhere";
    case SplitRule::kParts: return "equal splits";
    case SplitRule::kChunks: return "fixed splits";
    default: return "nowhere";
  }
}

// The kernels of the KV cache alone: tile, grid, split of the keys and combine.
inline void explain_split(const DecodeProblem& problem, const DecodePlan& plan, Explanation& result) {
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size);
  result["variant"] = std::string(plan.is_plain ? "plain" : "all features");
  result["head_dim_padded"] = int64_t{tile.head_dim};
  result["block_m"] = int64_t{tile.rows()};  // packed rows (query token, query head) of a K/V head
  result["block_n"] = int64_t{kv_block_n(tile)};
  result["warps"] = int64_t{kv_threads(tile) / 32};
  result["stages"] = int64_t{plan.stages};
  result["smem_bytes"] = int64_t{kv_smem_bytes(tile, plan.stages)};
  result["grid"] = int64_t{plan.thread_blocks};
  result["cluster"] = int64_t{plan.in_clusters ? 2 : 1};
  result["work_tiles"] = plan.items * problem.heads_k;
  result["least_blocks"] = plan.min_blocks_per_cta;  // key blocks of a thread block, unless the work is less
  result["split"] = std::string(cut_rule_name(plan.split_points.rule));
  if (plan.split_points.rule == SplitRule::kParts) result["num_splits"] = int64_t{plan.split_points.value};
  if (plan.split_points.rule == SplitRule::kAnywhere) result["whole_up_to_blocks"] = int64_t{plan.split_points.value};
  if (plan.run_blocks != kUnbounded) result["split_blocks"] = int64_t{plan.run_blocks};
  result["combines"] = plan.combines;
  if (plan.combines) result["combine_grid"] = plan.combine_blocks;
}

// A call without queries names the kernel "none".
inline Explanation explain(const DecodeProblem& problem, const DecodePlan& plan) {
  Explanation result;
  result["kernel"] = std::string(plan.kernel == DecodeKernel::kNone ? "none" : family_name(plan.forward.family));
  result["appends"] = plan.appends;
  result["rotates"] = plan.rotates;
  result["schedule_bytes"] = 4 * plan.schedule_words;
  result["workspace_bytes"] = 4 * plan.workspace_words;
  if (plan.kernel == DecodeKernel::kSplitKv) explain_split(problem, plan, result);
  if (plan.kernel == DecodeKernel::kForward) {
    result["num_splits"] = int64_t{plan.forward.num_splits};
    result["one_wave"] = plan.forward.is_one_wave;
  }
  return result;
}

}  // namespace plan
}  // namespace flash
