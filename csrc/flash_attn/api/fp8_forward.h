// A forward of e4m3 q, k and v by kernels of 8 bits, for the calls that they serve.
#pragma once

#include <type_traits>
#include <vector>

#include "api/forward.h"
#include "params/fp8.h"
#include "plan/fp8_fwd_plan.h"

namespace flash {

// A call whose arguments have passed the checks. Descales: of one element, (heads,) or (b, heads), of query or K/V
// heads.
struct Fp8FwdCall {
  Flash_fwd_fp8_params sequences;
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const OptionalTensor& q_descale;
  const OptionalTensor& k_descale;
  const OptionalTensor& v_descale;
  at::DimVector lse_shape;
  ScoreOptions scores;
  at::ScalarType out_type;
  int64_t sm_margin;
  const OptionalTensor& out;
};

inline Descale descale_of(const OptionalTensor& descale, int heads) {
  Descale result;
  if (!descale.has_value()) return result;
  result.ptr = descale->const_data_ptr<float>();
  const bool is_scalar = descale->numel() == 1;
  if (!is_scalar) result.head_stride = descale->stride(-1);
  if (!is_scalar && descale->dim() == 2) result.batch_stride = descale->stride(0);
  result.group = FastDiv(is_scalar ? heads : heads / static_cast<int>(descale->size(-1)));
  return result;
}

namespace checks {

inline void e4m3(const char* name, const at::Tensor& tensor, int64_t dims, const char* axes) {
  if (tensor.defined() && !tensor.is_cuda()) fail(name, "expected a CUDA tensor, got one on ", tensor.device());
  strided(name, tensor);
  dtype(name, tensor, at::kFloat8_e4m3fn);
  rank(name, tensor, dims, axes);
  last_stride(name, tensor);
  sizes(name, tensor, "sequences");
}

inline void e4m3_output(const OptionalTensor& out, const at::Tensor& q, const at::Tensor& v, at::ScalarType type) {
  if (!out.has_value()) return;
  device("out", *out, q);
  dtype("out", *out, type);
  shape("out", *out, output_shape(q, v));
  if (!out->is_contiguous() || !is_aligned(*out)) fail("out", "expected a contiguous tensor, aligned to 16 bytes");
}

inline void descale(const char* name, const OptionalTensor& tensor, const at::Tensor& q, int64_t batch) {
  if (!tensor.has_value()) return;
  device(name, *tensor, q);
  dtype(name, *tensor, at::kFloat);
  if (tensor->numel() == 1) return;
  const bool fits = tensor->dim() == 1 || (tensor->dim() == 2 && tensor->size(0) == batch);
  if (!fits || tensor->size(-1) == 0 || q.size(-2) % tensor->size(-1) != 0) {
    fail(name, "expected one element or shape [heads] or [", batch, ", heads], got ", tensor->sizes());
  }
}

}  // namespace checks

// Segments and the semaphore of a call; the pass that transposes V clears that of a dense one.
inline void prepare_fp8(Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, const at::Tensor& q,
                        at::Tensor& workspace) {
  if (params.is_varlen()) {
    check_launch(prepare(params, plan.is_dynamic, q, workspace), "prepare_kernel", q);
  } else if (plan.is_dynamic) {
    workspace = new_empty(q, {1}, at::kInt);
    params.tile_count_semaphore = workspace.mutable_data_ptr<int>();
  }
}

inline cudaError_t run_mha_fwd_fp8(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  return FP16_SWITCH(plan.dtype, [&] {
    return HEADDIM_8BIT_SWITCH(plan.head_dim,
                               [&] { return run_mha_fwd_fp8_wgmma_<kDtype, kHeadDim>(params, plan, stream); });
  });
}

// Fills params, but for memory. A plan without a grid: there is no kernel for the call.
inline plan::FwdPlan plan_fp8_call(const Fp8FwdCall& call, Flash_fwd_fp8_params& params, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v) {
  params = call.sequences;
  params.device = q.device().index();
  set_params_fprop(params, q, k, v, call.scores, 0.0);
  params.o_strides = contiguous_strides(q, params.d_v);
  params.q_descale = descale_of(call.q_descale, params.h);
  params.k_descale = descale_of(call.k_descale, params.h);
  params.v_descale = descale_of(call.v_descale, params.h);
  plan::FwdProblem problem = fwd_problem(params, Dtype::kE4m3);
  problem.dtype = call.out_type == at::kHalf ? Dtype::kFp16 : Dtype::kBf16;
  const plan::Device device = device_of(params.device, call.sm_margin);
  if (q.numel() == 0 || k.numel() == 0 || !plan::fp8_fwd_supports(problem, device)) return {};
  if (plan::fp8_fwd_declines(problem, device, forced_family())) return {};
  params.vt_keys = plan::fp8_vt_blocks(problem) * e4m3::kVtKeys;
  params.exp_codes = params.exp_codes && plan::fp8_has_codes(problem.head_dim);
  return plan::plan_fp8_fwd(problem, device);
}

// {out, lse, an empty S_dmask, rng_state}; nothing where there is no kernel for the call.
inline std::vector<at::Tensor> fp8_forward(const Fp8FwdCall& call) {
  const CallDevice guard(call.q.device());
  check_device_supported(call.q);
  const at::Tensor q = aligned(call.q), k = aligned(call.k), v = aligned(call.v);
  Flash_fwd_fp8_params params;
  const plan::FwdPlan plan = plan_fp8_call(call, params, q, k, v);
  if (plan.grid == 0) return {};
  const at::Tensor out = call.out.has_value() ? *call.out : new_empty(q, checks::output_shape(q, v), call.out_type);
  const at::Tensor lse = new_empty(q, call.lse_shape, at::kFloat), rng_state = new_empty(q, {2}, at::kLong);
  const int64_t matrices = static_cast<int64_t>(params.is_varlen() ? 1 : params.b) * params.h_k;
  const at::Tensor vt = new_empty(q, {matrices, params.d_v, params.vt_keys}, at::kByte);
  set_params_out(params, out, lse);
  params.dropout.rng_state = rng_state.mutable_data_ptr<int64_t>();
  params.vt_ptr = vt.mutable_data_ptr<uint8_t>();
  at::Tensor workspace;
  prepare_fp8(params, plan, q, workspace);
  trace(plan);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  check_launch(run_transpose_v(params, stream), "transpose_v_kernel", q);
  check_launch(run_mha_fwd_fp8(params, plan, stream), "flash_fwd_fp8_kernel", q);
  return {out, lse, new_empty(q, {0}, call.out_type), rng_state};
}

// The plan alone, empty where there is no kernel: no launch, no memory.
inline plan::Explanation explain_fp8(const Fp8FwdCall& call) {
  check_device_supported(call.q);
  const at::Tensor q = aligned_layout(call.q), k = aligned_layout(call.k), v = aligned_layout(call.v);
  Flash_fwd_fp8_params params;
  const plan::FwdPlan plan = plan_fp8_call(call, params, q, k, v);
  if (plan.grid == 0) return {};
  plan::Explanation result = plan::explain(plan);
  result["qkv_dtype"] = std::string(dtype_name(Dtype::kE4m3));
  result["exp"] = std::string(params.exp_codes ? "fast" : "exact");
  return result;
}

// Dense without cu_seqlens, else packed.
template <class Result>
Result mha_fwd_fp8(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& cu_seqlens_q,
                   const OptionalTensor& cu_seqlens_k, const OptionalTensor& q_descale, const OptionalTensor& k_descale,
                   const OptionalTensor& v_descale, const OptionalTensor& sinks, double softmax_scale, bool is_causal,
                   int64_t window_left, int64_t window_right, bool fp16_out, bool fast_exp, bool batch_invariant,
                   int64_t sm_margin, const OptionalTensor& out) {
  const bool is_varlen = cu_seqlens_q.has_value();
  const char* axes = is_varlen ? "total, heads, head_dim" : "batch, seqlen, heads, head_dim";
  const int64_t dims = is_varlen ? 3 : 4;
  const OptionalTensor no_slopes;
  const ScoreOptions scores{softmax_scale, is_causal, window_left, window_right, 0.0, no_slopes, sinks};
  checks::e4m3("q", q, dims, axes);
  checks::e4m3("k", k, dims, axes);
  checks::e4m3("v", v, dims, axes);
  checks::key_value(k, v, q,
                    is_varlen ? at::DimVector{-1, -1, q.size(-1)} : at::DimVector{q.size(0), -1, -1, q.size(-1)}, axes);
  Flash_fwd_fp8_params sequences;
  if (is_varlen != cu_seqlens_k.has_value())
    checks::fail("cu_seqlens_k", "expected None like cu_seqlens_q, or neither");
  const int64_t batch = is_varlen ? checks::cu_seqlens(*cu_seqlens_q, *cu_seqlens_k, q) : q.size(0);
  sequences.b = static_cast<int>(batch);
  sequences.varlen.cu_seqlens_q = int_or_null(cu_seqlens_q);
  sequences.varlen.cu_seqlens_k = int_or_null(cu_seqlens_k);
  sequences.exp_codes = fast_exp;
  sequences.batch_invariant = batch_invariant;
  check_scores(scores, q, batch, 0.0);
  checks::descale("q_descale", q_descale, q, batch);
  checks::descale("k_descale", k_descale, q, batch);
  checks::descale("v_descale", v_descale, q, batch);
  const at::DimVector lse_shape =
      is_varlen ? at::DimVector{q.size(1), q.size(0)} : at::DimVector{q.size(0), q.size(2), q.size(1)};
  const at::ScalarType out_type = fp16_out ? at::kHalf : at::kBFloat16;
  checks::e4m3_output(out, q, v, out_type);
  const Fp8FwdCall call{sequences, q,         k,      v,        q_descale, k_descale,
                        v_descale, lse_shape, scores, out_type, sm_margin, out};
  if constexpr (std::is_same_v<Result, plan::Explanation>) {
    return explain_fp8(call);
  } else {
    return fp8_forward(call);
  }
}

}  // namespace flash
