// The pybind11 module flash_attn_2_cuda: entry points, and the dispatch to the instantiations of the kernels. After the
// checks api/forward.h or api/backward.h runs the call: set_params -> plan -> allocate -> launch -> return.
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/autograd_node.h"
#include "api/backward.h"
#include "api/checks.h"
#include "api/combine.h"
#include "api/decode.h"
#include "api/dense.h"
#include "api/environment.h"
#include "api/forward.h"
#include "api/jvp.h"
#include "api/mla.h"
#include "api/overlap.h"
#include "api/quantized.h"
#include "api/scores.h"
#include "api/set_params.h"
#include "api/signatures.h"
#include "core/static_switch.h"
#include "params/flash.h"
#include "params/fp8.h"
#include "params/jvp.h"
#include "params/kvcache.h"
#include "plan/bwd_plan.h"
#include "plan/explain.h"
#include "plan/fwd_plan.h"
#include "plan/tiles.h"

namespace flash {

// ---- dispatch ----

// kHasValueDim: V and O have another head dim than Q and K.
template <Dtype kDtype, int kHeadDim, bool kHasValueDim>
cudaError_t run_mha_fwd_family(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  constexpr plan::Sm90FwdTile kPair = plan::kSm90ValueDimTile;
  if constexpr (kHasValueDim) {
    if constexpr (kHeadDim == kPair.head_dim) {
      return run_mha_fwd_wgmma_<kDtype, kHeadDim, kPair.value_dim()>(params, plan, stream);
    }
    return cudaErrorInvalidValue;  // no plan has this
  } else {
    if constexpr (plan::kLeastWgmmaHeadDim <= kHeadDim && kHeadDim <= plan::kMaxWgmmaHeadDim) {
      if (plan.family == plan::Family::kWgmma) return run_mha_fwd_wgmma_<kDtype, kHeadDim>(params, plan, stream);
    }
    return run_mha_fwd_<kDtype, kHeadDim>(params, plan, stream);
  }
}

cudaError_t run_mha_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  return FP16_SWITCH(plan.dtype, [&] {
    return HEADDIM_SWITCH(plan.head_dim, [&] {
      return BOOL_SWITCH(plan.has_value_dim(), kHasValueDim,
                         [&] { return run_mha_fwd_family<kDtype, kHeadDim, kHasValueDim>(params, plan, stream); });
    });
  });
}

cudaError_t run_mha_fwd_fp8(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  return FP16_SWITCH(plan.dtype, [&] {
    return HEADDIM_8BIT_SWITCH(plan.head_dim,
                               [&] { return run_mha_fwd_fp8_wgmma_<kDtype, kHeadDim>(params, plan, stream); });
  });
}

cudaError_t run_mha_fwd_jvp(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  return FP16_SWITCH(plan.dtype, [&] {
    return plan.head_dim == 64 ? run_mha_fwd_jvp_wgmma_<kDtype, 64>(params, plan, stream)
                               : run_mha_fwd_jvp_wgmma_<kDtype, 128>(params, plan, stream);
  });
}

cudaError_t run_mha_fwd_split(const Flash_kvcache_params& params, Dtype q_dtype, cudaStream_t stream) {
  if (is_eight_bit(params.kv_dtype)) {
    return E4M3_SWITCH(params.kv_dtype, [&] {
      return HEADDIM_8BIT_SWITCH(params.d, [&] { return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream); });
    });
  }
  return FP16_SWITCH(q_dtype, [&] {
    return HEADDIM_SWITCH(params.d, [&] { return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream); });
  });
}

template <Dtype kDtype, int kHeadDim, bool kHasValueDim>
cudaError_t run_mha_bwd_family(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  constexpr plan::Sm90BwdTile kPair = plan::kSm90BwdValueDimTile;
  if constexpr (kHasValueDim) {
    if constexpr (kHeadDim == kPair.head_dim) {
      return run_mha_bwd_wgmma_<kDtype, kHeadDim, kPair.value_dim()>(params, plan, stream);
    }
    return cudaErrorInvalidValue;  // no plan has this
  } else {
    if constexpr (plan::sm90_bwd_tile(kHeadDim, kHeadDim).head_dim == kHeadDim) {
      if (plan.family == plan::Family::kWgmma) return run_mha_bwd_wgmma_<kDtype, kHeadDim>(params, plan, stream);
    }
    return run_mha_bwd_<kDtype, kHeadDim>(params, plan, stream);
  }
}

cudaError_t run_mha_bwd(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  return FP16_SWITCH(plan.dtype, [&] {
    return HEADDIM_SWITCH(plan.head_dim, [&] {
      return BOOL_SWITCH(plan.has_value_dim(), kHasValueDim,
                         [&] { return run_mha_bwd_family<kDtype, kHeadDim, kHasValueDim>(params, plan, stream); });
    });
  });
}

namespace {

// ---- entry points ----

// Sets each keyword argument in the record that has it. Under the GIL.
template <class... Options>
void set_named(const py::kwargs& named, Options&... options) {
  for (const auto& [key, given] : named) {
    const std::string name = py::cast<std::string>(key);
    const py::handle value = given;
    bool is_known = false;
    const auto set = [&](const char* known, auto& option, const char* expected) {
      if (name != known) return;
      is_known = true;
      using Option = std::decay_t<decltype(option)>;
      py::detail::make_caster<Option> caster;
      if (!caster.load(value, true)) {
        throw py::type_error(name + ": expected " + expected + ", got " + Py_TYPE(value.ptr())->tp_name);
      }
      option = py::detail::cast_op<Option>(std::move(caster));
    };
    (options.visit_named(set), ...);
    if (!is_known) throw py::type_error(name + ": expected no argument of this name");
  }
}

template <class Result>
Result mha_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
               const OptionalTensor& alibi_slopes, double p_dropout, double softmax_scale, bool is_causal,
               int64_t window_left, int64_t window_right, double softcap, bool return_softmax,
               const OptionalGenerator& gen, bool return_max_logit, bool batch_invariant, const py::kwargs& named) {
  ScoreOptions scores{softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}};
  FwdOptions options;
  QuantArgs quant;
  LaunchOptions launch;
  set_named(named, scores, options, quant, launch);
  const CallGuard guard;
  return dense_forward<Result>(q, k, v, out, scores, p_dropout, return_softmax, gen, return_max_logit, batch_invariant,
                               options, quant, launch.sm_margin);
}

template <class Result>
Result mha_varlen_fwd(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
                      const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                      const OptionalTensor& leftpad_k, const OptionalTensor& block_table,
                      const OptionalTensor& alibi_slopes, int64_t max_seqlen_q, int64_t max_seqlen_k, double p_dropout,
                      double softmax_scale, bool /*zero_tensors*/, bool is_causal, int64_t window_left,
                      int64_t window_right, double softcap, bool return_softmax, const OptionalGenerator& gen,
                      int64_t /*num_splits*/, bool return_max_logit, bool batch_invariant, const py::kwargs& named) {
  const char* axes = "total, heads, head_dim";
  ScoreOptions scores{softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}};
  FwdOptions options;
  QuantArgs quant;
  LaunchOptions launch;
  LatentOptions latent;
  set_named(named, scores, options, quant, launch, latent);
  const CallGuard guard;
  if (latent.qv.has_value()) {
    checks::query(q, 3, axes);
    const int64_t batch = checks::cu_seqlens(cu_seqlens_q, cu_seqlens_k, q);
    auto sequences = packed_sequences<Flash_fwd_params>(batch, batch_invariant, cu_seqlens_q, cu_seqlens_k);
    set_latent_sequences(sequences, seqused_k, leftpad_k, block_table, k);
    const MlaCall call{q,  *latent.qv, k,  v,        out, block_table, scores, 0, batch_invariant, launch.sm_margin,
                       {}, {},         {}, sequences};
    checks::packed_mla(call, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, quant, p_dropout, return_max_logit);
    return packed_mla<Result>(call);
  }
  checks::query(q, 3, axes, true);
  checks::whole_vectors(q);
  const int64_t batch = checks::cu_seqlens(cu_seqlens_q, cu_seqlens_k, q);
  if (block_table.has_value()) {
    checks::key_value(k, v, q, {-1, -1, -1, q.size(2)}, "blocks, page_size, heads, head_dim", true);
  } else {
    checks::key_value(k, v, q, {-1, -1, q.size(2)}, axes, true);
  }
  checks::quant_args(quant, q, k, v, batch, p_dropout);
  checks::output(out, q, checks::output_shape(q, v), quant.result_type(q));
  checks::lengths("seqused_k", seqused_k, q, batch);
  if (seqused_k.has_value() && scores.mask.key_hidden.has_value())  // whose strips of keys are those of cu_seqlens_k
    checks::fail("seqused_k", "expected None with a mask that hides keys from ranges of queries on CUDA, got a tensor");
  checks::lengths("leftpad_k", leftpad_k, q, batch);
  checks::block_table(block_table, q, batch);
  checks::max_seqlen("max_seqlen_q", max_seqlen_q);
  checks::max_seqlen("max_seqlen_k", max_seqlen_k);
  check_packed_scores(scores, q, k, batch, p_dropout, max_seqlen_k, block_table.has_value(), {{"out", out}});
  checks::generator(gen);
  if (options.rng_state.has_value()) checks::rng_state(options.rng_state, p_dropout, q);
  const overlap::Operands read = {{"q", q},
                                  {"k", k},
                                  {"v", v},
                                  {"cu_seqlens_q", cu_seqlens_q},
                                  {"cu_seqlens_k", cu_seqlens_k},
                                  {"seqused_k", seqused_k},
                                  {"leftpad_k", leftpad_k},
                                  {"block_table", block_table},
                                  {"alibi_slopes", alibi_slopes},
                                  {"sinks", scores.sinks},
                                  {"origins", scores.origins},
                                  {"attn_bias", scores.bias.attn_bias},
                                  {"rel_bias", scores.bias.rel_bias},
                                  {"rng_state", options.rng_state},
                                  {"q_descale", quant.q},
                                  {"k_descale", quant.k},
                                  {"v_descale", quant.v}};
  overlap::check({{"out", out}}, read);
  auto sequences = packed_sequences<Flash_fwd_params>(batch, batch_invariant, cu_seqlens_q, cu_seqlens_k);
  sequences.p_rows = probability_rows(max_seqlen_q);
  sequences.p_cols = probability_rows(max_seqlen_k);
  sequences.varlen.seqused_k = int_or_null(seqused_k);
  sequences.varlen.leftpad_k = int_or_null(leftpad_k);
  sequences.paged = set_params_pages(block_table, k);
  return run_or_explain<Result>(FwdCall{sequences,
                                        q,
                                        k,
                                        v,
                                        out,
                                        {q.size(1), q.size(0)},
                                        scores,
                                        p_dropout,
                                        return_softmax,
                                        gen,
                                        return_max_logit,
                                        options,
                                        quant,
                                        launch.sm_margin});
}

template <class Result>
Result mha_bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
               const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq, const OptionalTensor& dk,
               const OptionalTensor& dv, const OptionalTensor& alibi_slopes, double p_dropout, double softmax_scale,
               bool is_causal, int64_t window_left, int64_t window_right, double softcap, bool deterministic,
               const OptionalGenerator& /*gen*/, const OptionalTensor& rng_state, const OptionalTensor& dlse,
               bool batch_invariant, const py::kwargs& named) {
  Gradients gradients{dout, dlse, dq, dk, dv};
  ScoreOptions scores{softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}};
  LaunchOptions launch;
  set_named(named, scores, gradients, launch);
  const CallGuard guard;
  return dense_backward<Result>(gradients, q, k, v, out, softmax_lse, scores, p_dropout, deterministic, rng_state,
                                batch_invariant, launch.sm_margin);
}

template <class Result>
Result mha_varlen_bwd(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq,
                      const OptionalTensor& dk, const OptionalTensor& dv, const at::Tensor& cu_seqlens_q,
                      const at::Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes, int64_t max_seqlen_q,
                      int64_t max_seqlen_k, double p_dropout, double softmax_scale, bool /*zero_tensors*/,
                      bool is_causal, int64_t window_left, int64_t window_right, double softcap, bool deterministic,
                      const OptionalGenerator& /*gen*/, const OptionalTensor& rng_state, const OptionalTensor& dlse,
                      bool batch_invariant, const py::kwargs& named) {
  const char* axes = "total, heads, head_dim";
  Gradients gradients{dout, dlse, dq, dk, dv};
  ScoreOptions scores{softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}};
  LaunchOptions launch;
  set_named(named, scores, gradients, launch);
  const CallGuard guard;
  checks::query(q, 3, axes);
  checks::whole_vectors(q);
  const int64_t batch = checks::cu_seqlens(cu_seqlens_q, cu_seqlens_k, q);
  checks::key_value(k, v, q, {-1, -1, q.size(2)}, axes);
  check_gradients(gradients, q, k, v, out, softmax_lse, {q.size(1), q.size(0)});
  checks::max_seqlen("max_seqlen_q", max_seqlen_q);
  checks::max_seqlen("max_seqlen_k", max_seqlen_k);
  check_packed_scores(scores, q, k, batch, p_dropout, max_seqlen_k);
  checks::rng_state(rng_state, p_dropout, q);
  check_written(gradients, q, k, v, out, softmax_lse, scores);
  const auto sequences = packed_sequences<Flash_bwd_params>(batch, batch_invariant, cu_seqlens_q, cu_seqlens_k);
  return run_or_explain<Result>(BwdCall{sequences, gradients, q, k, v, out, softmax_lse, scores, p_dropout,
                                        deterministic, rng_state, launch.sm_margin});
}

// kFunction: mha_fwd_kvcache() or explain_kvcache(); kLatentFunction: the same of calls with qv.
template <auto kFunction, auto kLatentFunction>
auto with_kvcache_call(const at::Tensor& q, const at::Tensor& kcache, const at::Tensor& vcache, const OptionalTensor& k,
                       const OptionalTensor& v, const OptionalTensor& seqlens_k, const OptionalTensor& rotary_cos,
                       const OptionalTensor& rotary_sin, const OptionalTensor& cache_batch_idx,
                       const OptionalTensor& leftpad_k, const OptionalTensor& block_table,
                       const OptionalTensor& alibi_slopes, const OptionalTensor& out, double softmax_scale,
                       bool is_causal, int64_t window_left, int64_t window_right, double softcap,
                       bool rotary_interleaved, int64_t num_splits, const OptionalTensor& plan, bool batch_invariant,
                       const py::kwargs& named) {
  ScoreOptions scores{softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}};
  CacheQuantArgs quant;
  LaunchOptions launch;
  LatentOptions latent;
  set_named(named, scores, quant, launch, latent);
  const CallGuard guard;
  const KvCacheCall call{
      q,          wide_query(q, quant), kcache,    vcache,          k,   v,      seqlens_k,          rotary_cos,
      rotary_sin, cache_batch_idx,      leftpad_k, block_table,     out, scores, rotary_interleaved, num_splits,
      plan,       batch_invariant,      quant,     launch.sm_margin};
  return latent.qv.has_value() ? kLatentFunction(call, *latent.qv) : kFunction(call);
}

std::string build_info() {
  std::string info = kernel_build_info();
  info.insert(info.rfind('}'),
              std::string(", \"torch\": \"") + TORCH_VERSION + "\", \"commit\": \"" + FLASH_ATTN_BUILD_COMMIT + "\"");
  return info;
}

}  // namespace
}  // namespace flash

// A plan is a dict, in the order of its fields.
template <>
struct pybind11::detail::type_caster<flash::plan::Explanation> {
  static constexpr auto name = const_name("dict");

  static handle cast(const flash::plan::Explanation& plan, return_value_policy, handle) {
    dict result;
    for (const auto& [key, value] : plan.fields) {
      result[key.c_str()] = std::visit([](const auto& plain) -> object { return pybind11::cast(plain); }, value);
    }
    return result.release();
  }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace flash;
  m.doc() = "Exact attention on CUDA tensors: the kernels of flash_attn.";
  define_fwd(m, "fwd", &mha_fwd<Tensors>,
             "Forward of dense batches: [out, softmax_lse, S_dmask, rng_state(, max_logit)]");
  define_fwd(m, "explain_fwd", &mha_fwd<plan::Explanation>, "The plan of fwd, as a dict; nothing is launched");
  define_varlen_fwd(m, "varlen_fwd", &mha_varlen_fwd<Tensors>,
                    "Forward of packed batches: [out, softmax_lse, S_dmask, rng_state(, max_logit)]");
  define_varlen_fwd(m, "explain_varlen_fwd", &mha_varlen_fwd<plan::Explanation>,
                    "The plan of varlen_fwd, as a dict; nothing is launched");
  m.def("jvp_fwd", &mha_jvp_fwd,
        "Forward with its derivative along tangents: [out, softmax_lse, t_out, t_lse, rng_state]; None: this build and "
        "GPU have no kernel for the call",
        py::arg("q"), py::arg("k"), py::arg("v"), py::arg("tq"), py::arg("tk"), py::arg("tv"), py::arg("cu_seqlens_q"),
        py::arg("cu_seqlens_k"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"),
        py::arg("window_size_right"), py::kw_only(), py::arg("sm_margin") = 0, py::call_guard<CallGuard>());
  define_bwd(m, "bwd", &mha_bwd<Tensors>,
             "Backward of dense batches: [dq, dk, dv, softmax_d(, dsinks, dattn_bias, drel_bias)]");
  define_bwd(m, "explain_bwd", &mha_bwd<plan::Explanation>, "The plan of bwd, as a dict; nothing is launched");
  define_varlen_bwd(m, "varlen_bwd", &mha_varlen_bwd<Tensors>,
                    "Backward of packed batches: [dq, dk, dv, softmax_d(, dsinks, dattn_bias, drel_bias)]");
  define_varlen_bwd(m, "explain_varlen_bwd", &mha_varlen_bwd<plan::Explanation>,
                    "The plan of varlen_bwd, as a dict; nothing is launched");
  define_kvcache(m, "fwd_kvcache", &with_kvcache_call<mha_fwd_kvcache, mha_fwd_mla>,
                 "Forward against a KV cache, which receives k and v first: [out, softmax_lse]");
  define_kvcache(m, "explain_kvcache", &with_kvcache_call<explain_kvcache, explain_mla>,
                 "The plan of fwd_kvcache, as a dict; nothing is launched");
  m.def("kvcache_plan", &any_kvcache_plan, "Schedule and workspace of fwd_kvcache for given lengths: int32 (n,)",
        py::arg("seqlens_k"), py::arg("leftpad_k"), py::arg("batch"), py::arg("seqlen_q"), py::arg("seqlen_new"),
        py::arg("heads"), py::arg("heads_k"), py::arg("head_dim"), py::arg("seqlen_cache"), py::arg("is_causal"),
        py::arg("window_size_left"), py::arg("window_size_right"), py::arg("num_splits"), py::arg("batch_invariant"),
        py::arg("plan") = py::none(), py::kw_only(), py::arg("eight_bit") = false, py::arg("sm_margin") = 0,
        py::arg("head_dim_v") = 0, py::call_guard<CallGuard>());
  m.def("combine", &combine, "Merge of attention over disjoint sets of keys: [out, lse]", py::arg("out_partial"),
        py::arg("lse_partial"), py::arg("out"), py::call_guard<CallGuard>());
  define_attention(m);
  m.def("build_info", &build_info, "Identity of this build as JSON text");
}
