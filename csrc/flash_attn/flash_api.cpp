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

#include "api/backward.h"
#include "api/checks.h"
#include "api/combine.h"
#include "api/decode.h"
#include "api/device.h"
#include "api/eager.h"
#include "api/eager_inference.h"
#include "api/forward.h"
#include "api/jvp.h"
#include "api/mla.h"
#include "api/quantized.h"
#include "api/scores.h"
#include "api/set_params.h"
#include "api/signatures.h"
#include "core/static_switch.h"
#include "params/flash.h"
#include "params/fp8.h"
#include "params/jvp.h"
#include "params/kvcache_wgmma.h"
#include "plan/bwd_plan.h"
#include "plan/bwd_tiles.h"
#include "plan/explain.h"
#include "plan/fwd_plan.h"
#include "plan/tiles.h"

namespace flash {

// ---- dispatch ----

// kHasValueDim: V and O have another head dim than Q and K.
cudaError_t run_mha_fwd(const Flash_fwd_split_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  constexpr plan::Sm90FwdTile kPair = plan::kSm90ValueDimTile;
  return FP16_SWITCH(plan.dtype, [&] {
    return HEADDIM_SWITCH(plan.head_dim, [&] {
      return BOOL_SWITCH(plan.has_value_dim(), kHasValueDim, [&] {
        if constexpr (!kHasValueDim) {
          if constexpr (plan::kLeastWgmmaHeadDim <= kHeadDim) {
            if (plan.family == plan::Family::kWgmma) return run_mha_fwd_wgmma_<kDtype, kHeadDim>(params, plan, stream);
          }
          return run_mha_fwd_<kDtype, kHeadDim>(params, plan, stream);
        } else if constexpr (kHeadDim == kPair.head_dim) {
          return run_mha_fwd_wgmma_<kDtype, kHeadDim, kPair.value_dim()>(params, plan, stream);
        } else {
          return cudaErrorInvalidValue;  // no plan has this
        }
      });
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
    return BOOL_SWITCH(plan.head_dim == 64, kIsSmall, [&] {
      constexpr int kHeadDim = kIsSmall ? 64 : 128;
      if (plan.family == plan::Family::kWgmma) return run_mha_fwd_jvp_wgmma_<kDtype, kHeadDim>(params, plan, stream);
      return run_mha_fwd_jvp_<kDtype, kHeadDim>(params, plan, stream);
    });
  });
}

cudaError_t run_mha_fwd_split(const Flash_kvcache_params& params, bool by_wgmma, Dtype q_dtype, cudaStream_t stream) {
  if (is_eight_bit(params.kv_dtype)) {
    return E4M3_SWITCH(params.kv_dtype, [&] {
      return HEADDIM_8BIT_SWITCH(params.d, [&] { return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream); });
    });
  }
  return FP16_SWITCH(q_dtype, [&] {
    return HEADDIM_SWITCH(params.d, [&] {
      if constexpr (plan::has_kv_wgmma(kHeadDim)) {
        if (by_wgmma) return run_mha_fwd_split_wgmma_<kDtype, kHeadDim>(params, stream);
      }
      return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream);
    });
  });
}

cudaError_t run_mha_bwd(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  constexpr plan::Sm90BwdTile kPair = plan::kSm90BwdValueDimTile;
  return FP16_SWITCH(plan.dtype, [&] {
    return HEADDIM_SWITCH(plan.head_dim, [&] {
      return BOOL_SWITCH(plan.has_value_dim(), kHasValueDim, [&] {
        if constexpr (!kHasValueDim) {
          if constexpr (plan::is_wide(kHeadDim) || plan::sm90_bwd_tile(kHeadDim, kHeadDim).head_dim == kHeadDim) {
            if (plan.family == plan::Family::kWgmma) return run_mha_bwd_wgmma_<kDtype, kHeadDim>(params, plan, stream);
          }
          return run_mha_bwd_<kDtype, kHeadDim>(params, plan, stream);
        } else if constexpr (kHeadDim == kPair.head_dim) {
          return run_mha_bwd_wgmma_<kDtype, kHeadDim, kPair.value_dim()>(params, plan, stream);
        } else {
          return cudaErrorInvalidValue;  // no plan has this
        }
      });
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

// kFunction: mha_fwd() or explain_fwd().
template <auto kFunction>
auto with_fwd_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
                   const OptionalTensor& alibi_slopes, double p_dropout, double softmax_scale, bool is_causal,
                   int64_t window_left, int64_t window_right, double softcap, bool return_softmax,
                   const OptionalGenerator& gen, bool return_max_logit, bool batch_invariant, const py::kwargs& named) {
  FwdCall call{q,
               k,
               v,
               out,
               {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}},
               p_dropout,
               return_softmax,
               gen,
               return_max_logit,
               batch_invariant};
  set_named(named, call.scores, call.options, call.quant, call.launch);
  const CallGuard guard;
  set_dense(call);
  return kFunction(call);
}

// kLatentFunction: packed_mla() with the same result, of calls with qv.
template <auto kFunction, auto kLatentFunction>
auto with_varlen_fwd_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& out,
                          const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                          const OptionalTensor& seqused_k, const OptionalTensor& leftpad_k,
                          const OptionalTensor& block_table, const OptionalTensor& alibi_slopes, int64_t max_seqlen_q,
                          int64_t max_seqlen_k, double p_dropout, double softmax_scale, bool /*zero_tensors*/,
                          bool is_causal, int64_t window_left, int64_t window_right, double softcap,
                          bool return_softmax, const OptionalGenerator& gen, int64_t /*num_splits*/,
                          bool return_max_logit, bool batch_invariant, const py::kwargs& named) {
  FwdCall call{q,
               k,
               v,
               out,
               {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}},
               p_dropout,
               return_softmax,
               gen,
               return_max_logit,
               batch_invariant};
  const PackedArgs packed{cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, max_seqlen_q, max_seqlen_k};
  LatentOptions latent;
  set_named(named, call.scores, call.options, call.quant, call.launch, latent);
  const CallGuard guard;
  if (latent.qv.has_value()) return kLatentFunction(call, packed, *latent.qv);
  set_packed(call, packed);
  return kFunction(call);
}

// kFunction: mha_bwd() or explain_bwd().
template <auto kFunction>
auto with_bwd_call(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                   const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq,
                   const OptionalTensor& dk, const OptionalTensor& dv, const OptionalTensor& alibi_slopes,
                   double p_dropout, double softmax_scale, bool is_causal, int64_t window_left, int64_t window_right,
                   double softcap, bool deterministic, const OptionalGenerator& /*gen*/,
                   const OptionalTensor& rng_state, const OptionalTensor& dlse, bool batch_invariant,
                   const py::kwargs& named) {
  BwdCall call{{dout, dlse, dq, dk, dv},
               q,
               k,
               v,
               out,
               softmax_lse,
               {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}},
               p_dropout,
               deterministic,
               rng_state,
               batch_invariant};
  set_named(named, call.scores, call.gradients, call.launch);
  const CallGuard guard;
  set_dense(call);
  return kFunction(call);
}

template <auto kFunction>
auto with_varlen_bwd_call(const at::Tensor& dout, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& out, const at::Tensor& softmax_lse, const OptionalTensor& dq,
                          const OptionalTensor& dk, const OptionalTensor& dv, const at::Tensor& cu_seqlens_q,
                          const at::Tensor& cu_seqlens_k, const OptionalTensor& alibi_slopes, int64_t max_seqlen_q,
                          int64_t max_seqlen_k, double p_dropout, double softmax_scale, bool /*zero_tensors*/,
                          bool is_causal, int64_t window_left, int64_t window_right, double softcap, bool deterministic,
                          const OptionalGenerator& /*gen*/, const OptionalTensor& rng_state, const OptionalTensor& dlse,
                          bool batch_invariant, const py::kwargs& named) {
  BwdCall call{{dout, dlse, dq, dk, dv},
               q,
               k,
               v,
               out,
               softmax_lse,
               {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, {}, {}},
               p_dropout,
               deterministic,
               rng_state,
               batch_invariant};
  set_named(named, call.scores, call.gradients, call.launch);
  const CallGuard guard;
  set_packed(call, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  return kFunction(call);
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
  MaskBitsArgs mask_bits;
  set_named(named, scores, quant, launch, latent, mask_bits);
  const CallGuard guard;
  const KvCacheCall call{
      q,          wide_query(q, quant), kcache,    vcache,           k,        v,      seqlens_k,          rotary_cos,
      rotary_sin, cache_batch_idx,      leftpad_k, block_table,      out,      scores, rotary_interleaved, num_splits,
      plan,       batch_invariant,      quant,     launch.sm_margin, mask_bits};
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
  define_fwd(m, "fwd", &with_fwd_call<mha_fwd>,
             "Forward of dense batches: [out, softmax_lse, S_dmask, rng_state(, max_logit)]");
  define_fwd(m, "explain_fwd", &with_fwd_call<explain_fwd>, "The plan of fwd, as a dict; nothing is launched");
  define_varlen_fwd(m, "varlen_fwd", &with_varlen_fwd_call<mha_fwd, packed_mla<Tensors>>,
                    "Forward of packed batches: [out, softmax_lse, S_dmask, rng_state(, max_logit)]");
  define_varlen_fwd(m, "explain_varlen_fwd", &with_varlen_fwd_call<explain_fwd, packed_mla<plan::Explanation>>,
                    "The plan of varlen_fwd, as a dict; nothing is launched");
  m.def("jvp_fwd", &mha_jvp_fwd,
        "Forward with its derivative along tangents: [out, softmax_lse, t_out, t_lse, rng_state]; None: this build and "
        "GPU have no kernel for the call",
        py::arg("q"), py::arg("k"), py::arg("v"), py::arg("tq"), py::arg("tk"), py::arg("tv"), py::arg("cu_seqlens_q"),
        py::arg("cu_seqlens_k"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"),
        py::arg("window_size_right"), py::kw_only(), py::arg("sm_margin") = 0, py::call_guard<CallGuard>());
  define_bwd(m, "bwd", &with_bwd_call<mha_bwd>,
             "Backward of dense batches: [dq, dk, dv, softmax_d(, dsinks, dattn_bias, drel_bias)]");
  define_bwd(m, "explain_bwd", &with_bwd_call<explain_bwd>, "The plan of bwd, as a dict; nothing is launched");
  define_varlen_bwd(m, "varlen_bwd", &with_varlen_bwd_call<mha_bwd>,
                    "Backward of packed batches: [dq, dk, dv, softmax_d(, dsinks, dattn_bias, drel_bias)]");
  define_varlen_bwd(m, "explain_varlen_bwd", &with_varlen_bwd_call<explain_bwd>,
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
  m.def("pack_bits", &pack_bits, "Bools (..., n) as bits: int32 (..., ceil(n / 32))", py::arg("bools"),
        py::call_guard<CallGuard>());
  define_attention(m);
  define_inference(m);
  m.def("build_info", &build_info, "Identity of this build as JSON text");
}
