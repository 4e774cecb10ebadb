// A backward of dense or packed batches: set_params -> plan -> allocate -> launch -> return.
#pragma once

#include <ATen/ops/sum.h>

#include <vector>

#include "api/allocate.h"
#include "api/call_device.h"
#include "api/gradients.h"
#include "api/launch_check.h"
#include "api/pad.h"
#include "api/prepare.h"
#include "api/problem.h"
#include "api/trace.h"
#include "plan/bwd_plan.h"

namespace flash {

// The instantiation that the plan names (flash_api.cpp).
cudaError_t run_mha_bwd(const Flash_bwd_params& params, const plan::BwdPlan& plan, cudaStream_t stream);

// A call whose arguments have passed the checks.
struct BwdCall {
  Flash_bwd_params sequences;  // the batch, packed sequences
  Gradients gradients;
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const at::Tensor& out;
  const at::Tensor& lse;
  ScoreOptions scores;
  double p_dropout;
  bool deterministic;
  const OptionalTensor& rng_state;
  int64_t sm_margin;
};

inline plan::BwdPlan plan_call(const BwdCall& call, Flash_bwd_params& params, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& dout) {
  params = call.sequences;
  params.device = call.q.device().index();
  set_params_fprop(params, q, k, v, call.scores, call.p_dropout);
  params.do_strides = matrix_strides(dout);
  params.accumulates_dkv = call.gradients.accumulate_dkv;
  params.dq_strides = gradient_strides(call.gradients.dq, call.q);
  params.dk_strides = gradient_strides(call.gradients.dk, call.k);
  params.dv_strides = gradient_strides(call.gradients.dv, call.v);
  const plan::BwdProblem problem = bwd_problem(params, dtype_of(call.q), call.deterministic);
  return plan::plan_bwd(problem, device_of(params.device, call.sm_margin), forced_family());
}

// fp32 accumulators of dQ, one tile for each m_block, in deterministic mode a dq_semaphore for each of them, where dQ
// has no pass of its own; and a tile_count_semaphore for each pass.
inline at::Tensor allocate_bwd_workspace(Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& q) {
  if (plan.workspace_vectors() == 0) return at::Tensor();
  constexpr int64_t kWordsOfVector = 4;
  params.workspace_vectors = plan.workspace_vectors();
  at::Tensor workspace = new_empty(q, {params.workspace_vectors, kWordsOfVector}, at::kFloat);
  params.workspace_ptr = static_cast<float4*>(workspace.mutable_data_ptr());
  params.dq_accum_ptr = workspace.mutable_data_ptr<float>();
  int* const counters = reinterpret_cast<int*>(params.dq_accum_ptr + plan.accum_words());
  params.dq_semaphore_ptr = plan.has_dq_semaphores() ? counters : nullptr;
  params.tile_count_semaphore = counters + plan.semaphore_words();
  return workspace;
}

// Partial sums of the sinks' gradient, one per CTA of the softmax_d pass, in the order of its grid.
inline at::Tensor allocate_dsinks(Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& q) {
  const int64_t batch = params.is_varlen() ? 1 : params.b;
  at::Tensor sums = new_zeros(q, {batch, params.h, plan.softmax_d_blocks}, at::kFloat);
  params.dsinks_ptr = sums.mutable_data_ptr<float>();
  return sums;
}

inline at::Tensor allocate_softmax_d(Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& q) {
  params.d_rows = plan.softmax_d_rows;
  at::Tensor softmax_d = params.is_varlen() ? new_zeros(q, {q.size(-2), params.d_rows}, at::kFloat)
                                            : new_empty(q, {params.b, q.size(-2), params.d_rows}, at::kFloat);
  params.softmax_d_ptr = softmax_d.mutable_data_ptr<float>();
  return softmax_d;
}

inline void launch_backward(Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& q) {
  trace(plan);
  at::Tensor varlen;
  check_launch(prepare(params, false, q, varlen), "prepare_kernel", q);
  const at::Tensor workspace = allocate_bwd_workspace(params, plan, q);
  check_launch(run_mha_bwd(params, plan, c10::cuda::getCurrentCUDAStream().stream()), "flash_bwd_kernel", q);
}

inline std::vector<at::Tensor> backward(const BwdCall& call) {
  const CallDevice guard(call.q.device());
  check_device_supported(call.q);
  const Gradients& gradients = call.gradients;
  at::Tensor q = aligned(call.q), k = aligned(call.k), v = aligned(call.v), dout = aligned(gradients.dout);
  Flash_bwd_params params;
  const plan::BwdPlan plan = plan_call(call, params, q, k, v, dout);
  const int pad = plan.pad_head_dim;
  at::Tensor out = aligned(pad_head_dim(call.out, pad));
  if (pad > 0) {
    q = aligned(pad_head_dim(q, pad));
    k = aligned(pad_head_dim(k, pad));
    v = aligned(pad_head_dim(v, pad));
    dout = aligned(pad_head_dim(dout, pad));
    set_params_qkv(params, q, k, v);
  }
  const at::Tensor lse = call.lse.contiguous();
  const at::Tensor dlse = gradients.dlse.has_value() ? gradients.dlse->contiguous() : at::Tensor();
  Output dq(gradients.dq, call.q, call.q.sizes(), pad);
  Output dk(gradients.dk, call.k, call.k.sizes(), pad, gradients.accumulate_dkv);
  Output dv(gradients.dv, call.v, call.v.sizes(), pad, gradients.accumulate_dkv);
  set_params_out(params, out, lse);
  set_params_dgrad(params, dout, dq.computed, dk.computed, dv.computed);
  if (dlse.defined()) params.dlse_ptr = dlse.const_data_ptr<float>();
  if (params.has_dropout) reuse_philox_state(params, *call.rng_state);
  const at::Tensor softmax_d = allocate_softmax_d(params, plan, q);
  at::Tensor dsinks;
  if (call.scores.sinks.has_value()) dsinks = allocate_dsinks(params, plan, q);
  launch_backward(params, plan, q);
  std::vector<at::Tensor> results{dq.finish(), dk.finish(), dv.finish(), softmax_d};
  if (dsinks.defined()) results.push_back(at::sum(dsinks, at::OptionalIntArrayRef({0, 2})));
  return results;
}

// The plan alone: no launch, no memory.
inline plan::Explanation explain(const BwdCall& call) {
  check_device_supported(call.q);
  Flash_bwd_params params;
  return plan::explain(plan_call(call, params, aligned_layout(call.q), aligned_layout(call.k), aligned_layout(call.v),
                                 aligned_layout(call.gradients.dout)));
}

}  // namespace flash
