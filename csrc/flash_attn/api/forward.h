// A forward of dense or packed batches: set_params -> plan -> allocate -> launch -> return.
#pragma once

#include <ATen/ops/full.h>

#include <array>
#include <limits>
#include <vector>

#include "api/call_device.h"
#include "api/codes_forward.h"
#include "api/kvcache.h"
#include "api/pad.h"
#include "api/run_fwd.h"

namespace flash {

// What the module's functions take by name beside ScoreOptions.
struct FwdOptions {
  OptionalTensor rng_state;  // the dropout of this [seed, offset] instead of a new one

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("rng_state", rng_state, "a Tensor");
  }
};

// A call whose arguments have passed the checks.
struct FwdCall {
  Flash_fwd_params sequences;  // the batch, packed sequences, pages, sizes of S_dmask
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const OptionalTensor& out;
  at::DimVector lse_shape;
  ScoreOptions scores;
  double p_dropout;
  bool return_softmax;
  const OptionalGenerator& gen;
  bool return_max_logit;
  const FwdOptions& options;
  const KvDescales& descales;
  int64_t sm_margin;

  bool has_codes() const { return is_eight_bit(dtype_of(k)); }
};

// k and v as kernels take them: codes are read as they lie.
inline at::Tensor aligned_keys(const at::Tensor& tensor) {
  return is_eight_bit(dtype_of(tensor)) ? tensor : aligned(tensor);
}

// Fills params; strides of an allocated output are those it will have.
inline plan::FwdPlan plan_call(const FwdCall& call, Flash_fwd_params& params, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v) {
  params = call.sequences;
  params.device = call.q.device().index();
  set_params_fprop(params, q, k, v, call.scores, call.p_dropout);
  if (call.out.has_value() && is_aligned(*call.out)) {
    params.o_strides = matrix_strides(*call.out);
  } else {
    params.o_strides = contiguous_strides(call.q, params.d_v);
  }
  set_params_gathered(params, !call.has_codes() || !call.return_max_logit);
  plan::FwdProblem problem = forward_problem(params, dtype_of(call.q), dtype_of(call.k));
  problem.returns_max_logit = call.return_max_logit;
  return plan_forward(problem, params.device, call.sm_margin);
}

// S_dmask and rng_state; zeros where nothing is launched.
struct DropoutOutputs {
  at::Tensor probabilities;
  at::Tensor rng_state;

  DropoutOutputs(const FwdCall& call, bool launches) {
    const at::Tensor& q = call.q;
    const auto allocate = [&](at::IntArrayRef shape, at::ScalarType type) {
      return launches ? new_empty(q, shape, type) : new_zeros(q, shape, type);
    };
    const Flash_fwd_params& sequences = call.sequences;
    if (call.return_softmax && call.p_dropout > 0.0) {
      probabilities = allocate({sequences.b, q.size(-2), sequences.p_rows, sequences.p_cols}, q.scalar_type());
    } else {
      probabilities = new_empty(q, {0}, q.scalar_type());
    }
    rng_state = allocate({2}, at::kLong);
  }
};

// A rescale threshold of 0 keeps the row max exact, at the price of more rescaling.
inline at::Tensor allocate_max_logit(Flash_fwd_params& params, const at::TensorOptions& options) {
  at::Tensor max_logit = at::full({params.h}, -std::numeric_limits<float>::infinity(), options);
  params.max_logit_ptr = max_logit.mutable_data_ptr<float>();
  params.rescale_threshold_log2 = 0.0f;
  return max_logit;
}

// Behind a forward that has gathered the keys of pages, as many as max_seqlen_k promises: where some sequence has more,
// the whole call once more by the decode kernels. Only the device knows; without such a sequence they leave at once.
inline void run_longer_sequences(const Flash_fwd_params& params, const FwdCall& call, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const at::Tensor& out) {
  if (!params.is_paged() || dequantized_rows(params) >= split_capacity(params)) return;
  const plan::DecodeProblem problem = decode_problem(params, q, k, v, call.descales);
  const plan::DecodePlan plan = checked_decode_plan(problem, params.device, call.sm_margin);
  check_launch(run_decode_forward(params, problem, plan, q, out, call.descales, dequantized_rows(params)),
               "flash_fwd_split_kernel", q, problem.kv_dtype);
}

inline std::vector<at::Tensor> forward(const FwdCall& call) {
  const CallDevice guard(call.q.device());
  check_device_supported(call.q);
  const bool launches = call.q.numel() > 0;
  at::Tensor q = aligned(call.q), k = aligned_keys(call.k), v = aligned_keys(call.v);
  Flash_fwd_params params;
  const plan::FwdPlan plan = plan_call(call, params, q, k, v);
  const int pad = launches ? plan.pad_head_dim : 0;
  if (pad > 0) {
    q = aligned(pad_head_dim(q, pad));
    k = aligned(pad_head_dim(k, pad));
    v = aligned(pad_head_dim(v, pad));
    set_params_qkv(params, q, k, v);
  }
  Output out(call.out, call.q, checks::output_shape(call.q, call.v), pad);
  at::Tensor lse = new_empty(call.q, call.lse_shape, at::kFloat);
  DropoutOutputs dropout(call, launches);
  set_params_out(params, out.computed, lse);
  if (params.has_dropout && call.return_softmax) params.p_ptr = dropout.probabilities.mutable_data_ptr();
  at::Tensor max_logit;
  if (call.return_max_logit) max_logit = allocate_max_logit(params, lse.options());
  if (launches) {
    params.dropout.rng_state = dropout.rng_state.mutable_data_ptr<int64_t>();
    if (params.has_dropout && call.options.rng_state.has_value()) {
      reuse_philox_state(params, *call.options.rng_state);
    } else if (params.has_dropout) {
      draw_philox_state(params, call.gen);
    }
    if (plan.family == plan::Family::kDecode) {
      const plan::DecodeProblem problem = decode_problem(params, q, k, v, call.descales);
      const plan::DecodePlan decode = checked_decode_plan(problem, params.device, call.sm_margin);
      trace(plan, problem, decode);
      check_launch(run_decode_forward(params, problem, decode, q, out.computed, call.descales),
                   "flash_fwd_split_kernel", q, problem.kv_dtype);
    } else if (call.has_codes()) {
      trace(plan, forward_problem(params, dtype_of(q), dtype_of(k)));
      const Flash_fwd_params over_codes = params;
      launch_forward_over_codes(params, plan, q, k, v, call.descales);
      run_longer_sequences(over_codes, call, q, k, v, out.computed);
    } else {
      trace(plan);
      launch_forward(params, plan, q);
    }
  }
  std::vector<at::Tensor> results{out.finish(), lse, dropout.probabilities, dropout.rng_state};
  if (max_logit.defined()) results.push_back(max_logit);
  return results;
}

// The plan alone: no launch, no memory.
inline plan::Explanation explain(const FwdCall& call) {
  check_device_supported(call.q);
  at::Tensor q = aligned_layout(call.q), k = call.k, v = call.v;
  if (!call.has_codes()) {
    k = aligned_layout(k);
    v = aligned_layout(v);
  }
  Flash_fwd_params params;
  const plan::FwdPlan plan = plan_call(call, params, q, k, v);
  plan::Explanation result = plan::explain(plan, forward_problem(params, dtype_of(q), dtype_of(k)));
  if (call.q.numel() == 0) result["kernel"] = std::string("none");
  if (call.q.numel() == 0 || plan.family != plan::Family::kDecode) return result;
  q = padded_layout(q, plan.pad_head_dim);
  k = padded_layout(k, plan.pad_head_dim);
  v = padded_layout(v, plan.pad_head_dim);
  set_params_qkv(params, q, k, v);
  const plan::DecodeProblem problem = decode_problem(params, q, k, v, call.descales);
  return plan::explain(plan, problem, checked_decode_plan(problem, params.device, call.sm_margin));
}

}  // namespace flash
