// Options of scores: their names, their checks, and the parameters that they become; and sm_margin.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

#include "api/bias.h"
#include "api/checks.h"
#include "api/mask.h"
#include "params/flash.h"

namespace flash {

struct ScoreOptions {
  double softmax_scale;
  bool is_causal;
  int64_t window_left, window_right;
  double softcap;
  const OptionalTensor& alibi_slopes;
  // FlashAttention-2 has no others: the module's functions take these, and those of the records below, by name.
  OptionalTensor sinks;
  OptionalTensor origins;  // int64 (b, kOriginWords)
  MaskTensors mask = {};
  BiasTensors bias = {};

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit_each(*this, visit);
  }
  template <class Visitor>
  void visit_named(Visitor&& visit) const {
    visit_each(*this, visit);
  }

 private:
  template <class Scores, class Visitor>
  static void visit_each(Scores& scores, Visitor&& visit) {
    visit("sinks", scores.sinks, "a Tensor");
    visit("origins", scores.origins, "a Tensor");
    visit("mask", scores.mask, "MaskFactors");
    visit("attn_bias", scores.bias.attn_bias, "a Tensor");
    visit("rel_bias", scores.bias.rel_bias, "a Tensor");
  }
};

// Of a named option: one of another type needs a line here, a tensor none.
inline bool is_given(const OptionalTensor& tensor) { return tensor.has_value(); }
inline bool is_given(const MaskTensors& mask) { return mask.given(); }

namespace overlap {

inline void check_option(const char* name, const OptionalTensor& tensor, Operands written) {
  check(written, {{name, tensor}});
}
inline void check_option(const char*, const MaskTensors& mask, Operands written) {
  checks::mask_overlap(mask, written);
}

}  // namespace overlap

struct LaunchOptions {
  int64_t sm_margin = 0;

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("sm_margin", sm_margin, "an int");
  }
};

inline void check_scores(const ScoreOptions& scores, const at::Tensor& q, int64_t batch, double p_dropout) {
  checks::numbers(p_dropout, scores.softmax_scale, scores.softcap);
  checks::alibi(scores.alibi_slopes, q, batch);
  checks::sinks(scores.sinks, q);
  checks::origins(scores.origins, q, batch);
}

// written: outputs, which must not overlap what the call reads.
inline void check_score_overlaps(const ScoreOptions& scores, overlap::Operands written) {
  overlap::check(written, {{"alibi_slopes", scores.alibi_slopes}});
  scores.visit_named([&](const char* name, const auto& option, const char*) {
    if (is_given(option)) overlap::check_option(name, option, written);
  });
}

// Of calls whose kernels know no named option but sinks. where: which calls these are, as in " over a KV cache".
inline void check_scores_with_sinks_alone(const ScoreOptions& scores, const at::Tensor& q, int64_t batch,
                                          const char* where) {
  check_scores(scores, q, batch, 0.0);
  scores.visit_named([&](const char* name, const auto& option, const char*) {
    const bool is_sink = std::string_view(name) == "sinks";
    if (!is_sink && is_given(option)) checks::fail(name, "expected None", where, ", got one");
  });
}

// Of calls that may have a mask and biases.
inline void check_dense_scores(const ScoreOptions& scores, const at::Tensor& q, const at::Tensor& k, double p_dropout) {
  check_scores(scores, q, q.size(0), p_dropout);
  if (scores.mask.given()) checks::mask(scores.mask, q, k.size(1));
  if (scores.bias.given()) checks::biases(scores.bias, q, k.size(1));
}
inline void check_packed_scores(const ScoreOptions& scores, const at::Tensor& q, const at::Tensor& k, int64_t batch,
                                double p_dropout, int64_t max_seqlen_k, bool is_paged = false) {
  check_scores(scores, q, batch, p_dropout);
  if (scores.bias.given()) checks::packed_biases(scores.bias, q, max_seqlen_k);
  if (!scores.mask.given()) return;
  if (is_paged) checks::fail("block_table", "expected None with a mask on CUDA, got a tensor");
  checks::packed_mask(scores.mask, q, k.size(0), max_seqlen_k);
}

inline Window make_window(const ScoreOptions& scores) {
  auto side = [](int64_t width) { return width < 0 || width >= kUnbounded ? kUnbounded : static_cast<int>(width); };
  Window window{side(scores.window_left), side(scores.window_right)};
  if (scores.is_causal) window.right = 0;
  return window;
}

// The kernels flush denormals to 0 and would then make NaN of a masked score of -inf: a scale of 0 is applied before
// the mask.
inline float normal_float(double value) {
  const float rounded = static_cast<float>(value);
  return std::fabs(rounded) < std::numeric_limits<float>::min() ? 0.0f : rounded;
}

// Whether ScoreMod is needed: softcap, ALiBi, biases or a scale that is not positive.
inline bool has_score_mod(const ScoreOptions& scores) {
  return static_cast<float>(scores.softcap) > 0.0f || scores.alibi_slopes.has_value() || scores.bias.is_read() ||
         !(normal_float(scores.softmax_scale) > 0.0f);
}

// Origins matter only to ALiBi, rel_bias and dropout.
inline void set_params_origins(Flash_fwd_params& params, const ScoreOptions& scores) {
  const bool counts_positions =
      params.has_dropout || params.alibi_slopes_ptr != nullptr || scores.bias.rel_bias.has_value();
  if (scores.origins.has_value() && counts_positions) {
    params.origins_ptr = scores.origins->const_data_ptr<int64_t>();
  }
}

inline void set_params_scores(Flash_fwd_params& params, const ScoreOptions& scores) {
  constexpr double kLog2e = 1.4426950408889634;
  params.scale_softmax = normal_float(scores.softmax_scale);
  params.softcap = static_cast<float>(scores.softcap);
  params.softcap_series = softcap_series(params.scale_softmax, params.softcap);
  params.has_score_mod = has_score_mod(scores);
  params.softmax_scale_log2 = params.has_score_mod ? 1.0f : static_cast<float>(scores.softmax_scale * kLog2e);
  params.window = make_window(scores);
  if (scores.alibi_slopes.has_value()) {
    params.alibi_slopes_ptr = scores.alibi_slopes->const_data_ptr<float>();
    params.alibi_slopes_batch_stride = scores.alibi_slopes->dim() == 2 ? scores.alibi_slopes->stride(0) : 0;
  }
  if (scores.sinks.has_value()) params.sinks_ptr = scores.sinks->const_data_ptr<float>();
}

}  // namespace flash
