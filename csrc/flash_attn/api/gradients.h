// The gradients of a backward: given and wanted, their rules and strides.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "api/checks.h"
#include "api/overlap.h"
#include "api/scores.h"
#include "api/set_params.h"
#include "plan/problem.h"

namespace flash {

// By name in Python: BwdStage, and what its calls keep.
struct KeptDq {
  std::string stage;         // "": kAll
  OptionalTensor dq_sum;     // what kBegin returned in dq's place
  OptionalTensor softmax_d;  // the same

  plan::BwdStage value() const {
    if (stage.empty()) return plan::BwdStage::kAll;
    return stage == "begin" ? plan::BwdStage::kBegin : stage == "add" ? plan::BwdStage::kAdd : plan::BwdStage::kEnd;
  }
};

struct Gradients {
  const at::Tensor& dout;
  const OptionalTensor& dlse;
  const OptionalTensor& dq;
  const OptionalTensor& dk;
  const OptionalTensor& dv;
  // FlashAttention-2 has no others: the module's functions take these by name.
  bool accumulate_dkv = false;  // dk and dv are fp32, and the call adds to them
  KeptDq kept = {};

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("accumulate_dkv", accumulate_dkv, "a bool");
    visit("dq_stage", kept.stage, "a str");
    visit("dq_sum", kept.dq_sum, "a tensor or None");
    visit("softmax_d", kept.softmax_d, "a tensor or None");
  }
};

// Strides of the gradient of `forward`, given or allocated.
inline MatrixStrides gradient_strides(const OptionalTensor& given, const at::Tensor& forward) {
  return given.has_value() && is_aligned(*given) ? matrix_strides(*given)
                                                 : contiguous_strides(forward, forward.size(-1));
}

// Each stage is given what it needs and nothing that it would not write.
inline void check_stage(const Gradients& gradients) {
  const KeptDq& kept = gradients.kept;
  const std::string& stage = kept.stage;
  if (!stage.empty() && stage != "begin" && stage != "add" && stage != "end") {
    checks::fail("dq_stage", "expected '', 'begin', 'add' or 'end', got '", stage, "'");
  }
  const auto check = [&stage](const char* name, const OptionalTensor& tensor, bool is_wanted) {
    if (tensor.has_value() == is_wanted) return;
    checks::fail(name, is_wanted ? "expected a tensor" : "expected None", " at dq_stage '", stage, "', got ",
                 is_wanted ? "None" : "a tensor");
  };
  check("dq_sum", kept.dq_sum, stage == "add" || stage == "end");
  check("softmax_d", kept.softmax_d, stage == "add");
  if (stage == "begin" || stage == "add") check("dq", gradients.dq, false);
  if (stage == "begin" || stage == "end") {
    check("dk", gradients.dk, false);
    check("dv", gradients.dv, false);
  }
}

// The tensors that a stage is given, as its plan has them.
inline void check_kept(const KeptDq& kept, at::IntArrayRef sum_shape, at::IntArrayRef softmax_d_shape,
                       const at::Tensor& q) {
  const auto check = [&q](const char* name, const OptionalTensor& tensor, at::IntArrayRef shape) {
    if (!tensor.has_value()) return;
    checks::device(name, *tensor, q);
    checks::dtype(name, *tensor, at::kFloat);
    const bool is_vectors = reinterpret_cast<uintptr_t>(tensor->const_data_ptr()) % 16 == 0;
    if (tensor->sizes() != shape || !tensor->is_contiguous() || !is_vectors) {
      checks::fail(name, "expected that of dq_stage 'begin' over the same rows and sequences, contiguous of shape ",
                   shape, ", got shape ", tensor->sizes());
    }
  };
  check("dq_sum", kept.dq_sum, sum_shape);
  check("softmax_d", kept.softmax_d, softmax_d_shape);
}

inline void check_gradients(const Gradients& gradients, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& out, const at::Tensor& softmax_lse, at::IntArrayRef lse_shape) {
  check_stage(gradients);
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
                                  {"origins", scores.origins},
                                  {"softmax_d", gradients.kept.softmax_d}};
  overlap::check({{"dq", gradients.dq}, {"dk", gradients.dk}, {"dv", gradients.dv}, {"dq_sum", gradients.kept.dq_sum}},
                 read);
}

}  // namespace flash
