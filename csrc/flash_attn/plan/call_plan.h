// The plan of a whole forward: its kernel and the stages that it launches. Everything about a call is decided here,
// once, from sizes and facts of the GPU; api/launch.h walks the stages. Plain C++17.
#pragma once

#include "plan/fp8_fwd_plan.h"
#include "plan/fwd_plan.h"

namespace flash {
namespace plan {

// The kernel of a call over a cache. The decode kernels are made for tiles of 16 packed rows; of larger queries they
// take only those whose m_blocks would leave multiprocessors idle, and those with mask bits, which no other kernel has.
inline FwdPlan plan_cached_kernel(const FwdProblem& problem, const Device& device, const char* forced) {
  const DecodeProblem& decode = problem.decode;
  const bool may_choose =
      decode.num_splits == 0 && !decode.batch_invariant && problem.has_prefill_view && !decode.options.has_mask_bits;
  const bool has_many_rows = decode.rows() > kv_tile(decode.head_dim, 0).rows();
  if (decode.has_queries() && may_choose && has_many_rows && decode.head_dim % 8 == 0) {
    return plan_fwd_kernel(problem, device, forced);
  }
  FwdPlan plan;
  plan.family = Family::kDecode;
  return plan;
}

inline FwdPlan plan_kernel(const FwdProblem& problem, const Device& device, const char* forced) {
  if (problem.is_cached) return plan_cached_kernel(problem, device, forced);
  if (is_eight_bit(problem.q_dtype) && fp8_fwd_supports(problem, device) &&
      !fp8_fwd_declines(problem, device, forced)) {
    const FwdPlan plan = plan_fp8_fwd(problem, device);
    if (plan.grid > 0) return plan;
  }
  return plan_fwd_kernel(problem, device, forced);
}

// Whether a sequence may have more keys than the buffer of dequantised rows has room for. Only the device knows.
constexpr bool may_exceed_gathered(const FwdProblem& problem) {
  return problem.gathers_keys && !problem.is_cached && problem.dequantized_rows < problem.decode.capacity;
}

// A call over a cache: prefill kernels read Q rotated, and 8-bit K and V dequantised.
inline void add_cached_stages(const FwdProblem& problem, FwdPlan& plan) {
  const bool attends = problem.decode.has_queries(), prefills = attends && plan.family != Family::kDecode;
  const bool dequantizes = prefills && is_eight_bit(problem.kv_dtype);
  const bool converts = dequantizes && problem.converts_queries;  // e4m3 Q too, in one step
  Stages& stages = plan.stages;
  stages.add(Stage::kWidenQuery, attends && is_eight_bit(problem.q_dtype) && !converts);
  stages.add(Stage::kAppend, problem.decode.appends());
  stages.add(Stage::kDequantize, dequantizes);
  stages.add(Stage::kFindKeys, prefills && !dequantizes);
  stages.add(Stage::kRotate, prefills && problem.decode.options.has_rotary);
  stages.add(Stage::kConvertQuery, converts);
  stages.add(Stage::kPrepare, prefills && plan.is_dynamic);
  stages.add(Stage::kAttention, attends);
  stages.add(Stage::kCombine, prefills && plan.num_splits > 1);
  stages.add(Stage::kRescale, converts);
  stages.add(Stage::kMarkInactive, prefills && problem.has_sinks);
}

// A forward without a cache by prefill kernels.
inline void add_prefill_stages(const FwdProblem& problem, FwdPlan& plan) {
  const bool dequantizes = is_eight_bit(problem.kv_dtype) && !plan.is_fp8;
  const bool converts = dequantizes && problem.converts_queries;
  Stages& stages = plan.stages;
  const bool transposes = plan.vt_keys > 0;
  stages.add(Stage::kPrepare, problem.is_varlen || (plan.is_dynamic && !transposes));
  stages.add(Stage::kWidenQuery, is_eight_bit(problem.q_dtype) && !plan.is_fp8);
  stages.add(Stage::kTransposeV, transposes);
  stages.add(Stage::kDequantize, dequantizes);
  stages.add(Stage::kConvertQuery, converts);
  stages.add(Stage::kMaskPlan, plan.mask.matrices > 0);
  stages.add(Stage::kAttention);
  stages.add(Stage::kCombine, plan.num_splits > 1);
  stages.add(Stage::kDropoutProbs, problem.returns_probabilities && problem.has_dropout);
  stages.add(Stage::kRescale, converts);
  stages.add(Stage::kRecompute, dequantizes && may_exceed_gathered(problem));
}

// The same by the decode kernels.
inline void add_decode_stages(const FwdProblem& problem, FwdPlan& plan) {
  plan.stages.add(Stage::kSchedule, problem.is_varlen);
  plan.stages.add(Stage::kWidenQuery, is_eight_bit(problem.q_dtype));
  plan.stages.add(Stage::kAttention);
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null.
inline FwdPlan plan_fwd(const FwdProblem& problem, const Device& device, const char* forced) {
  FwdPlan plan = plan_kernel(problem, device, forced);
  plan.exact_row_max = problem.exact_row_max;
  if (problem.is_cached) {
    add_cached_stages(problem, plan);
  } else if (problem.has_queries()) {
    plan.family == Family::kDecode ? add_decode_stages(problem, plan) : add_prefill_stages(problem, plan);
  }
  if (plan.stages.has(Stage::kDequantize)) {
    plan.dequantized_bytes = problem.dequantized_bytes();
    plan.dequantized_rows = problem.dequantized_rows;
  }
  if (problem.is_cached || plan.family == Family::kDecode || plan.stages.has(Stage::kRecompute)) {
    plan.decode = plan_decode(padded(problem.decode, plan.pad_head_dim), device);
  }
  return plan;
}

}  // namespace plan
}  // namespace flash
