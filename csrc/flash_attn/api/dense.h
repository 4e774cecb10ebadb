// A dense call: its checks, then its results or its plan. The module's functions and the autograd node share it.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "api/backward.h"
#include "api/checks.h"
#include "api/forward.h"
#include "api/overlap.h"
#include "api/scores.h"
#include "api/set_params.h"

namespace flash {

constexpr const char* kDenseAxes = "batch, seqlen, heads, head_dim";

// S_dmask is padded to multiples of 128, as in FlashAttention-2. The caller's maximum length may be loose: no sequence
// is longer than kMaxLength.
inline int probability_rows(int64_t max_seqlen) {
  constexpr int64_t kProbabilityTile = 128;
  const int64_t rows = std::min<int64_t>(max_seqlen, kMaxLength);
  return static_cast<int>((rows + kProbabilityTile - 1) / kProbabilityTile * kProbabilityTile);
}

// An entry point returns its results, or its plan for explain().
using Tensors = std::vector<at::Tensor>;

template <class Result>
Result run_or_explain(const FwdCall& call) {
  if constexpr (std::is_same_v<Result, plan::Explanation>) {
    return explain(call);
  } else {
    return forward(call);
  }
}

template <class Result>
Result run_or_explain(const BwdCall& call) {
  if constexpr (std::is_same_v<Result, plan::Explanation>) {
    return explain(call);
  } else {
    return backward(call);
  }
}

template <class Result>
Result dense_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
                     const ScoreOptions& scores, double p_dropout, bool return_softmax, const OptionalGenerator& gen,
                     bool return_max_logit, bool batch_invariant, const FwdOptions& options, const QuantArgs& quant,
                     int64_t sm_margin) {
  checks::query(q, 4, kDenseAxes, true);
  checks::whole_vectors(q);
  const int64_t batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  checks::key_value(k, v, q, {batch, -1, -1, q.size(3)}, kDenseAxes, true);
  checks::quant_args(quant, q, k, v, batch, p_dropout);
  checks::output(out, q, checks::output_shape(q, v), quant.result_type(q));
  check_dense_scores(scores, q, k, p_dropout, {{"out", out}});
  checks::generator(gen);
  if (options.rng_state.has_value()) checks::rng_state(options.rng_state, p_dropout, q);
  overlap::check({{"out", out}}, {{"q", q},
                                  {"k", k},
                                  {"v", v},
                                  {"alibi_slopes", scores.alibi_slopes},
                                  {"sinks", scores.sinks},
                                  {"origins", scores.origins},
                                  {"attn_bias", scores.bias.attn_bias},
                                  {"rel_bias", scores.bias.rel_bias},
                                  {"rng_state", options.rng_state},
                                  {"q_descale", quant.q},
                                  {"k_descale", quant.k},
                                  {"v_descale", quant.v}});
  auto sequences = dense_sequences<Flash_fwd_params>(batch, batch_invariant);
  sequences.p_rows = probability_rows(seqlen_q);
  sequences.p_cols = probability_rows(k.size(1));
  return run_or_explain<Result>(FwdCall{sequences,
                                        q,
                                        k,
                                        v,
                                        out,
                                        {batch, heads, seqlen_q},
                                        scores,
                                        p_dropout,
                                        return_softmax,
                                        gen,
                                        return_max_logit,
                                        options,
                                        quant,
                                        sm_margin});
}

template <class Result>
Result dense_backward(const Gradients& gradients, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const at::Tensor& out, const at::Tensor& softmax_lse, const ScoreOptions& scores,
                      double p_dropout, bool deterministic, const OptionalTensor& rng_state, bool batch_invariant,
                      int64_t sm_margin) {
  checks::query(q, 4, kDenseAxes);
  checks::whole_vectors(q);
  const int64_t batch = q.size(0);
  checks::key_value(k, v, q, {batch, -1, -1, q.size(3)}, kDenseAxes);
  check_gradients(gradients, q, k, v, out, softmax_lse, {batch, q.size(2), q.size(1)});
  check_dense_scores(scores, q, k, p_dropout);
  checks::rng_state(rng_state, p_dropout, q);
  check_written(gradients, q, k, v, out, softmax_lse, scores);
  const auto sequences = dense_sequences<Flash_bwd_params>(batch, batch_invariant);
  return run_or_explain<Result>(
      BwdCall{sequences, gradients, q, k, v, out, softmax_lse, scores, p_dropout, deterministic, rng_state, sm_margin});
}

}  // namespace flash
