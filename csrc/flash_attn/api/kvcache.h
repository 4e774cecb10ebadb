// Attention over a KV cache, its schedule, and forwards by the decode kernels: check -> plan -> set_params -> launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "api/allocate.h"
#include "api/call_device.h"
#include "api/dequantize.h"
#include "api/kvcache_call.h"
#include "api/kvcache_checks.h"
#include "api/kvcache_params.h"
#include "api/kvcache_run.h"
#include "api/launch_check.h"
#include "api/prepare.h"
#include "api/trace.h"
#include "params/kvcache.h"
#include "plan/decode_plan.h"
#include "plan/explain.h"

namespace flash {

inline plan::DecodePlan checked_decode_plan(const plan::DecodeProblem& problem, int device, int64_t sm_margin) {
  const plan::DecodePlan plan = plan::plan_decode(problem, device_of(device, sm_margin));
  if (plan.is_too_large) {
    const int64_t rows = plan::kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype).rows(),
                  heads_k = problem.heads_k;
    checks::fail("q", "expected at most ", plan::kMaxKvTiles, " tiles of ", rows, " rows, got ", plan.work_items,
                 " for each of ", heads_k, " K/V heads");
  }
  return plan;
}

// Elements of a KvCachePlan. One over 8 bits, whose blocks have other sizes, passes for none over 16.
inline int64_t kvcache_plan_elements(const plan::DecodeProblem& problem, const plan::DecodePlan& plan) {
  return plan.schedule_words + plan.workspace_words + (is_eight_bit(problem.kv_dtype) ? 4 : 0);
}

// ---- attention ----

// `workspace` has to outlive the launches that use it.
inline void set_params_partials(Flash_kvcache_params& params, const plan::DecodePlan& plan, const KvCacheCall& call,
                                at::Tensor& workspace) {
  if (call.plan.has_value()) {
    int* const words = call.plan->mutable_data_ptr<int>();
    params.schedule = reinterpret_cast<const SchedHeader*>(words);
    set_params_workspace(params, plan, reinterpret_cast<float*>(words + plan.schedule_words));
  } else if (plan.workspace_words > 0) {
    workspace = new_empty(call.q, {plan.workspace_words}, at::kFloat);
    set_params_workspace(params, plan, workspace.mutable_data_ptr<float>());
  }
}

// The call with queries of 16 bits: q is memory for what dequantize_query() makes of codes.
template <class Function>
auto with_wide_query(const KvCacheCall& call, const Function& function) {
  if (!call.q.defined() || !call.q.is_cuda() || !checks::has_codes(call.q)) return function(call);
  checks::strided("q", call.q);
  checks::rank("q", call.q, 4, "batch, seqlen, heads, head_dim");
  checks::last_stride("q", call.q);
  const CallDevice guard(call.q.device());
  const at::Tensor wide = new_empty(call.q, call.q.sizes(), call.descales.fp16_out ? at::kHalf : at::kBFloat16);
  return function(KvCacheCall{wide,
                              call.k_cache,
                              call.v_cache,
                              call.k,
                              call.v,
                              call.seqlens,
                              call.rotary_cos,
                              call.rotary_sin,
                              call.cache_batch_idx,
                              call.leftpad,
                              call.block_table,
                              call.out,
                              call.scores,
                              call.rotary_interleaved,
                              call.num_splits,
                              call.plan,
                              call.batch_invariant,
                              call.descales,
                              call.sm_margin,
                              &call.q});
}

inline std::vector<at::Tensor> run_kvcache_call(const KvCacheCall& call) {
  const at::Tensor& q = call.q;
  checks::kvcache(call);
  const CallDevice guard(q.device());
  check_device_supported(q);
  const plan::DecodeProblem problem = decode_problem(call);
  const plan::DecodePlan plan = checked_decode_plan(problem, q.device().index(), call.sm_margin);
  if (call.plan.has_value()) checks::plan(*call.plan, q.device(), kvcache_plan_elements(problem, plan));

  at::Tensor out = call.out.has_value() ? *call.out : new_empty(q, q.sizes(), q.scalar_type());
  at::Tensor lse = new_empty(q, {q.size(0), q.size(2), q.size(1)}, at::kFloat), workspace;
  if (plan.kernel == plan::DecodeKernel::kNone) lse.fill_(std::numeric_limits<float>::infinity());
  Flash_kvcache_params params = set_params_kvcache(call, problem, plan, out, lse);
  set_params_partials(params, plan, call, workspace);
  trace(problem, plan);
  const RescaledRows queries = query_rows(params, call);
  const bool converts = plan.kernel == plan::DecodeKernel::kForward && converts_queries(params);
  if (call.q_codes != nullptr && plan.kernel != plan::DecodeKernel::kNone && !converts) {
    dequantize_query(params, queries, q);
  }
  run_kvcache(plan, params, queries, q);
  return {out, lse};
}

inline std::vector<at::Tensor> mha_fwd_kvcache(const KvCacheCall& call) {
  return with_wide_query(call, run_kvcache_call);
}

// The plan of mha_fwd_kvcache(): nothing is launched.
inline plan::Explanation explain_kvcache(const KvCacheCall& call) {
  return with_wide_query(call, [](const KvCacheCall& wide) {
    checks::kvcache(wide);
    check_device_supported(wide.q);
    const plan::DecodeProblem problem = decode_problem(wide);
    return plan::explain(problem, checked_decode_plan(problem, wide.q.device().index(), wide.sm_margin));
  });
}

// ---- a forward by the decode kernels ----

// q and out are those of `forward`.
inline cudaError_t run_decode_forward(const Flash_fwd_params& forward, const plan::DecodeProblem& problem,
                                      const plan::DecodePlan& plan, const at::Tensor& q, const at::Tensor& out,
                                      const KvDescales& descales, int skip_up_to_keys = -1) {
  Flash_kvcache_params params;
  static_cast<Flash_fwd_params&>(params) = forward;
  set_params_sizes(params, problem, forward.device);
  set_params_plan(params, plan);
  set_params_forward_descales(params, descales, dtype_of(q));
  params.cache_batch = forward.b;
  params.skip_up_to_keys = skip_up_to_keys;
  params.o_vectors = vector_bytes(out) == 16;
  const int64_t schedule_words = forward.is_varlen() ? plan.schedule_words : 0;
  const int64_t workspace_words = plan.combines ? plan.workspace_words : 0;
  const int64_t all_words = schedule_words + workspace_words + varlen_words(forward);
  at::Tensor workspace;
  if (all_words > 0) {
    workspace = new_empty(q, {all_words}, at::kInt);
    int* const words = workspace.mutable_data_ptr<int>();
    if (workspace_words > 0) set_params_workspace(params, plan, reinterpret_cast<float*>(words + schedule_words));
    if (schedule_words > 0) params.schedule = reinterpret_cast<const SchedHeader*>(words);
    set_params_varlen_workspace(params, words + schedule_words + workspace_words);  // filled by the schedule kernel
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (params.schedule != nullptr) {
    const cudaError_t status = run_kvcache_plan(params, const_cast<SchedHeader*>(params.schedule), stream);
    if (status != cudaSuccess) return status;
  }
  return run_mha_fwd_split(params, q, stream);
}

// ---- schedule ----

inline at::Tensor kvcache_plan(const at::Tensor& seqlens_k, const OptionalTensor& leftpad_k, int64_t batch,
                               int64_t seqlen_q, int64_t seqlen_new, int64_t heads, int64_t heads_k, int64_t head_dim,
                               int64_t seqlen_cache, bool is_causal, int64_t window_left, int64_t window_right,
                               int64_t num_splits, bool batch_invariant, const OptionalTensor& plan_, bool eight_bit,
                               int64_t sm_margin) {
  checks::kvcache_schedule(seqlens_k, leftpad_k,
                           {batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, seqlen_cache, num_splits}, plan_);
  const CallDevice guard(seqlens_k.device());
  check_device_supported(seqlens_k);

  plan::DecodeProblem problem{static_cast<int>(batch),    static_cast<int>(seqlen_q),
                              static_cast<int>(heads),    static_cast<int>(heads_k),
                              static_cast<int>(head_dim), static_cast<int>(std::min<int64_t>(seqlen_cache, kMaxLength)),
                              clamped_int(num_splits),    batch_invariant};
  problem.options.seqlen_new = static_cast<int>(seqlen_new);
  if (eight_bit) problem.kv_dtype = Dtype::kE4m3;
  problem.options.window = make_window({1.0, is_causal, window_left, window_right, 0.0, std::nullopt, std::nullopt});
  const int device = seqlens_k.device().index();
  const plan::DecodePlan plan = checked_decode_plan(problem, device, sm_margin);
  const int64_t elements = kvcache_plan_elements(problem, plan);
  if (plan_.has_value()) checks::plan(*plan_, seqlens_k.device(), elements);
  at::Tensor result = plan_.has_value() ? *plan_ : new_empty(seqlens_k, {elements}, at::kInt);

  Flash_kvcache_params params;
  set_params_sizes(params, problem, device);
  set_params_plan(params, plan);
  params.seqlens_k = seqlens_k.const_data_ptr<int>();
  params.leftpad_k = int_or_null(leftpad_k);
  SchedHeader* const schedule = reinterpret_cast<SchedHeader*>(result.mutable_data_ptr<int>());
  check_launch(run_kvcache_plan(params, schedule, c10::cuda::getCurrentCUDAStream().stream()), "kvcache_plan_kernel",
               seqlens_k);
  return result;
}

}  // namespace flash
