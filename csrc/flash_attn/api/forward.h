// A forward of dense or packed batches: set_params -> plan -> allocate -> launch -> return.
#pragma once

#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "api/checks.h"
#include "api/device.h"
#include "api/environment.h"
#include "api/launch.h"
#include "api/problem.h"
#include "api/quantized.h"
#include "api/scores.h"
#include "api/set_params.h"
#include "api/tensors.h"

namespace flash {

// What the module's functions take by name in addition to ScoreOptions.
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
  const QuantArgs& quant;
  int64_t sm_margin;

  bool has_8bit_kv() const { return checks::is_8bit(k); }
  bool has_8bit_q() const { return checks::is_8bit(q); }
  at::ScalarType out_type() const { return quant.result_type(q); }
};

// ---- the problem ----

// Rows of the dequantised K and V per sequence; 0: packed rows keep their places. Of pages at least one: key ranges are
// then written. Block tables may be far wider than sequences: if the decode kernels can recompute a call whose
// max_seqlen_k, which p_cols is rounded up from, is too small, there is room for that many.
inline int dequantized_rows(const Flash_fwd_params& params, bool may_recompute) {
  if (params.is_paged())
    return std::max(std::min(split_capacity(params), may_recompute ? params.p_cols : kMaxLength), 1);
  return params.is_varlen() ? 0 : params.seqlen_k;
}

// Whether tensor maps can describe q, k and v of a call in 8 bits, once they are aligned, and O in 16.
inline bool fits_fp8_maps(const FwdCall& call, Flash_fwd_params params) {
  if (!call.has_8bit_q()) return false;
  const bool holds_out =
      plan::tensor_map_holds(matrix_shape(params, params.o_strides, true, params.is_varlen()), Dtype::kBf16);
  params.o_strides = contiguous_strides(call.q, params.d_v);
  params.k_strides = matrix_strides(aligned_layout(call.k));
  params.v_strides = matrix_strides(aligned_layout(call.v));
  return holds_out && fwd_problem(params, Dtype::kE4m3).fits_tensor_maps;
}

// A call with 8-bit K and V. The prefill kernels see K and V, and Q if it is converted, as fp16.
inline plan::FwdProblem quantized_problem(const FwdCall& call, const Flash_fwd_params& params) {
  const bool is_bf16 = call.out_type() == at::kBFloat16;
  const int rows = dequantized_rows(params, !call.return_max_logit);
  Flash_fwd_params dequantized = params;
  set_params_dequantized(dequantized, rows);
  if (is_bf16 || call.has_8bit_q()) dequantized.q_strides = converted_query_strides(params);
  plan::FwdProblem problem = fwd_problem(dequantized, Dtype::kFp16);
  problem.converts_queries = is_bf16;
  problem.out_dtype = is_bf16 ? Dtype::kBf16 : Dtype::kFp16;
  problem.q_dtype = dtype_of(call.q);
  problem.kv_dtype = dtype_of(call.k);
  problem.gathers_keys = params.is_paged();
  problem.dequantized_rows = rows;
  problem.has_head_scales = has_head_scales(call.quant);
  problem.fits_fp8_maps = fits_fp8_maps(call, params);
  problem.fast_exp = call.quant.fast_exp;
  return problem;
}

// Fills params; strides of an allocated output are those it will have.
inline plan::FwdProblem make_problem(const FwdCall& call, Flash_fwd_params& params, const at::Tensor& q,
                                     const at::Tensor& k, const at::Tensor& v) {
  params = call.sequences;
  params.device = call.q.device().index();
  set_params_fprop(params, q, k, v, call.scores, call.p_dropout);
  if (call.out.has_value() && is_aligned(*call.out)) {
    params.o_strides = matrix_strides(*call.out);
  } else {
    params.o_strides = contiguous_strides(call.q, params.d_v);
  }
  plan::FwdProblem problem =
      call.has_8bit_kv() ? quantized_problem(call, params) : fwd_problem(params, dtype_of(call.q));
  problem.mask_matrices = mask_matrix_count(call.scores.mask, params);
  problem.has_bias = call.scores.bias.given() && has_scores(params);
  problem.has_key_lengths = params.varlen.seqused_k != nullptr || params.varlen.leftpad_k != nullptr;
  problem.returns_max_logit = call.return_max_logit;
  problem.exact_row_max = call.return_max_logit || CallEnvironment::exact_row_max();
  problem.returns_probabilities = call.return_softmax && params.b > 0 && params.p_rows > 0 && params.p_cols > 0;
  const int64_t keys = call.has_8bit_kv() ? fwd_problem(params, problem.out_dtype).keys() : problem.keys();
  problem.decode = decode_problem(params, dtype_of(call.k), keys);
  problem.decode.options.kv_vector_bytes = std::min(vector_bytes(k), vector_bytes(v));
  problem.decode.options.v_per_channel = call.quant.v_per_channel;
  return problem;
}

// What calls with a mask or a bias do not do yet.
inline void check_mask_options(const FwdCall& call) {
  const bool has_mask = call.scores.mask.given();
  const auto reject = [&](const char* name, const char* expected, const auto& got) {
    checks::fail(name, "expected ", expected, " with a ", has_mask ? "mask" : "bias", " on CUDA, got ", got);
  };
  if (call.has_8bit_q()) reject("q", kSupportedDtypes, checks::dtype_name(call.q.scalar_type()));
  if (call.has_8bit_kv()) reject("k", kSupportedDtypes, checks::dtype_name(call.k.scalar_type()));
  if (!has_mask) return;
  if (call.sequences.paged.block_table != nullptr) reject("block_table", "None", "a tensor");
  if (call.sequences.varlen.leftpad_k != nullptr) reject("leftpad_k", "None", "a tensor");
}

inline plan::FwdPlan plan_call(const FwdCall& call, const plan::FwdProblem& problem, const Flash_fwd_params& params) {
  if (problem.has_mask() || problem.has_bias) check_mask_options(call);
  const plan::FwdPlan plan = checked_plan(problem, params.device, call.sm_margin);
  if (problem.has_mask()) check_mask_plan(plan.mask, params);
  if (problem.gathers_keys && plan.stages.has(plan::Stage::kDequantize)) {
    checks::at_most("block_table", static_cast<int64_t>(params.b) * plan.dequantized_rows, "keys of all sequences");
  }
  return plan;
}

// k and v as kernels take them: 8-bit ones are read in place, unless by e4m3 products.
inline at::Tensor aligned_keys(const at::Tensor& tensor) { return checks::is_8bit(tensor) ? tensor : aligned(tensor); }

// ---- the call ----

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
      probabilities = new_empty(q, {0}, call.out_type());
    }
    rng_state = allocate({2}, at::kLong);
  }
};

inline at::Tensor allocate_max_logit(Flash_fwd_params& params, const at::TensorOptions& options) {
  at::Tensor max_logit = at::full({params.h}, -std::numeric_limits<float>::infinity(), options);
  params.max_logit_ptr = max_logit.mutable_data_ptr<float>();
  return max_logit;
}

// Dropout's state, drawn or given.
inline void set_params_rng(Flash_fwd_params& params, const FwdCall& call, const at::Tensor& rng_state) {
  params.dropout.rng_state = rng_state.mutable_data_ptr<int64_t>();
  if (!params.has_dropout) return;
  if (call.options.rng_state.has_value()) {
    reuse_philox_state(params, *call.options.rng_state);
  } else {
    draw_philox_state(params, call.gen);
  }
}

// e4m3 queries that no e4m3 product takes: memory for them in 16 bits.
inline at::Tensor wide_query(const FwdCall& call) { return new_empty(call.q, call.q.sizes(), call.out_type()); }

inline void launch_forward(const FwdCall& call, const plan::FwdProblem& problem, const plan::FwdPlan& plan,
                           const Flash_fwd_params& params, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& out) {
  OptionalTensor e4m3_q;
  if (call.has_8bit_q() && !plan.is_fp8) e4m3_q = call.q;
  FwdLaunch launched{problem, plan, q, k, v, out, e4m3_q, call.quant};
  static_cast<Flash_fwd_params&>(launched.params) = params;
  const BiasTensors bias = readable(call.scores.bias);
  if (problem.has_mask() || problem.has_bias) {
    launched.params.mask = mask_params(call.scores.mask, params.h);
    launched.params.mask.bias = bias_params(bias);
  }
  if (call.has_8bit_kv() && !plan.is_fp8) {
    const bool packed = params.is_varlen() && !params.is_paged();
    launched.scales = kernel_scales(call.quant, params.h_k, call.has_8bit_q(), packed);
  }
  if (plan.family == plan::Family::kDecode) {
    launched.kv = set_params_decode(launched, params);
    launched.decode_workspace = allocate_decode_workspace(*launched.kv, *plan.decode, q);
  }
  trace(params, params.seqlen_k, problem, plan);
  launch(launched);
}

inline std::vector<at::Tensor> forward(const FwdCall& call) {
  const CallDevice guard(call.q.device());
  check_device_supported(call.q);
  at::Tensor q = call.has_8bit_q() ? aligned_layout(call.q) : aligned(call.q);
  at::Tensor k = aligned_keys(call.k), v = aligned_keys(call.v);
  Flash_fwd_params params;
  const plan::FwdProblem problem = make_problem(call, params, q, k, v);
  const plan::FwdPlan plan = plan_call(call, problem, params);
  const bool launches = !plan.stages.empty();
  const int pad = launches ? plan.pad_head_dim : 0;
  if (plan.is_fp8) {
    q = aligned(call.q);
    k = aligned(k);
    v = aligned(v);
  } else if (call.has_8bit_q()) {
    q = wide_query(call);
  }
  if (pad > 0) {
    q = aligned(pad_head_dim(q, pad));
    k = aligned(pad_head_dim(k, pad));
    v = aligned(pad_head_dim(v, pad));
  }
  if (pad > 0 || call.has_8bit_q()) set_params_qkv(params, q, k, v);
  Output out(call.out, call.q, call.out_type(), checks::output_shape(call.q, call.v), pad);
  at::Tensor lse = new_empty(call.q, call.lse_shape, at::kFloat);
  DropoutOutputs dropout(call, launches);
  set_params_out(params, out.computed, lse);
  if (params.has_dropout && call.return_softmax) params.p_ptr = dropout.probabilities.mutable_data_ptr();
  at::Tensor max_logit;
  if (call.return_max_logit) max_logit = allocate_max_logit(params, lse.options());
  if (launches) {
    set_params_rng(params, call, dropout.rng_state);
    launch_forward(call, problem, plan, params, q, k, v, out.computed);
  }
  std::vector<at::Tensor> results{out.finish(), lse, dropout.probabilities, dropout.rng_state};
  if (max_logit.defined()) results.push_back(max_logit);
  return results;
}

// The plan alone: no launch, no memory.
inline plan::Explanation explain(const FwdCall& call) {
  check_device_supported(call.q);
  const auto layout = [](const at::Tensor& x) { return checks::is_8bit(x) ? x : aligned_layout(x); };
  Flash_fwd_params params;
  const plan::FwdProblem problem = make_problem(call, params, aligned_layout(call.q), layout(call.k), layout(call.v));
  return plan::explain(problem, plan_call(call, problem, params));
}

}  // namespace flash
