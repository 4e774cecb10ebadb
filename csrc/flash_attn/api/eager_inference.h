// Attention of plain CUDA tensors in eager mode without autograd, each form as one C function: over a cache, and of
// packed queries over packed keys or pages. They have the results of attend_over_cache() and of forward_in_use(), whose
// Python takes longer than the launches. Every other call is Python's.
#pragma once

#include <initializer_list>
#include <optional>

#include "api/decode.h"
#include "api/eager.h"
#include "api/forward.h"
#include "api/mla.h"

namespace flash {

inline OptionalTensor if_defined(const at::Tensor& x) { return x.defined() ? OptionalTensor(x) : std::nullopt; }

struct InferenceOptions {
  double softmax_scale = 0.0, softcap = 0.0;
  int64_t window_left = -1, window_right = -1, num_splits = 0, sm_margin = 0;
  bool is_causal = false, batch_invariant = false;

  ScoreOptions scores(const at::Tensor& sinks = {}) const {
    static const OptionalTensor no_slopes;
    return {softmax_scale, is_causal, window_left, window_right, softcap, no_slopes, if_defined(sinks), {}};
  }
};

// ---- which calls take it ----

// Without rows to copy, nor an index to convert.
inline bool is_index(const at::Tensor& x) {
  return is_plain(x) && x.scalar_type() == at::kInt && (x.dim() < 2 ? x.is_contiguous() : x.stride(-1) == 1);
}

// Whether a kernel may write to it: autograd refuses writes to inference tensors in other modes.
inline bool is_writable(const at::Tensor& x) { return !x.is_inference() || c10::InferenceMode::is_enabled(); }

inline bool is_result(const at::Tensor& x) { return is_plain(x) && is_writable(x); }

template <class Condition>
bool if_given(const at::Tensor& x, Condition condition) {
  return !x.defined() || condition(x);
}

// A call with qv, undefined in others, has a kernel; Python raises the error of one that has none.
inline bool has_latent_kernel(const at::Tensor& qv, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const InferenceOptions& options) {
  if (!qv.defined()) return true;
  return q.size(-1) == kMlaRopeDim && v.size(-1) == kMlaLatentDim && k.size(2) == 1 && options.window_left < 0 &&
         (options.window_right <= 0 || options.is_causal) && options.softcap <= 0.0 && options.softmax_scale > 0.0;
}

// What a score is a product of.
inline int64_t score_dim(const at::Tensor& q, const at::Tensor& qv) {
  return q.size(-1) + (qv.defined() ? qv.size(-1) : 0);
}

inline void tell_written(const at::Tensor& x) {
  if (x.defined() && !x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

// ---- over a cache ----

// Undefined: not given.
struct CachedTensors {
  at::Tensor q, k_cache, v_cache, k, v, seqlens, block_table, out, qv;

  bool serves() const {
    const bool appends = k.defined();
    const auto is_table = [](const at::Tensor& x) { return is_index(x) && x.dim() == 2; };
    return is_operand(q, q) && is_operand(k_cache, q) && is_operand(v_cache, q) && appends == v.defined() &&
           (!appends || (is_operand(k, q) && is_operand(v, q) && is_writable(k_cache) && is_writable(v_cache))) &&
           if_given(out, is_result) && if_given(seqlens, is_index) && if_given(block_table, is_table) &&
           (!qv.defined() || (is_operand(qv, q) && block_table.defined() && !appends)) &&
           !records_gradients({&q, &k_cache, &v_cache, &k, &v, &out, &qv});
  }
};

inline Tensors attend_over_cache(const CachedTensors& tensors, const InferenceOptions& options) {
  const OptionalTensor none, k = if_defined(tensors.k), v = if_defined(tensors.v);
  const OptionalTensor seqlens = if_defined(tensors.seqlens), block_table = if_defined(tensors.block_table);
  const OptionalTensor out = if_defined(tensors.out);
  const ScoreOptions scores = options.scores();
  const CacheQuantArgs quant;
  const MaskBitsArgs mask_bits;
  const KvCacheCall call{tensors.q,
                         tensors.q,
                         tensors.k_cache,
                         tensors.v_cache,
                         k,
                         v,
                         seqlens,
                         none,
                         none,
                         none,
                         none,
                         block_table,
                         out,
                         scores,
                         true,
                         options.num_splits,
                         none,
                         options.batch_invariant,
                         quant,
                         0,
                         mask_bits};
  Tensors results;
  {
    const CallGuard guard;
    results = tensors.qv.defined() ? mha_fwd_mla(call, tensors.qv) : mha_fwd_kvcache(call);
  }
  tell_written(tensors.out);
  if (k.has_value()) {
    tell_written(tensors.k_cache);
    tell_written(tensors.v_cache);
  }
  return results;
}

// ---- packed ----

// Undefined: not given. Of pages with seqused_k nothing reads cu_seqlens_k.
struct PackedTensors {
  at::Tensor q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks, qv, out;

  bool serves() const {
    const bool is_paged = block_table.defined();
    const int64_t rank = is_paged ? 4 : 3;
    const auto is_sinks = [](const at::Tensor& x) {
      return is_plain(x) && (x.scalar_type() == at::kFloat || is_supported(x.scalar_type()));
    };
    return is_operand(q, q, 3) && is_operand(k, q, rank) && is_operand(v, q, rank) && is_index(cu_seqlens_q) &&
           (cu_seqlens_k.defined() || (is_paged && seqused_k.defined())) && if_given(cu_seqlens_k, is_index) &&
           if_given(seqused_k, is_index) && if_given(block_table, is_index) &&
           (!qv.defined() || (is_operand(qv, q, 3) && is_paged)) && if_given(sinks, is_sinks) &&
           if_given(out, is_result) && !records_gradients({&q, &k, &v, &sinks, &qv, &out});
  }
};

inline Tensors attend_packed(const PackedTensors& tensors, const InferenceOptions& options) {
  const OptionalTensor seqused_k = if_defined(tensors.seqused_k), block_table = if_defined(tensors.block_table);
  const OptionalTensor none, out = if_defined(tensors.out);
  const at::Tensor& cu_seqlens_k = tensors.cu_seqlens_k.defined() ? tensors.cu_seqlens_k : tensors.cu_seqlens_q;
  const at::Tensor sinks = tensors.sinks.defined() ? tensors.sinks.to(at::kFloat).contiguous() : at::Tensor();
  const OptionalGenerator default_generator;
  FwdCall call{tensors.q, tensors.k, tensors.v,         out,   options.scores(sinks),
               0.0,       false,     default_generator, false, options.batch_invariant};
  call.launch.sm_margin = options.sm_margin;
  call.returns_dropout = false;
  const PackedArgs packed{tensors.cu_seqlens_q, cu_seqlens_k, seqused_k, none, block_table, 0, 0};
  Tensors results;
  {
    const CallGuard guard;
    if (tensors.qv.defined()) {
      results = packed_mla<Tensors>(call, packed, tensors.qv);
    } else {
      set_packed(call, packed);
      results = mha_fwd(call);
    }
  }
  tell_written(tensors.out);
  return results;
}

// ---- the Python functions ----

namespace python {

inline bool read_count(PyObject* given, int64_t& value) {
  if (!PyLong_CheckExact(given)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(given, &overflow);
  return overflow == 0 && value >= 0;
}

inline bool read_optional(PyObject* given, at::Tensor& value) {
  if (given == Py_None) return true;
  if (!THPVariable_CheckExact(given)) return false;
  value = THPVariable_Unpack(given);
  return value.defined();
}

// Each from the argument at its place.
inline bool read_tensors(PyObject* const* args, std::initializer_list<at::Tensor*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](at::Tensor* x) { return read_optional(*args++, *x); });
}

// softmax_scale, causal, window_size, softcap and batch_invariant.
inline bool read_options(PyObject* const* args, int64_t score_dim, InferenceOptions& options) {
  return read_scale(args[0], score_dim, options.softmax_scale) && read(args[1], options.is_causal) &&
         read_window(args[2], options) && read(args[3], options.softcap) && read(args[4], options.batch_invariant);
}

// (out, softmax_lse)
inline PyObject* out_and_lse(Tensors results) {
  THPObjectPtr pair(PyTuple_New(2));
  if (!pair) return nullptr;
  for (int i = 0; i < 2; ++i) PyTuple_SET_ITEM(pair.get(), i, THPVariable_Wrap(results[i]));
  return pair.release();
}

// q, k_cache, v_cache, k, v, cache_seqlens, block_table, out and qv of flash_attn_with_kvcache, its options as
// read_options() takes them, then num_splits.
inline PyObject* attention_over_cache(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!has_count(count, 15, "attention_over_cache")) return nullptr;
  CachedTensors x;
  InferenceOptions options;
  const bool serves =
      is_unwatched() &&
      read_tensors(args, {&x.q, &x.k_cache, &x.v_cache, &x.k, &x.v, &x.seqlens, &x.block_table, &x.out, &x.qv}) &&
      x.serves() && read_options(args + 9, score_dim(x.q, x.qv), options) && read_count(args[14], options.num_splits) &&
      has_latent_kernel(x.qv, x.q, x.k_cache, x.v_cache, options);
  if (!serves) Py_RETURN_NOTIMPLEMENTED;
  return out_and_lse(attend_over_cache(x, options));
  END_HANDLE_TH_ERRORS
}

// q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks, qv and out, the options as read_options() takes
// them, then sm_margin.
inline PyObject* packed_attention(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (!has_count(count, 16, "packed_attention")) return nullptr;
  PackedTensors x;
  InferenceOptions options;
  const bool serves = is_unwatched() &&
                      read_tensors(args, {&x.q, &x.k, &x.v, &x.cu_seqlens_q, &x.cu_seqlens_k, &x.seqused_k,
                                          &x.block_table, &x.sinks, &x.qv, &x.out}) &&
                      x.serves() && read_options(args + 10, score_dim(x.q, x.qv), options) &&
                      read_count(args[15], options.sm_margin) && has_latent_kernel(x.qv, x.q, x.k, x.v, options);
  if (!serves) Py_RETURN_NOTIMPLEMENTED;
  return out_and_lse(attend_packed(x, options));
  END_HANDLE_TH_ERRORS
}

}  // namespace python

inline void define_inference(py::module_& m) {
  static PyMethodDef functions[] = {
      {"attention_over_cache", python::fast(&python::attention_over_cache), METH_FASTCALL,
       "Attention of plain CUDA tensors over a KV cache; NotImplemented for every other call"},
      {"packed_attention", python::fast(&python::packed_attention), METH_FASTCALL,
       "Attention of packed plain CUDA tensors over packed keys or pages; NotImplemented for every other call"},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
}

}  // namespace flash
