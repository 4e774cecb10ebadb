// Attention over a KV cache, and its schedule: check -> plan -> set_params -> launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "api/decode_checks.h"
#include "api/device.h"
#include "api/launch.h"
#include "api/quantized.h"
#include "api/set_params.h"
#include "api/tensors.h"
#include "params/kvcache.h"
#include "plan/call_plan.h"
#include "plan/explain.h"

namespace flash {

// ---- the problem ----

// Whether the prefill kernels can read the cache as pages or as packed sequences.
inline bool is_packed_cache(const KvCacheCall& call) {
  if (call.is_paged()) return true;
  const int64_t rows = rows_per_sequence(cache_strides(call.k_cache));
  return rows >= 0 && rows == rows_per_sequence(cache_strides(call.v_cache)) &&
         rows * call.k_cache.size(0) + call.capacity() <= kMaxLength;
}

inline PagedKv cache_pages(const KvCacheCall& call) {
  PagedKv paged;
  if (!call.is_paged()) return paged;
  paged.block_table = int_or_null(call.block_table);
  paged.block_table_stride = call.block_table->stride(0);
  paged.page_size = FastDiv(static_cast<int>(std::max<int64_t>(call.k_cache.size(1), 1)));
  paged.pages_per_sequence = static_cast<int>(call.block_table->size(1));
  paged.num_pages = static_cast<int>(call.k_cache.size(0));
  return paged;
}

// The call as a prefill over packed keys or pages, whose lengths only the device knows.
inline plan::FwdProblem prefill_view(const KvCacheCall& call) {
  Flash_fwd_params params;
  set_params_qkv(params, call.q, call.k_cache, call.v_cache);
  params.b = static_cast<int>(call.q.size(0));
  params.seqlen_k = static_cast<int>(call.capacity());
  const bool dequantizes = call.has_8bit_cache();
  const MatrixStrides dequantized = dequantized_strides(params.h_k, params.d, params.seqlen_k);
  params.k_strides = dequantizes ? dequantized : cache_strides(call.k_cache);
  params.v_strides = dequantizes ? dequantized : cache_strides(call.v_cache);
  const MatrixStrides contiguous = contiguous_strides(call.q, params.d);
  const bool converts_queries = dequantizes && dtype_of(call.q) == Dtype::kBf16;
  params.q_strides = call.rotary_cos.has_value() || converts_queries ? contiguous : cache_strides(call.q);
  params.o_strides = call.out.has_value() ? cache_strides(*call.out) : contiguous;
  set_params_scores(params, call.scores);
  if (!dequantizes) params.paged = cache_pages(call);
  plan::FwdProblem problem = fwd_problem(params, dequantizes ? Dtype::kFp16 : dtype_of(call.q), true);
  problem.converts_queries = converts_queries;
  problem.gathers_keys = dequantizes;
  problem.dequantized_rows = params.seqlen_k;
  return problem;
}

// Whether the prefill kernels can read q and the cache, or its dequantised rows, and write out.
inline bool has_prefill_view(const KvCacheCall& call) {
  if (!is_aligned(call.q) || (call.out.has_value() && !is_aligned(*call.out))) return false;
  if (!call.has_8bit_cache()) return is_aligned(call.k_cache) && is_aligned(call.v_cache) && is_packed_cache(call);
  // Vectors and rows are counted in ints when dequantised.
  return call.capacity() > 0 && call.q.size(0) * call.capacity() <= kMaxLength &&
         call.k_cache.size(2) * call.k_cache.size(3) <= kMaxLength;
}

inline plan::DecodeProblem decode_problem(const KvCacheCall& call) {
  plan::DecodeProblem problem;
  problem.batch = static_cast<int>(call.q.size(0));
  problem.seqlen_q = static_cast<int>(call.q.size(1));
  problem.heads = static_cast<int>(call.q.size(2));
  problem.heads_k = static_cast<int>(call.k_cache.size(2));
  problem.head_dim = static_cast<int>(call.q.size(3));
  problem.capacity = static_cast<int>(call.capacity());
  problem.num_splits = clamped_int(call.num_splits);
  problem.batch_invariant = call.batch_invariant;
  problem.kv_dtype = dtype_of(call.k_cache);
  plan::DecodeOptions& options = problem.options;
  options.seqlen_new = static_cast<int>(call.seqlen_new());
  options.window = make_window(call.scores);
  options.has_score_mod = has_score_mod(call.scores);
  options.has_rotary = call.rotary_cos.has_value();
  options.has_leftpad = call.leftpad.has_value();
  if (call.is_paged()) {
    options.page_size = static_cast<int>(std::max<int64_t>(call.k_cache.size(1), 1));
  }
  options.q_vectors = vector_bytes(call.q) == 16;
  options.kv_vector_bytes = std::min(vector_bytes(call.k_cache), vector_bytes(call.v_cache));
  options.v_per_channel = call.quant.v_per_channel;
  options.has_mask_bits = call.mask_bits.given();
  return problem;
}

inline plan::FwdProblem cached_problem(const KvCacheCall& call) {
  plan::FwdProblem problem;
  const bool has_view = has_prefill_view(call);
  if (has_view) problem = prefill_view(call);
  problem.is_cached = true;
  problem.exact_row_max = CallEnvironment::exact_row_max();
  problem.has_prefill_view = has_view;
  problem.q_dtype = dtype_of(call.given_q);
  problem.kv_dtype = dtype_of(call.k_cache);
  problem.has_sinks = call.scores.sinks.has_value();
  problem.decode = decode_problem(call);
  return problem;
}

// ---- parameters ----

inline void set_params_cache(Flash_kvcache_params& params, const KvCacheCall& call) {
  params.kcache_ptr = call.k_cache.data_ptr();
  params.vcache_ptr = call.v_cache.data_ptr();
  params.k_ptr = params.kcache_ptr;
  params.v_ptr = params.vcache_ptr;
  params.k_strides = cache_strides(call.k_cache);
  params.v_strides = cache_strides(call.v_cache);
  params.seqlens_k = int_or_null(call.seqlens);
  params.cache_batch_idx = int_or_null(call.cache_batch_idx);
  params.leftpad_k = int_or_null(call.leftpad);
  params.cache_batch = static_cast<int>(call.k_cache.size(0));
  params.paged = cache_pages(call);
}

inline void set_params_new_rows(Flash_kvcache_params& params, const KvCacheCall& call) {
  if (call.seqlen_new() == 0) return;
  params.knew_ptr = call.k->const_data_ptr();
  params.vnew_ptr = call.v->const_data_ptr();
  params.knew_strides = cache_strides(*call.k);
  params.vnew_strides = cache_strides(*call.v);
  params.new_vectors = params.kv_vector_bytes == 16 && vector_bytes(*call.k) == 16 && vector_bytes(*call.v) == 16;
}

inline void set_params_quant(Flash_kvcache_params& params, const KvCacheCall& call, const KernelScales& scales) {
  params.q_dtype = dtype_of(call.q);
  if (!call.has_8bit_cache()) return;
  params.new_dtype = call.k.has_value() ? dtype_of(*call.k) : params.q_dtype;
  params.k_descale = scales.k;
  params.v_descale = scales.v;
  if (call.quant.k_token.has_value()) params.k_token_descale_ptr = call.quant.k_token->mutable_data_ptr<float>();
  if (call.quant.v_token.has_value()) params.v_token_descale_ptr = call.quant.v_token->mutable_data_ptr<float>();
}

inline void set_params_rotary(Flash_kvcache_params& params, const KvCacheCall& call) {
  if (!call.rotary_cos.has_value()) return;
  const at::Tensor &cos = *call.rotary_cos, &sin = *call.rotary_sin;
  Rotary& rotary = params.rotary;
  rotary.cos_ptr = cos.const_data_ptr();
  rotary.sin_ptr = sin.const_data_ptr();
  rotary.cos_stride = cos.stride(0);
  rotary.sin_stride = sin.stride(0);
  rotary.rows = clamped_int(cos.size(0));
  rotary.pairs = static_cast<int>(cos.size(1));
  rotary.interleaved = call.rotary_interleaved;
  rotary.one_position = has_one_position(params.window);
}

inline void set_params_mask_bits(Flash_kvcache_params& params, const KvCacheCall& call) {
  if (!call.mask_bits.given()) return;
  const at::Tensor& bits = *call.mask_bits.mask_bits;
  MaskBits& mask = params.mask_bits;
  mask.words = reinterpret_cast<const uint32_t*>(bits.const_data_ptr<int>());
  mask.matrices = mask_matrices(bits, params.h);
  mask.rows = params.seqlen_q;
  mask.row_words = static_cast<int>(bits.size(3));
  mask.keys = static_cast<int>(call.mask_bits.mask_keys);
}

inline Flash_kvcache_params set_params_kvcache(const KvCacheCall& call, const plan::DecodeProblem& problem,
                                               const plan::DecodePlan& plan, const KernelScales& scales,
                                               const at::Tensor& out, const at::Tensor& lse) {
  Flash_kvcache_params params;
  set_params_sizes(params, problem, call.q.device().index());
  set_params_plan(params, plan);
  params.q_ptr = call.q.const_data_ptr();
  params.q_strides = cache_strides(call.q);
  params.o_ptr = out.mutable_data_ptr();
  params.o_strides = cache_strides(out);
  params.o_vectors = vector_bytes(out) == 16;
  params.softmax_lse_ptr = lse.mutable_data_ptr<float>();
  set_params_scores(params, call.scores);
  set_params_cache(params, call);
  set_params_new_rows(params, call);
  set_params_quant(params, call, scales);
  set_params_rotary(params, call);
  set_params_mask_bits(params, call);
  return params;
}

// The scales of a call. New rows are quantised by K's own one, which must then not join q's.
inline KernelScales cache_scales(const KvCacheCall& call) {
  const bool joins = call.has_8bit_q() && !call.k.has_value() && !call.quant.k_token.has_value();
  KernelScales scales = kernel_scales(call.quant, call.k_cache.size(2), joins, false);
  if (call.quant.k_token.has_value()) scales.k = kv_token_descale(*call.quant.k_token);
  if (call.quant.v_token.has_value()) scales.v = kv_token_descale(*call.quant.v_token);
  return scales;
}

// ---- attention ----

// Elements of a KvCachePlan. +4 words with 8 bits, so that such a plan never fits a 16-bit call.
inline int64_t kvcache_plan_elements(const plan::DecodeProblem& problem, const plan::DecodePlan& plan) {
  return plan.schedule_words + plan.workspace_words + (is_eight_bit(problem.kv_dtype) ? 4 : 0);
}

// `workspace` must outlive the launches that use it.
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

// q as the kernels read it: memory in 16 bits if q has 8.
inline at::Tensor wide_query(const at::Tensor& q, const QuantArgs& quant) {
  if (!checks::is_8bit(q) || !q.is_cuda()) return q;
  checks::strided("q", q);
  checks::rank("q", q, 4, kDenseAxes);
  checks::last_stride("q", q);
  const CallDevice guard(q.device());
  const at::ScalarType type = quant.result_type(q);
  return new_empty(q, q.sizes(), is_supported(type) ? type : at::kBFloat16);  // out_dtype is checked later
}

// The prefill kernels' part of the parameters. `scratch` must outlive the launches that use it.
inline void set_params_prefill(Flash_fwd_split_params& params, const Flash_kvcache_params& cached, at::Tensor& scratch,
                               const at::Tensor& q) {
  static_cast<Flash_fwd_params&>(params) = cached;
  params.seqlen_k = cached.capacity;
  scratch = new_empty(q, {cached.b + 1, 2}, at::kLong);  // rng_state, unused; key_ranges
  params.dropout.rng_state = scratch.mutable_data_ptr<int64_t>();
  params.varlen.key_ranges = reinterpret_cast<int*>(params.dropout.rng_state + 2);
}

inline std::vector<at::Tensor> mha_fwd_kvcache(const KvCacheCall& call) {
  const at::Tensor& q = call.q;
  checks::kvcache(call);
  const CallDevice guard(q.device());
  check_device_supported(q);
  const plan::FwdProblem problem = cached_problem(call);
  const plan::FwdPlan plan = checked_plan(problem, q.device().index(), call.sm_margin);
  if (call.plan.has_value()) {
    checks::plan(*call.plan, q.device(), kvcache_plan_elements(problem.decode, *plan.decode));
  }
  at::Tensor out = call.out.has_value() ? *call.out : new_empty(q, q.sizes(), q.scalar_type());
  at::Tensor lse = new_empty(q, {q.size(0), q.size(2), q.size(1)}, at::kFloat), workspace, scratch;
  if (!plan.stages.has(plan::Stage::kAttention)) lse.fill_(std::numeric_limits<float>::infinity());
  FwdLaunch launched{problem, plan, q, call.k_cache, call.v_cache, out, call.quant};
  if (call.has_8bit_q()) launched.eight_bit_q = call.given_q;
  launched.scales = cache_scales(call);
  launched.kv = set_params_kvcache(call, problem.decode, *plan.decode, launched.scales, out, lse);
  set_params_partials(*launched.kv, *plan.decode, call, workspace);
  if (plan.family != plan::Family::kDecode) set_params_prefill(launched.params, *launched.kv, scratch, q);
  trace(*launched.kv, call.capacity(), problem, plan);
  launch(launched);
  return {out, lse};
}

// The plan of mha_fwd_kvcache(): nothing is launched.
inline plan::Explanation explain_kvcache(const KvCacheCall& call) {
  checks::kvcache(call);
  check_device_supported(call.q);
  const plan::FwdProblem problem = cached_problem(call);
  return plan::explain(problem, checked_plan(problem, call.q.device().index(), call.sm_margin));
}

// ---- schedule ----

inline at::Tensor kvcache_plan(const at::Tensor& seqlens_k, const OptionalTensor& leftpad_k, int64_t batch,
                               int64_t seqlen_q, int64_t seqlen_new, int64_t heads, int64_t heads_k, int64_t head_dim,
                               int64_t seqlen_cache, bool is_causal, int64_t window_left, int64_t window_right,
                               int64_t num_splits, bool batch_invariant, const OptionalTensor& plan_, bool eight_bit,
                               int64_t sm_margin) {
  checks::kvcache_schedule(seqlens_k, leftpad_k,
                           {batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, seqlen_cache, num_splits}, plan_);
  if (eight_bit) checks::eight_bit_head_dim("head_dim", head_dim);
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
  plan::FwdProblem cached;
  cached.is_cached = true;
  cached.has_prefill_view = false;
  cached.decode = problem;
  const plan::DecodePlan plan = *checked_plan(cached, device, sm_margin).decode;
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
