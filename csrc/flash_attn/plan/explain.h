// Plans as names and values, for flash_attn.explain() and FLASH_ATTN_TRACE. Plain C++17.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "plan/bwd_plan.h"
#include "plan/fwd_plan.h"

namespace flash {
namespace plan {

using PlanValue = std::variant<bool, int64_t, std::string>;

struct PlanFields {
  std::vector<std::pair<const char*, PlanValue>> fields;

  void add(const char* name, PlanValue value) { fields.emplace_back(name, std::move(value)); }
};

inline std::string family_name(Family family) {
  switch (family) {
    case Family::kMmaSync: return "mma_sync";
    case Family::kWgmma: return "wgmma";
    case Family::kDecode: return "split_kv";
  }
  return "";
}

inline std::string variant_name(FwdVariant variant) {
  switch (variant) {
    case FwdVariant::kPlain: return "plain";
    case FwdVariant::kShort: return "short";
    case FwdVariant::kDropout: return "dropout";
    case FwdVariant::kScoreMod: return "score_mod";
    case FwdVariant::kMasked: return "masked";
    case FwdVariant::kOneWave: return "one_wave";
    case FwdVariant::kSoftcap: return "softcap";
    case FwdVariant::kAlibi: return "alibi";
  }
  return "";
}

inline std::string variant_name(BwdVariant variant) {
  switch (variant) {
    case BwdVariant::kPlain: return "plain";
    case BwdVariant::kDropout: return "dropout";
    case BwdVariant::kGeneral: return "general";
  }
  return "";
}

// What every plan has.
template <class Plan>
PlanFields common_fields(const char* direction, const Plan& plan) {
  PlanFields fields;
  fields.add("direction", std::string(direction));
  fields.add("family", family_name(plan.family));
  fields.add("variant", variant_name(plan.variant));
  fields.add("dtype", std::string(dtype_name(plan.dtype)));
  fields.add("head_dim", int64_t{plan.head_dim});
  fields.add("head_dim_v", int64_t{plan.head_dim_v});
  fields.add("pad_head_dim", int64_t{plan.pad_head_dim});
  return fields;
}

// The kernels of the KV cache have a plan of their own for the rest (plan/kvcache.h).
inline PlanFields explain(const FwdPlan& plan) {
  PlanFields fields = common_fields("forward", plan);
  if (plan.family == Family::kDecode) return fields;
  fields.add("block_m", int64_t{plan.block_m});
  fields.add("block_n", int64_t{plan.block_n});
  fields.add("stages", int64_t{plan.kv_stages});
  fields.add("warps", int64_t{plan.threads / 32});
  fields.add("consumer_groups", int64_t{plan.consumer_groups});
  fields.add("grid", plan.grid);
  fields.add("smem_bytes", int64_t{plan.smem_bytes});
  fields.add("num_work_tiles", plan.num_work_tiles);
  fields.add("num_splits", int64_t{plan.num_splits});
  fields.add("band_heads", int64_t{plan.band_heads});
  fields.add("num_tail_tiles", int64_t{plan.num_tail_tiles});
  fields.add("sort_varlen_tiles", plan.sort_varlen_tiles);
  fields.add("dynamic_scheduler", plan.is_dynamic);
  fields.add("pdl", plan.pdl);
  fields.add("workspace_bytes", plan.workspace_bytes);
  return fields;
}

inline PlanFields explain(const BwdPlan& plan) {
  PlanFields fields = common_fields("backward", plan);
  fields.add("block_m", int64_t{plan.block_m});
  fields.add("block_n", int64_t{plan.block_n});
  fields.add("stages", int64_t{plan.stages});
  fields.add("warps", int64_t{plan.threads / 32});
  fields.add("grid", plan.grid);
  fields.add("smem_bytes", int64_t{plan.smem_bytes});
  fields.add("num_work_tiles", plan.order.blocks);
  fields.add("dq_in_smem", plan.dq_in_smem);
  fields.add("deterministic", plan.deterministic);
  fields.add("dynamic_scheduler", plan.is_dynamic);
  fields.add("workspace_bytes", plan.workspace_bytes);
  return fields;
}

// One line: name=value, separated by blanks.
inline std::string one_line(const PlanFields& plan) {
  std::string line;
  for (const auto& [name, value] : plan.fields) {
    line += line.empty() ? "" : " ";
    line += std::string(name) + "=";
    if (const auto* text = std::get_if<std::string>(&value)) line += *text;
    if (const auto* number = std::get_if<int64_t>(&value)) line += std::to_string(*number);
    if (const auto* flag = std::get_if<bool>(&value)) line += *flag ? "1" : "0";
  }
  return line;
}

}  // namespace plan
}  // namespace flash
