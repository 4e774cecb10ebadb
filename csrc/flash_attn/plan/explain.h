// Plans as names and values, for flash_attn.explain() and FLASH_ATTN_TRACE. Plain C++17.
#pragma once

#include <cstdint>
#include <string>

#include "plan/bwd_plan.h"
#include "plan/call_plan.h"
#include "plan/explanation.h"

namespace flash {
namespace plan {

// What every plan has.
template <class Plan>
Explanation common_fields(const char* direction, const Plan& plan) {
  Explanation result;
  result["direction"] = std::string(direction);
  result["kernel"] = std::string(family_name(plan.family));
  result["variant"] = std::string(variant_name(plan.variant));
  result["dtype"] = std::string(dtype_name(plan.dtype));
  result["head_dim"] = int64_t{plan.head_dim};
  result["head_dim_v"] = int64_t{plan.head_dim_v};
  result["pad_head_dim"] = int64_t{plan.pad_head_dim};
  return result;
}

// Fields of the prefill kernels, mma.sync and wgmma.
inline void explain_launch(const FwdPlan& plan, Explanation& result) {
  result["block_m"] = int64_t{plan.block_m};
  result["block_n"] = int64_t{plan.block_n};
  result["kv_stages"] = int64_t{plan.kv_stages};
  result["warps"] = int64_t{plan.threads / 32};
  result["consumer_groups"] = int64_t{plan.consumer_groups};
  result["grid"] = plan.grid;
  result["smem_bytes"] = int64_t{plan.smem_bytes};
  result["num_work_tiles"] = plan.num_work_tiles;
  result["num_splits"] = int64_t{plan.num_splits};
  result["band_heads"] = int64_t{plan.band_heads};
  result["num_tail_tiles"] = int64_t{plan.num_tail_tiles};
  result["sort_varlen_tiles"] = plan.sort_varlen_tiles;
  result["pairs_rows"] = plan.pairs_rows;
  result["cluster"] = int64_t{plan.in_clusters ? 2 : 1};
  result["dynamic_scheduler"] = plan.is_dynamic;
  result["pdl"] = plan.pdl;
  result["row_max"] = std::string(plan.row_max_falls ? "of each block" : plan.exact_row_max ? "exact" : "lagging");
  result["workspace_bytes"] = plan.workspace_bytes;
}

inline Explanation explain(const BwdPlan& plan) {
  Explanation result = common_fields("backward", plan);
  result["block_m"] = int64_t{plan.block_m};
  result["block_n"] = int64_t{plan.block_n};
  result["stages"] = int64_t{plan.stages};
  result["warps"] = int64_t{plan.threads / 32};
  result["grid"] = plan.grid;
  result["smem_bytes"] = int64_t{plan.smem_bytes};
  result["num_work_tiles"] = plan.order.blocks;
  result["dq_in_smem"] = plan.dq_in_smem;
  result["has_dq_sum"] = plan.has_dq_sum;
  result["dq_pass"] = plan.dq_pass;
  result["deterministic"] = plan.deterministic;
  result["dynamic_scheduler"] = plan.is_dynamic;
  result["workspace_bytes"] = plan.workspace_bytes;
  return result;
}

inline const char* split_rule_name(SplitRule rule) {
  switch (rule) {
    case SplitRule::kAnywhere: return "anywhere";
    case SplitRule::kEqualSplits: return "equal splits";
    case SplitRule::kFixedSplits: return "fixed splits";
    default: return "nowhere";
  }
}

// Fields of the decode kernels: tile, grid, KV splits and combine.
inline void explain_split(const DecodeProblem& problem, const DecodePlan& plan, Explanation& result) {
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  const char* const variant = plan.by_wgmma     ? "wgmma"
                              : plan.swaps_ab   ? "plain, swapped operands"
                              : plan.is_plain   ? "plain"
                              : plan.masks_bits ? "mask bits"
                                                : "all features";
  result["variant"] = std::string(variant);
  if (is_eight_bit(problem.kv_dtype)) result["kv_dtype"] = std::string(dtype_name(problem.kv_dtype));
  result["head_dim"] = int64_t{tile.head_dim};
  result["block_m"] = int64_t{tile.rows()};  // packed rows (query token, query head)
  result["block_n"] = int64_t{plan.block_n};
  result["tile_heads"] = int64_t{plan.tile_heads};
  result["warps"] = int64_t{(plan.by_wgmma ? kKvWgmmaThreads : kv_threads(tile)) / 32};
  result["kv_stages"] = int64_t{plan.by_wgmma ? kKvWgmmaStages : plan.stages};
  result["smem_bytes"] = int64_t{plan.by_wgmma ? kKvWgmmaSmem : kv_smem_bytes(tile, plan.stages)};
  result["grid"] = int64_t{plan.thread_blocks};
  result["cluster"] = int64_t{plan.in_clusters ? 2 : 1};
  result["num_work_tiles"] = plan.work_items * plan.head_tiles;
  result["least_blocks"] = plan.min_blocks_per_cta;  // n_blocks of a CTA, unless the work is less
  result["split"] = std::string(split_rule_name(plan.split_points.rule));
  if (plan.split_points.rule == SplitRule::kEqualSplits) result["num_splits"] = int64_t{plan.split_points.value};
  if (plan.split_points.rule == SplitRule::kAnywhere) result["whole_up_to_blocks"] = int64_t{plan.split_points.value};
  if (plan.split_blocks != kUnbounded) result["split_blocks"] = int64_t{plan.split_blocks};
  result["row_max"] = std::string("exact");
  result["combines"] = plan.combines;
  if (plan.combines) result["combine_grid"] = plan.combine_blocks;
}

// 8-bit K and V that are dequantised, or multiplied as they are.
inline void explain_eight_bit(const FwdProblem& problem, const FwdPlan& plan, Explanation& result) {
  if (plan.is_fp8) {
    result["qkv_dtype"] = std::string(dtype_name(problem.q_dtype));
    result["exp"] = std::string(plan.fast_exp ? "fast" : "exact");
  } else if (is_eight_bit(problem.kv_dtype)) {
    result["kv_dtype"] = std::string(dtype_name(problem.kv_dtype));
    result["dequantized_bytes"] = plan.dequantized_bytes;
  }
}

// A call over a cache. One without queries names the kernel "none".
inline Explanation explain_cached(const FwdProblem& problem, const FwdPlan& plan) {
  Explanation result;
  const bool attends = plan.stages.has(Stage::kAttention);
  result["direction"] = std::string("kvcache");
  result["kernel"] = attends ? std::string(family_name(plan.family)) : std::string("none");
  result["appends"] = plan.stages.has(Stage::kAppend);
  result["rotates"] = plan.stages.has(Stage::kRotate);
  result["schedule_bytes"] = 4 * plan.decode->schedule_words;
  result["workspace_bytes"] = 4 * plan.decode->workspace_words;
  if (attends && plan.family == Family::kDecode) {
    explain_split(problem.decode, *plan.decode, result);
  } else if (attends) {
    explain_launch(plan, result);
    explain_eight_bit(problem, plan, result);
  }
  return result;
}

inline Explanation explain_uncached(const FwdProblem& problem, const FwdPlan& plan) {
  Explanation result = common_fields("forward", plan);
  if (plan.family == Family::kDecode && plan.stages.empty()) {
    result["kernel"] = std::string("none");
    return result;
  }
  if (plan.family == Family::kDecode) {
    explain_split(padded(problem.decode, plan.pad_head_dim), *plan.decode, result);
    result["workspace_bytes"] = 4 * (plan.decode->combines ? plan.decode->workspace_words : 0);
  } else {
    explain_launch(plan, result);
    explain_eight_bit(problem, plan, result);
  }
  if (plan.stages.empty()) result["kernel"] = std::string("none");  // without queries
  return result;
}

inline Explanation explain(const FwdProblem& problem, const FwdPlan& plan) {
  Explanation result = problem.is_cached ? explain_cached(problem, plan) : explain_uncached(problem, plan);
  std::string stages;
  for (const Stage stage : plan.stages) stages += (stages.empty() ? "" : ",") + std::string(stage_name(stage));
  result["stages"] = stages;
  return result;
}

}  // namespace plan
}  // namespace flash
