// The merge of the caller's partial results: check -> describe -> allocate -> launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <vector>

#include "api/allocate.h"
#include "api/kvcache_checks.h"
#include "api/launch_check.h"
#include "api/overlap.h"
#include "params/kvcache.h"

namespace flash {

inline CombineType combine_type(at::ScalarType type) {
  return type == at::kFloat ? CombineType::kFp32 : type == at::kHalf ? CombineType::kFp16 : CombineType::kBf16;
}

inline std::vector<at::Tensor> combine(const at::Tensor& out_partial, const at::Tensor& lse_partial,
                                       const std::optional<at::Tensor>& out_) {
  checks::combine(out_partial, lse_partial, out_);
  overlap::check({{"out", out_}}, {{"out_partial", out_partial}, {"lse_partial", lse_partial}});
  const c10::cuda::CUDAGuard guard(out_partial.device());
  check_device_supported(out_partial);
  at::Tensor out =
      out_.has_value() ? *out_ : new_empty(out_partial, out_partial.sizes().slice(1), out_partial.scalar_type());
  at::Tensor lse = new_empty(out_partial, out_partial.sizes().slice(1, 3), at::kFloat);
  Flash_combine_params params;
  params.partial_ptr = out_partial.const_data_ptr();
  params.lse_partial_ptr = lse_partial.const_data_ptr<float>();
  params.o_ptr = out.mutable_data_ptr();
  params.lse_ptr = lse.mutable_data_ptr<float>();
  for (int64_t axis = 0; axis < 4; ++axis) {
    params.partial_strides[axis] = out_partial.stride(axis);
    params.lse_partial_strides[axis] = lse_partial.stride(axis);
    if (axis < 3) params.o_strides[axis] = out.stride(axis);
  }
  params.splits = static_cast<int>(out_partial.size(0));
  params.b = static_cast<int>(out_partial.size(1));
  params.s = static_cast<int>(out_partial.size(2));
  params.h = static_cast<int>(out_partial.size(3));
  params.d = static_cast<int>(out_partial.size(4));
  params.device = out_partial.device().index();
  check_launch(run_combine(params, combine_type(out_partial.scalar_type()), combine_type(out.scalar_type()),
                           c10::cuda::getCurrentCUDAStream().stream()),
               "combine_kernel", out_partial);
  return {out, lse};
}

}  // namespace flash
