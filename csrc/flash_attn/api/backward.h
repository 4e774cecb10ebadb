// A backward of dense or packed batches: checks -> set_params -> plan -> allocate -> launch -> return.
#pragma once

#include <ATen/ops/sum.h>

#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/bias.h"
#include "api/checks.h"
#include "api/device.h"
#include "api/scores.h"
#include "api/set_params.h"
#include "api/tensors.h"
#include "plan/bwd_plan.h"

namespace flash {

// ---- gradients: given and wanted, their checks and strides ----

// Keyword arguments: the BwdStage, and the tensors kept from stage to stage.
struct KeptDq {
  std::string stage;         // "": kAll
  OptionalTensor dq_sum;     // kBegin returned it in dq's place
  OptionalTensor softmax_d;  // from kBegin too

  plan::BwdStage value() const {
    if (stage.empty()) return plan::BwdStage::kAll;
    return stage == "begin" ? plan::BwdStage::kBegin : stage == "add" ? plan::BwdStage::kAdd : plan::BwdStage::kEnd;
  }
};

struct Gradients {
  const at::Tensor& dout;
  const OptionalTensor& dlse;
  const OptionalTensor& dq;
  const OptionalTensor& dk;
  const OptionalTensor& dv;
  // FlashAttention-2 has no others: the module's functions take these by name.
  bool accumulate_dkv = false;  // dk and dv are fp32, and the call adds to them
  KeptDq kept = {};
  bool bias_grad = true;  // whether biases get gradients

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("accumulate_dkv", accumulate_dkv, "a bool");
    visit("dq_stage", kept.stage, "a str");
    visit("dq_sum", kept.dq_sum, "a tensor or None");
    visit("softmax_d", kept.softmax_d, "a tensor or None");
    visit("bias_grad", bias_grad, "a bool");
  }
};

// Strides of the gradient of `forward`, given or allocated.
inline MatrixStrides gradient_strides(const OptionalTensor& given, const at::Tensor& forward) {
  return given.has_value() && is_aligned(*given) ? matrix_strides(*given)
                                                 : contiguous_strides(forward, forward.size(-1));
}

// Each stage must get the tensors that it reads, and no output that it does not write.
inline void check_stage(const Gradients& gradients) {
  const KeptDq& kept = gradients.kept;
  const std::string& stage = kept.stage;
  if (!stage.empty() && stage != "begin" && stage != "add" && stage != "end") {
    checks::fail("dq_stage", "expected '', 'begin', 'add' or 'end', got '", stage, "'");
  }
  const auto check = [&stage](const char* name, const OptionalTensor& tensor, bool is_wanted) {
    if (tensor.has_value() == is_wanted) return;
    checks::fail(name, is_wanted ? "expected a tensor" : "expected None", " at dq_stage '", stage, "', got ",
                 is_wanted ? "None" : "a tensor");
  };
  check("dq_sum", kept.dq_sum, stage == "add" || stage == "end");
  check("softmax_d", kept.softmax_d, stage == "add");
  if (stage == "begin" || stage == "add") check("dq", gradients.dq, false);
  if (stage == "begin" || stage == "end") {
    check("dk", gradients.dk, false);
    check("dv", gradients.dv, false);
  }
}

// The tensors that a stage is given, as its plan has them.
inline void check_kept(const KeptDq& kept, at::IntArrayRef sum_shape, at::IntArrayRef softmax_d_shape,
                       const at::Tensor& q) {
  const auto check = [&q](const char* name, const OptionalTensor& tensor, at::IntArrayRef shape) {
    if (!tensor.has_value()) return;
    checks::device(name, *tensor, q);
    checks::dtype(name, *tensor, at::kFloat);
    const bool is_vectors = reinterpret_cast<uintptr_t>(tensor->const_data_ptr()) % 16 == 0;
    if (tensor->sizes() != shape || !tensor->is_contiguous() || !is_vectors) {
      checks::fail(name, "expected that of dq_stage 'begin' over the same rows and sequences, contiguous of shape ",
                   shape, ", got shape ", tensor->sizes());
    }
  };
  check("dq_sum", kept.dq_sum, sum_shape);
  check("softmax_d", kept.softmax_d, softmax_d_shape);
}

// A backward of a dense or a packed batch: its arguments, and the sequences that set_dense() or set_packed() adds once
// they have passed the checks.
struct BwdCall {
  Gradients gradients;
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const at::Tensor& out;
  at::Tensor lse;
  ScoreOptions scores;
  double p_dropout;
  bool deterministic;
  const OptionalTensor& rng_state;
  bool batch_invariant;
  LaunchOptions launch = {};

  Flash_bwd_params sequences = {};
};

// ---- its checks ----

inline void check_gradients(const BwdCall& call, at::IntArrayRef lse_shape) {
  const Gradients& gradients = call.gradients;
  const at::Tensor &q = call.q, &k = call.k, &v = call.v;
  check_stage(gradients);
  const at::DimVector out_shape = checks::output_shape(q, v);
  checks::like("dout", gradients.dout, out_shape, q);
  checks::like("out", call.out, out_shape, q);
  if (gradients.dq.has_value()) checks::like("dq", *gradients.dq, q.sizes(), q);
  if (gradients.accumulate_dkv) {
    checks::accumulated("dk", gradients.dk, k);
    checks::accumulated("dv", gradients.dv, v);
  } else {
    if (gradients.dk.has_value()) checks::like("dk", *gradients.dk, k.sizes(), q);
    if (gradients.dv.has_value()) checks::like("dv", *gradients.dv, v.sizes(), q);
  }
  checks::lse("softmax_lse", call.lse, q, lse_shape);
  if (gradients.dlse.has_value()) checks::lse("dlse", *gradients.dlse, q, lse_shape);
}

inline void check_written(const BwdCall& call) {
  const Gradients& gradients = call.gradients;
  const overlap::Operands read = {{"dout", gradients.dout},
                                  {"q", call.q},
                                  {"k", call.k},
                                  {"v", call.v},
                                  {"out", call.out},
                                  {"softmax_lse", call.lse},
                                  {"dlse", gradients.dlse},
                                  {"softmax_d", gradients.kept.softmax_d}};
  const overlap::Operands written = {
      {"dq", gradients.dq}, {"dk", gradients.dk}, {"dv", gradients.dv}, {"dq_sum", gradients.kept.dq_sum}};
  overlap::check(written, read);
  check_score_overlaps(call.scores, written);
}

inline void set_dense(BwdCall& call) {
  const at::Tensor& q = call.q;
  checks::query(q, 4, kDenseAxes);
  checks::whole_vectors(q);
  const int64_t batch = q.size(0);
  checks::key_value(call.k, call.v, q, {batch, -1, -1, q.size(3)}, kDenseAxes);
  check_gradients(call, {batch, q.size(2), q.size(1)});
  check_dense_scores(call.scores, q, call.k, call.p_dropout);
  checks::rng_state(call.rng_state, call.p_dropout, q);
  check_written(call);
  call.sequences = dense_sequences<Flash_bwd_params>(batch, call.batch_invariant);
}

// xformers passes the LSE of another forward, whose rows are padded.
inline at::Tensor without_padding(const at::Tensor& lse, int64_t total_q) {
  return lse.defined() && lse.dim() == 2 && lse.size(1) > total_q ? lse.narrow(1, 0, total_q) : lse;
}

inline void set_packed(BwdCall& call, const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                       int64_t max_seqlen_q, int64_t max_seqlen_k) {
  const at::Tensor& q = call.q;
  checks::query(q, 3, kPackedAxes);
  checks::whole_vectors(q);
  const int64_t batch = checks::cu_seqlens(cu_seqlens_q, cu_seqlens_k, q);
  checks::key_value(call.k, call.v, q, {-1, -1, q.size(2)}, kPackedAxes);
  call.lse = without_padding(call.lse, q.size(0));
  check_gradients(call, {q.size(1), q.size(0)});
  checks::max_seqlen("max_seqlen_q", max_seqlen_q);
  checks::max_seqlen("max_seqlen_k", max_seqlen_k);
  check_packed_scores(call.scores, q, call.k, batch, call.p_dropout, max_seqlen_k);
  checks::rng_state(call.rng_state, call.p_dropout, q);
  check_written(call);
  call.sequences = packed_sequences<Flash_bwd_params>(batch, call.batch_invariant, cu_seqlens_q, cu_seqlens_k);
}

// ---- the call ----

// The instantiation that the plan names (flash_api.cpp).
cudaError_t run_mha_bwd(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream);

// What calls with a mask or a bias do not do yet.
inline void check_mask_options(const BwdCall& call) {
  const std::string& stage = call.gradients.kept.stage;
  const char* const with = call.scores.mask.given() ? " with a mask on CUDA, got " : " with a bias on CUDA, got ";
  if (!stage.empty()) checks::fail("dq_stage", "expected ''", with, "'", stage, "'");
  if (call.gradients.accumulate_dkv) checks::fail("accumulate_dkv", "expected False", with, "True");
}

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
  const plan::BwdStage stage = call.gradients.kept.value();
  params.keeps_dq = stage != plan::BwdStage::kAll;
  plan::BwdProblem problem = bwd_problem(params, dtype_of(call.q), call.deterministic, stage);
  if (call.scores.mask.given()) problem.mask_matrices = mask_matrix_count(call.scores.mask, params);
  if (call.scores.mask.block_map.has_value()) problem.mask_block_rows = call.scores.mask.block_q;
  problem.has_bias = call.scores.bias.is_read() && has_scores(params);
  if (problem.has_mask() || problem.has_bias) check_mask_options(call);
  const plan::BwdPlan plan = plan::plan_bwd(problem, device_of(params.device, call.launch.sm_margin), forced_family());
  return plan;
}

// fp32 accumulators of dQ, one tile for each m_block, in deterministic mode a dq_semaphore for each of them, unless dQ
// has a separate kernel; and a tile_count_semaphore for each kernel. In bands counters are in front (BwdPlan).
inline at::Tensor allocate_bwd_workspace(Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& q) {
  if (plan.workspace_vectors() == 0) return at::Tensor();
  constexpr int64_t kWordsOfVector = 4;
  params.workspace_vectors = plan.cleared_vectors();
  at::Tensor workspace = new_empty(q, {plan.workspace_vectors(), kWordsOfVector}, at::kFloat);
  float* const begin = workspace.mutable_data_ptr<float>();
  params.workspace_ptr = reinterpret_cast<float4*>(begin);
  params.dq_accum_ptr = begin + plan.leading_words();
  int* const counters = reinterpret_cast<int*>(plan.leading_words() > 0 ? begin : begin + plan.accum_words());
  params.dq_semaphore_ptr = plan.has_dq_semaphores() ? counters : nullptr;
  params.tile_count_semaphore = counters + plan.semaphore_words();
  return workspace;
}

inline std::array<int64_t, 3> dq_sum_shape(const plan::BwdPlan& plan) {
  const int64_t parts = plan.dq_tile_parts();
  return {plan.dq_tiles, parts, plan.dq_tile_floats / parts};
}

// The same of a call that keeps dQ: only kBegin clears the accumulators, which are the caller's; semaphores begin at 0
// in every call.
inline at::Tensor set_params_dq_sum(Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& dq_sum) {
  params.dq_accum_ptr = dq_sum.mutable_data_ptr<float>();
  params.workspace_ptr = reinterpret_cast<float4*>(params.dq_accum_ptr);
  params.workspace_vectors = plan.accum_words() / 4;
  if (!plan.runs(plan::BwdStage::kAdd)) return at::Tensor();
  at::Tensor counters = new_zeros(dq_sum, {plan.semaphore_words() + 1}, at::kInt);
  params.dq_semaphore_ptr = plan.deterministic ? counters.mutable_data_ptr<int>() : nullptr;
  params.tile_count_semaphore = counters.mutable_data_ptr<int>() + plan.semaphore_words();
  return counters;
}

// Partial sums of the sinks' gradient, one per CTA of softmax_d_kernel, in the order of its grid.
inline at::Tensor allocate_dsinks(Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& q) {
  const int64_t batch = params.is_varlen() ? 1 : params.b;
  at::Tensor sums = new_zeros(q, {batch, params.h, plan.softmax_d_blocks}, at::kFloat);
  params.dsinks_ptr = sums.mutable_data_ptr<float>();
  return sums;
}

inline at::DimVector softmax_d_shape(const Flash_bwd_params& params, const plan::BwdPlan& plan) {
  if (params.is_varlen()) return {params.h, plan.softmax_d_rows};
  return {params.b, params.h, plan.softmax_d_rows};
}

inline at::Tensor allocate_softmax_d(const Flash_bwd_params& params, const plan::BwdPlan& plan, const at::Tensor& q) {
  const at::DimVector shape = softmax_d_shape(params, plan);
  return params.is_varlen() ? new_zeros(q, shape, at::kFloat) : new_empty(q, shape, at::kFloat);
}

// The caller's dq_sum, or a new one at kBegin; undefined where the call keeps nothing.
inline at::Tensor kept_dq_sum(const Flash_bwd_params& params, const plan::BwdPlan& plan, const KeptDq& kept,
                              const at::Tensor& q) {
  if (plan.stage == plan::BwdStage::kAll) return at::Tensor();
  if (!plan.has_dq_sum) {
    checks::fail("dq_stage", "expected '' for kernels without a sum of dQ (explain: has_dq_sum), got '", kept.stage,
                 "'");
  }
  const auto shape = dq_sum_shape(plan);
  check_kept(kept, shape, softmax_d_shape(params, plan), q);
  return kept.dq_sum.has_value() ? *kept.dq_sum : new_empty(q, shape, at::kFloat);
}

// A gradient that this stage writes, if it does.
inline at::Tensor computed(const std::optional<Output>& output) { return output ? output->computed : at::Tensor(); }
inline at::Tensor finished(const std::optional<Output>& output) { return output ? output->finish() : at::Tensor(); }

// Returns the memory of the segments of packed sequences.
inline at::Tensor launch(Flash_bwd_mask_params& params, const plan::BwdPlan& plan, const at::Tensor& q,
                         const at::Tensor& dq_sum) {
  trace(params, params.seqlen_k, plan);
  at::Tensor varlen;
  check_launch(prepare(params, false, q, varlen), "prepare_kernel", q);
  at::Tensor block_lists, dq_block_lists;
  if (plan.mask.matrices > 0) block_lists = make_block_lists(params.mask, plan.mask, params, q);
  if (plan.dq_mask.matrices > 0) dq_block_lists = make_block_lists(params.dq_mask, plan.dq_mask, params, q);
  const at::Tensor workspace =
      dq_sum.defined() ? set_params_dq_sum(params, plan, dq_sum) : allocate_bwd_workspace(params, plan, q);
  check_launch(run_mha_bwd(params, plan, c10::cuda::getCurrentCUDAStream().stream()), "flash_bwd_kernel", q);
  return varlen;
}

inline Tensors mha_bwd(const BwdCall& call) {
  const CallDevice guard(call.q.device());
  check_device_supported(call.q);
  const Gradients& gradients = call.gradients;
  at::Tensor q = aligned(call.q), k = aligned(call.k), v = aligned(call.v), dout = aligned(gradients.dout);
  Flash_bwd_mask_params params;
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
  const at::Tensor dq_sum = kept_dq_sum(params, plan, gradients.kept, q);
  std::optional<Output> dq, dk, dv;
  if (plan.runs(plan::BwdStage::kEnd)) dq.emplace(gradients.dq, q, q.scalar_type(), call.q.sizes(), pad);
  if (plan.runs(plan::BwdStage::kAdd)) {
    dk.emplace(gradients.dk, k, k.scalar_type(), call.k.sizes(), pad, gradients.accumulate_dkv);
    dv.emplace(gradients.dv, v, v.scalar_type(), call.v.sizes(), pad, gradients.accumulate_dkv);
  }
  set_params_out(params, out, lse);
  set_params_dgrad(params, dout, computed(dq), computed(dk), computed(dv));
  if (dlse.defined()) params.dlse_ptr = dlse.const_data_ptr<float>();
  if (params.has_dropout) reuse_philox_state(params, *call.rng_state);
  at::Tensor softmax_d, dsinks;
  if (plan.runs(plan::BwdStage::kBegin)) {
    softmax_d = allocate_softmax_d(params, plan, q);
    if (call.scores.sinks.has_value()) dsinks = allocate_dsinks(params, plan, q);
  } else if (gradients.kept.softmax_d.has_value()) {
    softmax_d = *gradients.kept.softmax_d;
  }
  params.d_rows = plan.softmax_d_rows;
  const BiasTensors bias = readable(call.scores.bias);
  if (plan.mask.matrices > 0 || (bias.is_read() && has_scores(params))) {
    params.mask = mask_params(call.scores.mask, params.h);
    params.mask.bias = bias_params(bias);
    params.dq_mask = params.mask;
  }
  if (softmax_d.defined()) params.softmax_d_ptr = softmax_d.mutable_data_ptr<float>();
  at::Tensor ds;
  if (plan.may_store_ds && gradients.bias_grad) {
    ds = allocate_ds(params, bias, plan, call.scores.mask.given(), q);
  }
  const at::Tensor varlen = launch(params, plan, q, dq_sum);
  Tensors results{dq ? finished(dq) : dq_sum, finished(dk), finished(dv), softmax_d};
  if (dsinks.defined()) results.push_back(at::sum(dsinks, at::OptionalIntArrayRef({0, 2})));
  if (bias.given() && gradients.bias_grad) {
    for (at::Tensor& gradient : bias_gradients(bias, params, plan.dtype, q, ds)) results.push_back(std::move(gradient));
  }
  return results;
}

// The plan alone: no launch, no memory.
inline plan::Explanation explain_bwd(const BwdCall& call) {
  check_device_supported(call.q);
  Flash_bwd_params params;
  return plan::explain(plan_call(call, params, aligned_layout(call.q), aligned_layout(call.k), aligned_layout(call.v),
                                 aligned_layout(call.gradients.dout)));
}

}  // namespace flash
