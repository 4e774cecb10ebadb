// The launches of a forward, as its plan says.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include "api/allocate.h"
#include "api/environment.h"
#include "api/launch_check.h"
#include "api/prepare.h"
#include "api/problem.h"
#include "api/trace.h"
#include "core/static_switch.h"
#include "params/combine.h"
#include "params/flash.h"
#include "plan/fwd_plan.h"

namespace flash {

// The instantiation that the plan names (flash_api.cpp).
cudaError_t run_mha_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

inline plan::FwdPlan plan_forward(const plan::FwdProblem& problem, int device, int64_t sm_margin) {
  return plan::plan_fwd(problem, device_of(device, sm_margin), forced_family());
}

// `partials` holds the partial results of the KV splits, if there are several.
inline Flash_fwd_split_params set_params_splits(const Flash_fwd_params& params, const plan::FwdPlan& plan,
                                                const at::Tensor& q, at::Tensor& partials) {
  Flash_fwd_split_params split;
  static_cast<Flash_fwd_params&>(split) = params;
  split.splits.count = plan.num_splits;
  if (plan.num_splits == 1) return split;
  split.splits.rows = plan.partial_rows;
  const int64_t results = plan.num_splits * plan.partial_rows;
  partials = new_empty(q, {results * (params.d_v + 1)}, at::kFloat);
  split.splits.out_ptr = partials.mutable_data_ptr<float>();
  split.splits.lse_ptr = split.splits.out_ptr + results * params.d_v;
  return split;
}

// Of what the splits have written. The family of the splits asks for 16-byte vectors everywhere.
inline Flash_combine_params set_params_combine(const Flash_fwd_split_params& params, Dtype dtype) {
  const KvSplits& splits = params.splits;
  const int64_t matrix_rows = params.seqlen_q, head_rows = matrix_rows * params.h;
  Flash_combine_params combine;
  combine.partial_ptr = splits.out_ptr;
  combine.lse_partial_ptr = splits.lse_ptr;
  combine.o_ptr = params.o_ptr;
  combine.lse_ptr = params.softmax_lse_ptr;
  const int64_t row_strides[4] = {splits.rows, head_rows, matrix_rows, 1};
  for (int axis = 0; axis < 4; ++axis) {
    combine.partial_strides[axis] = row_strides[axis] * params.d_v;
    combine.lse_partial_strides[axis] = row_strides[axis];
  }
  combine.o_strides[0] = params.o_strides.batch;
  combine.o_strides[1] = params.o_strides.head;
  combine.o_strides[2] = params.o_strides.row;
  combine.splits = splits.count;
  combine.outer = params.is_varlen() ? 1 : params.b;
  combine.middle = params.h;
  combine.inner = params.seqlen_q;
  combine.d = params.d_v;
  combine.o_type = combine_type(dtype);
  combine.partial_vectors = combine.o_vectors = true;
  combine.sinks_ptr = params.sinks_ptr;
  combine.segments_q = params.varlen.segments_q;
  combine.segments = params.b;
  combine.device = params.device;
  return combine;
}

// Behind prepare().
inline void launch_prepared(const Flash_fwd_params& params, const plan::FwdPlan& plan, const at::Tensor& q) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  at::Tensor partials;
  const Flash_fwd_split_params split = set_params_splits(params, plan, q, partials);
  check_launch(run_mha_fwd(split, plan, stream), "flash_fwd_kernel", q);
  if (plan.num_splits > 1) {
    check_launch(run_combine(set_params_combine(split, plan.dtype), CombineType::kFp32, stream), "combine_kernel", q);
  }
  if (params.p_ptr != nullptr) {
    check_launch(run_dropout_probs(params, plan.dtype, stream), "dropout_probs_kernel", q);
  }
}

inline void launch_forward(Flash_fwd_params& params, const plan::FwdPlan& plan, const at::Tensor& q) {
  at::Tensor workspace;
  check_launch(prepare(params, plan.is_dynamic, q, workspace), "prepare_kernel", q);
  launch_prepared(params, plan, q);
}

}  // namespace flash
