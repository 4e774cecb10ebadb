// Combine of the caller's partial results: check -> set_params -> allocate -> launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "api/checks.h"
#include "api/device.h"
#include "api/tensors.h"
#include "params/combine.h"

namespace flash {

namespace checks {

inline void combine(const at::Tensor& partial, const at::Tensor& lse, const std::optional<at::Tensor>& out) {
  auto known = [](at::ScalarType type) { return is_supported(type) || type == at::kFloat; };
  if (partial.defined() && !partial.is_cuda()) {
    fail("out_partial", "expected a CUDA tensor, got one on ", partial.device());
  }
  strided("out_partial", partial);
  if (!known(partial.scalar_type()))
    fail("out_partial", "expected dtype ", kCombinedDtypes, ", got ", dtype_name(partial.scalar_type()));
  rank("out_partial", partial, 5, "splits, batch, seqlen, heads, head_dim");
  last_stride("out_partial", partial);
  if (lse.device() != partial.device()) {
    fail("lse_partial", "expected a tensor on the device of out_partial (", partial.device(), "), got one on ",
         lse.device());
  }
  strided("lse_partial", lse);
  dtype("lse_partial", lse, at::kFloat);
  shape("lse_partial", lse, partial.sizes().slice(0, 4));
  at_most("out_partial", partial.size(0), "splits");
  at_most("out_partial", partial.size(4), "columns");
  int64_t rows = 1;
  for (int64_t axis = 1; axis < 4; ++axis) {
    at_most("out_partial", partial.size(axis), "rows of all heads");
    rows *= partial.size(axis);
    at_most("out_partial", rows, "rows of all heads");
  }
  if (!out.has_value()) return;
  if (out->device() != partial.device()) {
    fail("out", "expected a tensor on the device of out_partial (", partial.device(), "), got one on ", out->device());
  }
  strided("out", *out);
  if (!known(out->scalar_type()))
    fail("out", "expected dtype ", kCombinedDtypes, ", got ", dtype_name(out->scalar_type()));
  shape("out", *out, partial.sizes().slice(1));
  last_stride("out", *out);
}

}  // namespace checks

inline CombineType combine_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? CombineType::kFp32 : combine_type(dtype_of(tensor));
}

inline Flash_combine_params set_params_combine(const at::Tensor& partial, const at::Tensor& lse_partial,
                                               const at::Tensor& out, const at::Tensor& lse) {
  Flash_combine_params params;
  params.partial_ptr = partial.const_data_ptr();
  params.lse_partial_ptr = lse_partial.const_data_ptr<float>();
  params.o_ptr = out.mutable_data_ptr();
  params.lse_ptr = lse.mutable_data_ptr<float>();
  for (int64_t axis = 0; axis < 4; ++axis) {
    params.partial_strides[axis] = partial.stride(axis);
    params.lse_partial_strides[axis] = lse_partial.stride(axis);
    if (axis < 3) params.o_strides[axis] = out.stride(axis);
  }
  params.splits = static_cast<int>(partial.size(0));
  params.outer = static_cast<int>(partial.size(1));
  params.middle = static_cast<int>(partial.size(2));
  params.inner = static_cast<int>(partial.size(3));
  params.d = static_cast<int>(partial.size(4));
  params.o_type = combine_type(out);
  const int64_t cols = kCombineVectorBytes / partial.element_size();
  const bool whole = params.d > 0 && params.d % cols == 0;
  params.partial_vectors = whole && is_aligned(partial, kCombineVectorBytes);
  params.o_vectors = whole && is_aligned(out, std::min(cols * out.element_size(), kCombineVectorBytes));
  params.device = partial.device().index();
  return params;
}

inline std::vector<at::Tensor> combine(const at::Tensor& out_partial, const at::Tensor& lse_partial,
                                       const std::optional<at::Tensor>& out_) {
  checks::combine(out_partial, lse_partial, out_);
  overlap::check({{"out", out_}}, {{"out_partial", out_partial}, {"lse_partial", lse_partial}});
  const CallDevice guard(out_partial.device());
  check_device_supported(out_partial);
  at::Tensor out =
      out_.has_value() ? *out_ : new_empty(out_partial, out_partial.sizes().slice(1), out_partial.scalar_type());
  at::Tensor lse = new_empty(out_partial, out_partial.sizes().slice(1, 3), at::kFloat);
  check_launch(run_combine(set_params_combine(out_partial, lse_partial, out, lse), combine_type(out_partial),
                           c10::cuda::getCurrentCUDAStream().stream()),
               "combine_kernel", out_partial);
  return {out, lse};
}

}  // namespace flash
