// The gradients of a backward: given and wanted, their rules and strides.
#pragma once

#include <ATen/core/Tensor.h>

#include "api/checks.h"
#include "api/overlap.h"
#include "api/scores.h"
#include "api/set_params.h"

namespace flash {

struct Gradients {
  const at::Tensor& dout;
  const OptionalTensor& dlse;
  const OptionalTensor& dq;
  const OptionalTensor& dk;
  const OptionalTensor& dv;
  // FlashAttention-2 has no others: the module's functions take these by name.
  bool accumulate_dkv = false;  // dk and dv are fp32, and the call adds to them

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("accumulate_dkv", accumulate_dkv, "a bool");
  }
};

// Strides of the gradient of `forward`, given or allocated.
inline MatrixStrides gradient_strides(const OptionalTensor& given, const at::Tensor& forward) {
  return given.has_value() && is_aligned(*given) ? matrix_strides(*given)
                                                 : contiguous_strides(forward, forward.size(-1));
}

inline void check_gradients(const Gradients& gradients, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& out, const at::Tensor& softmax_lse, at::IntArrayRef lse_shape) {
  const at::DimVector out_shape = checks::output_shape(q, v);
  checks::like("dout", gradients.dout, out_shape, q);
  checks::like("out", out, out_shape, q);
  if (gradients.dq.has_value()) checks::like("dq", *gradients.dq, q.sizes(), q);
  if (gradients.accumulate_dkv) {
    checks::accumulated("dk", gradients.dk, k);
    checks::accumulated("dv", gradients.dv, v);
  } else {
    if (gradients.dk.has_value()) checks::like("dk", *gradients.dk, k.sizes(), q);
    if (gradients.dv.has_value()) checks::like("dv", *gradients.dv, v.sizes(), q);
  }
  checks::lse("softmax_lse", softmax_lse, q, lse_shape);
  if (gradients.dlse.has_value()) checks::lse("dlse", *gradients.dlse, q, lse_shape);
}

inline void check_written(const Gradients& gradients, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& out, const at::Tensor& softmax_lse, const ScoreOptions& scores) {
  const overlap::Operands read = {{"dout", gradients.dout},
                                  {"q", q},
                                  {"k", k},
                                  {"v", v},
                                  {"out", out},
                                  {"softmax_lse", softmax_lse},
                                  {"dlse", gradients.dlse},
                                  {"alibi_slopes", scores.alibi_slopes},
                                  {"sinks", scores.sinks},
                                  {"origins", scores.origins}};
  overlap::check({{"dq", gradients.dq}, {"dk", gradients.dk}, {"dv", gradients.dv}}, read);
}

}  // namespace flash
