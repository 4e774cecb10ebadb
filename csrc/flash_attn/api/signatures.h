// Names and defaults of the entry points' arguments in Python, those of FlashAttention-2 first.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "api/mask_caster.h"

namespace flash {

template <class Function>
void define_fwd(py::module_& m, const char* name, Function* function, const char* doc) {
  m.def(name, function, doc, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("alibi_slopes"),
        py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"),
        py::arg("window_size_right"), py::arg("softcap"), py::arg("return_softmax"), py::arg("gen"),
        py::arg("return_max_logit") = false, py::arg("batch_invariant") = false);
}

template <class Function>
void define_varlen_fwd(py::module_& m, const char* name, Function* function, const char* doc) {
  m.def(name, function, doc, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("cu_seqlens_q"),
        py::arg("cu_seqlens_k"), py::arg("seqused_k"), py::arg("leftpad_k"), py::arg("block_table"),
        py::arg("alibi_slopes"), py::arg("max_seqlen_q"), py::arg("max_seqlen_k"), py::arg("p_dropout"),
        py::arg("softmax_scale"), py::arg("zero_tensors"), py::arg("is_causal"), py::arg("window_size_left"),
        py::arg("window_size_right"), py::arg("softcap"), py::arg("return_softmax"), py::arg("gen"),
        py::arg("num_splits") = 0, py::arg("return_max_logit") = false, py::arg("batch_invariant") = false);
}

template <class Function>
void define_bwd(py::module_& m, const char* name, Function* function, const char* doc) {
  m.def(name, function, doc, py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
        py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("alibi_slopes"),
        py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("is_causal"), py::arg("window_size_left"),
        py::arg("window_size_right"), py::arg("softcap"), py::arg("deterministic"), py::arg("gen"),
        py::arg("rng_state"), py::arg("dlse") = py::none(), py::arg("batch_invariant") = false);
}

template <class Function>
void define_varlen_bwd(py::module_& m, const char* name, Function* function, const char* doc) {
  m.def(name, function, doc, py::arg("dout"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
        py::arg("softmax_lse"), py::arg("dq"), py::arg("dk"), py::arg("dv"), py::arg("cu_seqlens_q"),
        py::arg("cu_seqlens_k"), py::arg("alibi_slopes"), py::arg("max_seqlen_q"), py::arg("max_seqlen_k"),
        py::arg("p_dropout"), py::arg("softmax_scale"), py::arg("zero_tensors"), py::arg("is_causal"),
        py::arg("window_size_left"), py::arg("window_size_right"), py::arg("softcap"), py::arg("deterministic"),
        py::arg("gen"), py::arg("rng_state"), py::arg("dlse") = py::none(), py::arg("batch_invariant") = false);
}

template <class Function>
void define_kvcache(py::module_& m, const char* name, Function* function, const char* doc) {
  m.def(name, function, doc, py::arg("q"), py::arg("kcache"), py::arg("vcache"), py::arg("k"), py::arg("v"),
        py::arg("seqlens_k"), py::arg("rotary_cos"), py::arg("rotary_sin"), py::arg("cache_batch_idx"),
        py::arg("leftpad_k"), py::arg("block_table"), py::arg("alibi_slopes"), py::arg("out"), py::arg("softmax_scale"),
        py::arg("is_causal"), py::arg("window_size_left"), py::arg("window_size_right"), py::arg("softcap"),
        py::arg("rotary_interleaved"), py::arg("num_splits"), py::arg("plan") = py::none(),
        py::arg("batch_invariant") = false);
}

}  // namespace flash
