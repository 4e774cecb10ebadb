// 8-bit q, k and v: their scales as a call gives them, the checks of these, and the scales as kernels read them.
// flash_attn/eight_bit.py is the twin for CPU tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/checks.h"
#include "params/fp8.h"
#include "params/kvcache.h"

namespace flash {

// Scales of 8-bit q, k and v, and the options of calls that have some. FlashAttention-2 has none: the module's
// functions take them by name.
struct QuantArgs {
  OptionalTensor q, k, v;                   // value = 8-bit value * scale
  bool v_per_channel = false;               // v has a scale for each column of V
  std::optional<at::ScalarType> out_dtype;  // of O with e4m3 q; bf16 if not given
  bool fast_exp = false;                    // P as e4m3 straight from the scores, by the kernels that can

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("q_descale", q, "a Tensor");
    visit("k_descale", k, "a Tensor");
    visit("v_descale", v, "a Tensor");
    visit("v_per_channel", v_per_channel, "a bool");
    visit("out_dtype", out_dtype, "a torch.dtype");
    visit("fast_exp", fast_exp, "a bool");
  }

  bool given() const {
    return q.has_value() || k.has_value() || v.has_value() || v_per_channel || out_dtype.has_value();
  }
  at::ScalarType result_type(const at::Tensor& q_given) const {
    return checks::is_8bit(q_given) ? out_dtype.value_or(at::kBFloat16) : q_given.scalar_type();
  }
};

// The same of a cache.
struct CacheQuantArgs : QuantArgs {
  OptionalTensor k_token, v_token;  // replace k and v: a scale for each row, written with new rows

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    QuantArgs::visit_named(visit);
    visit("k_token_descale", k_token, "a Tensor");
    visit("v_token_descale", v_token, "a Tensor");
  }
};

// ---- checks ----

namespace checks {

// fp32 on q's device, of an 8-bit tensor.
inline void scale_of(const char* name, const at::Tensor& descale, const at::Tensor& of, const at::Tensor& q) {
  if (!is_8bit(of)) {
    fail(name, "expected None for ", std::string(1, name[0]), " of ", dtype_name(of.scalar_type()), ", got a tensor");
  }
  device(name, descale, q);
  dtype(name, descale, at::kFloat);
}

inline void scale_shape(const char* name, const at::Tensor& descale, bool one_element,
                        const std::vector<std::vector<int64_t>>& shapes) {
  if (one_element && descale.numel() == 1) return;
  std::string expected = one_element ? "one element or shape " : "shape ";
  for (const std::vector<int64_t>& allowed : shapes) {
    if (descale.sizes() == at::IntArrayRef(allowed)) return;
    const std::string shown = text(at::IntArrayRef(allowed));
    if (expected.find(shown) == std::string::npos) expected += (&allowed == &shapes[0] ? "" : " or ") + shown;
  }
  fail(name, "expected ", expected, ", got ", descale.sizes());
}

// kv: K or V of any call. Packed rows have the scales of pages of one row.
inline void kv_scale(const char* name, const OptionalTensor& descale, const at::Tensor& kv, const at::Tensor& q,
                     int64_t batch, bool per_channel) {
  if (!descale.has_value()) {
    if (per_channel) fail(name, "expected a tensor with v_descale_axis, got None");
    return;
  }
  scale_of(name, *descale, kv, q);
  const int64_t heads_k = kv.size(-2), head_dim = kv.size(-1);
  if (per_channel) return scale_shape(name, *descale, false, {{heads_k, head_dim}, {batch, heads_k, head_dim}});
  const int64_t sequences = kv.size(0), rows = kv.dim() == 4 ? kv.size(1) : 1;
  scale_shape(name, *descale, true, {{heads_k}, {batch, heads_k}, {sequences, rows, heads_k}, {sequences, 1, heads_k}});
}

inline void quant_args(const QuantArgs& quant, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       int64_t batch, double p_dropout = 0.0) {
  const int64_t heads = q.size(-2), heads_k = k.size(-2);
  if (is_8bit(k) && p_dropout > 0.0) fail("dropout_p", "expected 0 with 8-bit tensors, got ", p_dropout);
  if (quant.q.has_value()) {
    scale_of("q_descale", *quant.q, q, q);
    scale_shape("q_descale", *quant.q, true, {{heads_k}, {batch, heads_k}, {heads}, {batch, heads}});
  }
  kv_scale("k_descale", quant.k, k, q, batch, false);
  kv_scale("v_descale", quant.v, v, q, batch, quant.v_per_channel);
  if (!quant.out_dtype.has_value()) return;
  if (is_8bit(q) && !is_supported(*quant.out_dtype)) {
    fail("out_dtype", "expected float16 or bfloat16, got ", dtype_name(*quant.out_dtype));
  }
  if (!is_8bit(q) && *quant.out_dtype != q.scalar_type()) {
    fail("out_dtype", "expected None or the dtype of q (", dtype_name(q.scalar_type()), "), got ",
         dtype_name(*quant.out_dtype));
  }
}

}  // namespace checks

// ---- scales as kernels read them ----

// No scale per row, page or channel.
inline bool has_head_scales(const QuantArgs& quant) {
  const auto is_by_row = [](const OptionalTensor& x) { return x.has_value() && x->dim() == 3 && x->numel() > 1; };
  return !is_by_row(quant.k) && !is_by_row(quant.v) && !quant.v_per_channel;
}

// Of a shape that checks::kv_scale() has passed. packed: K or V are packed rows.
inline KvDescale kv_descale(const at::Tensor& descale, bool per_channel, bool packed = false) {
  KvDescale result;
  result.ptr = descale.const_data_ptr<float>();
  if (descale.numel() == 1) return result;
  const int64_t dims = descale.dim();
  result.by_row = dims == 3 && !per_channel;
  if (per_channel) result.col = descale.stride(-1);
  if (result.by_row && descale.size(1) > 1) result.row = descale.stride(1);
  result.head = descale.stride(per_channel ? -2 : -1);
  if (dims > (per_channel ? 2 : 1)) result.batch = descale.stride(0);
  if (packed && result.by_row) std::swap(result.batch, result.row);  // (total, 1, h_k): rows of one sequence
  return result;
}

// A scale for each row, of any sizes.
inline KvDescale kv_token_descale(const at::Tensor& descale) {
  KvDescale result;
  result.ptr = descale.const_data_ptr<float>();
  result.by_row = true;
  result.batch = descale.stride(0);
  result.row = descale.stride(1);
  result.head = descale.stride(2);
  return result;
}

// Of the e4m3 products: of one element, (heads,) or (b, heads), of query or K/V heads.
inline Descale fp8_descale(const OptionalTensor& descale, int heads) {
  Descale result;
  if (!descale.has_value()) return result;
  result.ptr = descale->const_data_ptr<float>();
  const bool is_scalar = descale->numel() == 1;
  if (!is_scalar) result.head_stride = descale->stride(-1);
  if (!is_scalar && descale->dim() == 2) result.batch_stride = descale->stride(0);
  result.group = FastDiv(is_scalar ? heads : heads / static_cast<int>(descale->size(-1)));
  return result;
}

// The scales of one call, as the kernels read them that take Q in 16 bits.
struct KernelScales {
  KvDescale q, k, v;
  bool q_of_kv_heads = true;
  at::Tensor joined;  // k's memory if it is a product
};

// Whether one scale of K can replace those of q and k: both of the tensor or of K/V heads.
inline bool can_join(const QuantArgs& quant, int64_t heads_k) {
  for (const OptionalTensor& x : {quant.q, quant.k}) {
    if (x.has_value() && x->numel() != 1 && (x->dim() == 3 || x->size(-1) != heads_k)) return false;
  }
  return true;
}

// joins: K takes q's scale too, and e4m3 q stays as it is, which is exact. packed: K and V are packed rows.
inline KernelScales kernel_scales(const QuantArgs& quant, int64_t heads_k, bool joins, bool packed) {
  KernelScales scales;
  OptionalTensor q = quant.q, k = quant.k;
  if (joins && q.has_value() && can_join(quant, heads_k)) {
    const auto scalar = [](const at::Tensor& x) { return x.numel() == 1 ? x.reshape({}) : x; };
    scales.joined = k.has_value() ? at::mul(scalar(*q), scalar(*k)) : *q;
    k = scales.joined;
    q.reset();
  }
  if (q.has_value()) {
    scales.q = kv_descale(*q, false);
    scales.q_of_kv_heads = q->numel() > 1 && q->size(-1) == heads_k;
  }
  if (k.has_value()) scales.k = kv_descale(*k, false, packed);
  if (quant.v.has_value()) scales.v = kv_descale(*quant.v, quant.v_per_channel, packed);
  return scales;
}

// Strides of dequantised K and V, `rows` rows per sequence.
inline MatrixStrides dequantized_strides(int64_t heads_k, int64_t head_dim, int64_t rows) {
  return {rows * heads_k * head_dim, heads_k * head_dim, head_dim};
}

// Strides of Q that kernels write: contiguous.
inline MatrixStrides converted_query_strides(const Flash_fwd_params& params) {
  const int64_t row = static_cast<int64_t>(params.h) * params.d;
  return {params.is_varlen() ? 0 : params.seqlen_q * row, row, params.d};
}

}  // namespace flash
