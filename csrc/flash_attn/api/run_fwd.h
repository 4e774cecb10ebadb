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
#include "params/flash.h"
#include "plan/fwd_plan.h"

namespace flash {

// The instantiation that the plan names (flash_api.cpp).
cudaError_t run_mha_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

inline plan::FwdPlan plan_forward(const plan::FwdProblem& problem, int device) {
  return plan::plan_fwd(problem, device_of(device), forced_family());
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

inline void launch_forward(Flash_fwd_params& params, const plan::FwdPlan& plan, const at::Tensor& q) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  at::Tensor workspace, partials;
  check_launch(prepare(params, plan.is_dynamic, q, workspace), "prepare_kernel", q);
  const Flash_fwd_split_params split = set_params_splits(params, plan, q, partials);
  check_launch(run_mha_fwd(split, plan, stream), "flash_fwd_kernel", q);
  const bool is_fp16 = plan.dtype == Dtype::kFp16;
  if (plan.num_splits > 1) {
    check_launch(FP16_SWITCH(is_fp16, [&] { return run_fwd_combine_<kDtype>(split, stream); }), "fwd_combine_kernel",
                 q);
  }
  if (params.p_ptr != nullptr) {
    check_launch(FP16_SWITCH(is_fp16, [&] { return run_dropout_probs_<kDtype>(params, stream); }),
                 "dropout_probs_kernel", q);
  }
}

}  // namespace flash
