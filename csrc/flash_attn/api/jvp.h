// A forward together with its derivative along tangents of q, k and v: check -> plan -> allocate -> launch -> return.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <utility>
#include <vector>

#include "api/checks.h"
#include "api/device.h"
#include "api/scores.h"
#include "api/set_params.h"
#include "api/tensors.h"
#include "params/jvp.h"
#include "plan/jvp_fwd_plan.h"

namespace flash {

// The instantiation that a plan names (flash_api.cpp).
cudaError_t run_mha_fwd_jvp(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

// A call whose arguments have passed the checks.
struct JvpCall {
  Flash_fwd_params sequences;  // the batch, packed sequences
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  const OptionalTensor& tq;
  const OptionalTensor& tk;
  const OptionalTensor& tv;
  at::DimVector lse_shape;
  ScoreOptions scores;
  int64_t sm_margin;
};

namespace checks {

inline void tangents(const OptionalTensor& tq, const OptionalTensor& tk, const OptionalTensor& tv, const at::Tensor& q,
                     const at::Tensor& k, const at::Tensor& v) {
  if (tq.has_value()) like("tq", *tq, q.sizes(), q);
  if (tk.has_value()) like("tk", *tk, k.sizes(), q);
  if (tv.has_value()) like("tv", *tv, v.sizes(), q);
}

}  // namespace checks

inline at::Tensor aligned(const OptionalTensor& tensor) { return tensor.has_value() ? aligned(*tensor) : at::Tensor(); }

// Some may be undefined.
inline void set_params_tangents(Flash_fwd_jvp_params& params, const at::Tensor& tq, const at::Tensor& tk,
                                const at::Tensor& tv) {
  const auto set = [](auto& pointer, MatrixStrides& strides, const at::Tensor& tangent) {
    if (!tangent.defined()) return;
    pointer = tangent.const_data_ptr();
    strides = matrix_strides(tangent);
  };
  set(params.tq_ptr, params.tq_strides, tq);
  set(params.tk_ptr, params.tk_strides, tk);
  set(params.tv_ptr, params.tv_strides, tv);
}

// P of up to 2^8 times a tangent may leave the range of fp16.
inline void set_params_rescale(Flash_fwd_params& params, const at::Tensor& q) {
  if (q.scalar_type() == at::kHalf) params.rescale_threshold_log2 = 0.0f;
}

inline bool fit_tensor_maps(const Flash_fwd_jvp_params& params, Dtype dtype) {
  const auto holds = [&](const void* pointer, const MatrixStrides& strides, bool is_query) {
    return pointer == nullptr ||
           plan::tensor_map_holds(matrix_shape(params, strides, is_query, params.is_varlen()), dtype);
  };
  return holds(params.tq_ptr, params.tq_strides, true) && holds(params.tk_ptr, params.tk_strides, false) &&
         holds(params.tv_ptr, params.tv_strides, false);
}

// -> [out, lse, t_out, t_lse, rng_state], or nothing: this build and GPU have no kernel for the call.
inline std::optional<std::vector<at::Tensor>> jvp_forward(const JvpCall& call) {
  const CallDevice guard(call.q.device());
  check_device_supported(call.q);
  const at::Tensor q = aligned(call.q), k = aligned(call.k), v = aligned(call.v);
  const at::Tensor tq = aligned(call.tq), tk = aligned(call.tk), tv = aligned(call.tv);
  Flash_fwd_jvp_params params;
  static_cast<Flash_fwd_params&>(params) = call.sequences;
  params.device = call.q.device().index();
  set_params_fprop(params, q, k, v, call.scores, 0.0);
  set_params_rescale(params, q);
  params.o_strides = params.to_strides = contiguous_strides(q, params.d_v);
  set_params_tangents(params, tq, tk, tv);
  plan::FwdProblem problem = fwd_problem(params, dtype_of(q));
  problem.fits_tensor_maps &= fit_tensor_maps(params, dtype_of(q));
  const plan::Device device = device_of(params.device, call.sm_margin);
  const std::optional<plan::FwdPlan> planned = plan::plan_jvp_fwd(problem, device, forced_family());
  if (!planned) return std::nullopt;
  const plan::FwdPlan& plan = *planned;

  const at::DimVector shape = checks::output_shape(q, v);
  const at::Tensor out = new_empty(q, shape, q.scalar_type()), t_out = new_empty(q, shape, q.scalar_type());
  const at::Tensor lse = new_empty(q, call.lse_shape, at::kFloat), t_lse = new_empty(q, call.lse_shape, at::kFloat);
  const at::Tensor rng_state = new_empty(q, {2}, at::kLong);
  set_params_out(params, out, lse);
  params.to_ptr = t_out.mutable_data_ptr();
  params.t_lse_ptr = t_lse.mutable_data_ptr<float>();
  params.dropout.rng_state = rng_state.mutable_data_ptr<int64_t>();
  at::Tensor workspace;
  if (plan.stages.has(plan::Stage::kPrepare)) {
    check_launch(prepare(params, plan.is_dynamic, q, workspace), "prepare_kernel", q);
  }
  check_launch(run_mha_fwd_jvp(params, plan, c10::cuda::getCurrentCUDAStream().stream()), "flash_fwd_jvp_kernel", q);
  return std::vector<at::Tensor>{out, lse, t_out, t_lse, rng_state};
}

// Dense batches, and packed ones where both cu_seqlens are given.
inline std::optional<std::vector<at::Tensor>> mha_jvp_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                          const OptionalTensor& tq, const OptionalTensor& tk,
                                                          const OptionalTensor& tv, const OptionalTensor& cu_seqlens_q,
                                                          const OptionalTensor& cu_seqlens_k, double softmax_scale,
                                                          bool is_causal, int64_t window_left, int64_t window_right,
                                                          int64_t sm_margin) {
  const bool is_packed = cu_seqlens_q.has_value() && cu_seqlens_k.has_value();
  const char* axes = is_packed ? kPackedAxes : kDenseAxes;
  checks::query(q, is_packed ? 3 : 4, axes);
  checks::whole_vectors(q);
  const int64_t heads = q.size(-2), rows = q.size(-3);
  const int64_t batch = is_packed ? checks::cu_seqlens(*cu_seqlens_q, *cu_seqlens_k, q) : q.size(0);
  if (is_packed) {
    checks::key_value(k, v, q, {-1, -1, q.size(2)}, axes);
  } else {
    checks::key_value(k, v, q, {batch, -1, -1, q.size(3)}, axes);
  }
  checks::tangents(tq, tk, tv, q, k, v);
  const OptionalTensor no_slopes;
  const ScoreOptions scores{softmax_scale, is_causal, window_left, window_right, 0.0, no_slopes, {}, {}};
  check_scores_with_sinks_alone(scores, q, batch, " with tangents");
  const auto sequences = is_packed ? packed_sequences<Flash_fwd_params>(batch, false, *cu_seqlens_q, *cu_seqlens_k)
                                   : dense_sequences<Flash_fwd_params>(batch, false);
  const at::DimVector lse_shape = is_packed ? at::DimVector{heads, rows} : at::DimVector{batch, heads, rows};
  return jvp_forward(JvpCall{sequences, q, k, v, tq, tk, tv, lse_shape, scores, sm_margin});
}

}  // namespace flash
