// A forward of dense or packed batches: checks -> set_params -> plan -> allocate -> launch -> return.
#pragma once

#include <ATen/ops/full.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "api/checks.h"
#include "api/device.h"
#include "api/launch.h"
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

// A forward of a dense or a packed batch: its arguments, and what set_dense() or set_packed() adds once they have
// passed the checks.
struct FwdCall {
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const OptionalTensor& out;
  ScoreOptions scores;
  double p_dropout;
  bool return_softmax;
  const OptionalGenerator& gen;
  bool return_max_logit;
  bool batch_invariant;
  FwdOptions options = {};
  QuantArgs quant = {};
  LaunchOptions launch = {};
  bool returns_dropout = true;  // S_dmask and rng_state, with and without dropout

  Flash_fwd_params sequences = {};  // the batch, packed sequences, pages, sizes of S_dmask
  at::DimVector lse_shape = {};

  bool has_8bit_kv() const { return checks::is_8bit(k); }
  bool has_8bit_q() const { return checks::is_8bit(q); }
  bool is_quantized() const { return has_8bit_q() || has_8bit_kv() || quant.given(); }
  at::ScalarType out_type() const { return quant.result_type(q); }
  bool returns_more() const { return return_max_logit; }
};

// Of a packed call alone.
struct PackedArgs {
  const at::Tensor& cu_seqlens_q;
  const at::Tensor& cu_seqlens_k;
  const OptionalTensor& seqused_k;
  const OptionalTensor& leftpad_k;
  const OptionalTensor& block_table;
  int64_t max_seqlen_q, max_seqlen_k;
};

// ---- its checks ----

// S_dmask is padded to multiples of 128, as in FlashAttention-2. The caller's maximum length may be loose: no sequence
// is longer than kMaxLength.
inline int probability_rows(int64_t max_seqlen) {
  constexpr int64_t kProbabilityTile = 128;
  const int64_t rows = std::min<int64_t>(max_seqlen, kMaxLength);
  return static_cast<int>((rows + kProbabilityTile - 1) / kProbabilityTile * kProbabilityTile);
}

inline void check_random_state(const FwdCall& call) {
  checks::generator(call.gen);
  if (call.options.rng_state.has_value()) checks::rng_state(call.options.rng_state, call.p_dropout, call.q);
}

inline void check_written(const FwdCall& call, const PackedArgs* packed = nullptr) {
  if (!call.out.has_value()) return;
  check_score_overlaps(call.scores, {{"out", call.out}});
  const OptionalTensor none;
  overlap::check({{"out", call.out}}, {{"q", call.q},
                                       {"k", call.k},
                                       {"v", call.v},
                                       {"cu_seqlens_q", packed ? OptionalTensor(packed->cu_seqlens_q) : none},
                                       {"cu_seqlens_k", packed ? OptionalTensor(packed->cu_seqlens_k) : none},
                                       {"seqused_k", packed ? packed->seqused_k : none},
                                       {"leftpad_k", packed ? packed->leftpad_k : none},
                                       {"block_table", packed ? packed->block_table : none},
                                       {"rng_state", call.options.rng_state},
                                       {"q_descale", call.quant.q},
                                       {"k_descale", call.quant.k},
                                       {"v_descale", call.quant.v}});
}

inline void set_dense(FwdCall& call) {
  const at::Tensor &q = call.q, &k = call.k, &v = call.v;
  checks::query(q, 4, kDenseAxes, true);
  checks::whole_vectors(q);
  const int64_t batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  checks::key_value(k, v, q, {batch, -1, -1, q.size(3)}, kDenseAxes, true);
  if (call.is_quantized()) checks::quant_args(call.quant, q, k, v, batch, call.p_dropout);
  checks::output(call.out, q, checks::output_shape(q, v), call.out_type());
  check_dense_scores(call.scores, q, k, call.p_dropout);
  check_random_state(call);
  check_written(call);
  call.sequences = dense_sequences<Flash_fwd_params>(batch, call.batch_invariant);
  call.sequences.p_rows = probability_rows(seqlen_q);
  call.sequences.p_cols = probability_rows(k.size(1));
  call.lse_shape = {batch, heads, seqlen_q};
}

inline void set_packed(FwdCall& call, const PackedArgs& packed) {
  const at::Tensor &q = call.q, &k = call.k, &v = call.v;
  const bool is_paged = packed.block_table.has_value();
  checks::query(q, 3, kPackedAxes, true);
  checks::whole_vectors(q);
  const int64_t batch = checks::cu_seqlens(packed.cu_seqlens_q, packed.cu_seqlens_k, q);
  if (is_paged) {
    checks::key_value(k, v, q, {-1, -1, -1, q.size(2)}, "blocks, page_size, heads, head_dim", true);
  } else {
    checks::key_value(k, v, q, {-1, -1, q.size(2)}, kPackedAxes, true);
  }
  if (call.is_quantized()) checks::quant_args(call.quant, q, k, v, batch, call.p_dropout);
  checks::output(call.out, q, checks::output_shape(q, v), call.out_type());
  checks::lengths("seqused_k", packed.seqused_k, q, batch);
  checks::lengths("leftpad_k", packed.leftpad_k, q, batch);
  checks::block_table(packed.block_table, q, batch);
  checks::max_seqlen("max_seqlen_q", packed.max_seqlen_q);
  checks::max_seqlen("max_seqlen_k", packed.max_seqlen_k);
  check_packed_scores(call.scores, q, k, batch, call.p_dropout, packed.max_seqlen_k, is_paged);
  check_random_state(call);
  check_written(call, &packed);
  Flash_fwd_params& sequences = call.sequences;
  sequences = packed_sequences<Flash_fwd_params>(batch, call.batch_invariant, packed.cu_seqlens_q, packed.cu_seqlens_k);
  sequences.p_rows = probability_rows(packed.max_seqlen_q);
  sequences.p_cols = probability_rows(packed.max_seqlen_k);
  sequences.varlen.seqused_k = int_or_null(packed.seqused_k);
  sequences.varlen.leftpad_k = int_or_null(packed.leftpad_k);
  sequences.paged = set_params_pages(packed.block_table, k);
  call.lse_shape = {q.size(1), q.size(0)};
}

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
  const int rows = dequantized_rows(params, !call.returns_more());
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
  if (call.scores.mask.given()) problem.mask_matrices = mask_matrix_count(call.scores.mask, params);
  if (call.scores.mask.block_map.has_value()) problem.mask_block_rows = call.scores.mask.block_q;
  problem.has_bias = call.scores.bias.is_read() && has_scores(params);
  problem.has_key_lengths = params.varlen.seqused_k != nullptr || params.varlen.leftpad_k != nullptr;
  problem.returns_max_logit = call.return_max_logit;
  problem.exact_row_max = call.returns_more() || CallEnvironment::exact_row_max();
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
  const plan::FwdPlan plan = checked_plan(problem, params.device, call.launch.sm_margin);
  if (params.varlen.seqused_k != nullptr) {
    checks::at_most("seqused_k", plan.mask.key_strips, "strips of 64 keys in all sequences with a mask");
  }
  if (problem.gathers_keys && plan.stages.has(plan::Stage::kDequantize)) {
    checks::at_most("block_table", static_cast<int64_t>(params.b) * plan.dequantized_rows, "keys of all sequences");
  }
  return plan;
}

// k and v as kernels take them: 8-bit ones are read in place, unless by e4m3 products.
inline at::Tensor aligned_keys(const at::Tensor& tensor) { return checks::is_8bit(tensor) ? tensor : aligned(tensor); }

// ---- the call ----

// S_dmask and rng_state, zeros where nothing is launched; undefined where the call does not return them.
struct DropoutOutputs {
  at::Tensor probabilities;
  at::Tensor rng_state;

  DropoutOutputs(const FwdCall& call, bool launches) {
    if (!call.returns_dropout) return;
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

// Kernels write rng_state in every call. If the call returns none, it takes words after the LSE, in its storage.
inline at::Tensor allocate_lse(Flash_fwd_params& params, const FwdCall& call) {
  if (call.returns_dropout) return new_empty(call.q, call.lse_shape, at::kFloat);
  const int64_t rows = c10::multiply_integers(call.lse_shape), words = rows + rows % 2;
  at::Tensor lse = new_empty(call.q, {words + 4}, at::kFloat);
  params.dropout.rng_state = reinterpret_cast<int64_t*>(lse.mutable_data_ptr<float>() + words);
  lse.unsafeGetTensorImpl()->set_sizes_contiguous(call.lse_shape);
  return lse;
}

inline at::Tensor allocate_max_logit(Flash_fwd_params& params, const at::TensorOptions& options) {
  at::Tensor max_logit = at::full({params.h}, -std::numeric_limits<float>::infinity(), options);
  params.max_logit_ptr = max_logit.mutable_data_ptr<float>();
  return max_logit;
}

// Dropout's state, drawn or given.
inline void set_params_rng(Flash_fwd_params& params, const FwdCall& call, const at::Tensor& rng_state) {
  if (rng_state.defined()) params.dropout.rng_state = rng_state.mutable_data_ptr<int64_t>();
  if (!params.has_dropout) return;
  if (call.options.rng_state.has_value()) {
    reuse_philox_state(params, *call.options.rng_state);
  } else {
    draw_philox_state(params, call.gen);
  }
}

// e4m3 queries that no e4m3 product takes: memory for them in 16 bits.
inline at::Tensor wide_query(const FwdCall& call) { return new_empty(call.q, call.q.sizes(), call.out_type()); }

// What the stages of the plan take. q, k, v, out: as its kernels do.
inline FwdLaunch make_launch(const FwdCall& call, const plan::FwdProblem& problem, const plan::FwdPlan& plan,
                             const Flash_fwd_params& params, const at::Tensor& q, const at::Tensor& k,
                             const at::Tensor& v, const at::Tensor& out) {
  FwdLaunch launch{problem, plan, q, k, v, out, call.quant};
  static_cast<Flash_fwd_params&>(launch.params) = params;
  if (call.has_8bit_q() && !plan.is_fp8) launch.eight_bit_q = call.q;
  if (problem.has_mask() || problem.has_bias) {
    launch.params.mask = mask_params(call.scores.mask, params.h);
    launch.params.mask.bias = bias_params(readable(call.scores.bias));
  }
  if (call.has_8bit_kv() && !plan.is_fp8) {
    const bool packed = params.is_varlen() && !params.is_paged();
    launch.scales = kernel_scales(call.quant, params.h_k, call.has_8bit_q(), packed);
  }
  if (plan.family == plan::Family::kDecode) {
    launch.kv = set_params_decode(launch, params);
    launch.decode_workspace = allocate_decode_workspace(*launch.kv, *plan.decode, q);
  }
  return launch;
}

inline Tensors mha_fwd(const FwdCall& call) {
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
  const at::Tensor lse = allocate_lse(params, call);
  const DropoutOutputs dropout(call, launches);
  set_params_out(params, out.computed, lse);
  if (params.has_dropout && call.return_softmax) params.p_ptr = dropout.probabilities.mutable_data_ptr();
  at::Tensor max_logit;
  if (call.return_max_logit) max_logit = allocate_max_logit(params, lse.options());
  if (launches) {
    set_params_rng(params, call, dropout.rng_state);
    trace(params, params.seqlen_k, problem, plan);
    FwdLaunch launched = make_launch(call, problem, plan, params, q, k, v, out.computed);
    launch(launched);
  }
  Tensors results{out.finish(), lse, dropout.probabilities, dropout.rng_state};
  if (max_logit.defined()) results.push_back(max_logit);
  return results;
}

// The plan alone: no launch, no memory.
inline plan::Explanation explain_fwd(const FwdCall& call) {
  check_device_supported(call.q);
  const auto layout = [](const at::Tensor& x) { return checks::is_8bit(x) ? x : aligned_layout(x); };
  Flash_fwd_params params;
  const plan::FwdProblem problem = make_problem(call, params, aligned_layout(call.q), layout(call.k), layout(call.v));
  return plan::explain(problem, plan_call(call, problem, params));
}

}  // namespace flash
