// Argument checks of the binding: each rule once. A message names the argument, what was expected and what was given.
// An argument has the name of the public Python functions, also where the binding's own differs (p_dropout there is
// dropout_p here). flash_attn/cpu/checks.py is the twin for CPU tensors; the tests compare the texts.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <initializer_list>
#include <optional>
#include <string>

#include "api/strides.h"
#include "params/dtype.h"
#include "params/flash.h"
#include "plan/kv_tiles.h"
#include "plan/tiles.h"

namespace flash {

using OptionalTensor = std::optional<at::Tensor>;

constexpr const char* kSupportedDtypes = "float16 or bfloat16";
constexpr const char* kCombinedDtypes = "float16, bfloat16 or float32";
constexpr const char* kDenseAxes = "batch, seqlen, heads, head_dim";
constexpr const char* kPackedAxes = "total, heads, head_dim";

inline bool is_supported(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

inline Dtype dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf: return Dtype::kFp16;
    case at::kFloat8_e4m3fn: return Dtype::kE4m3;
    case at::kChar: return Dtype::kInt8;
    default: return Dtype::kBf16;
  }
}

namespace checks {

// As Python prints it, without "torch.".
inline std::string dtype_name(at::ScalarType type) {
  switch (type) {
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kByte: return "uint8";
    case at::kChar: return "int8";
    case at::kShort: return "int16";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    case at::kBool: return "bool";
    case at::kComplexHalf: return "complex32";
    case at::kComplexFloat: return "complex64";
    case at::kComplexDouble: return "complex128";
    case at::kFloat8_e4m3fn: return "float8_e4m3fn";
    case at::kFloat8_e5m2: return "float8_e5m2";
    default: break;
  }
  std::string name = c10::toString(type);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name;
}

// Message parts as text, without streams: their number formatting breaks where a toolchain links libstdc++ statically
// into a module of a process that has it as a shared library.
inline std::string text(const char* part) { return part; }
inline std::string text(const std::string& part) { return part; }
inline std::string text(const c10::Device& part) { return part.str(); }
inline std::string text(int64_t part) { return std::to_string(part); }
inline std::string text(double part) {
  char buffer[32];
  std::snprintf(buffer, sizeof buffer, "%g", part);
  return buffer;
}
inline std::string text(at::IntArrayRef part) {
  std::string result = "[";
  for (size_t i = 0; i < part.size(); ++i) result += (i ? ", " : "") + std::to_string(part[i]);
  return result + "]";
}

template <class... Parts>
[[noreturn]] void fail(const char* name, const Parts&... parts) {
  throw c10::Error({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, name + (": " + ... + text(parts)));
}

// Elements in memory at strides, which is all that kernels can read.
inline void strided(const char* name, const at::Tensor& tensor) {
  auto reject = [name](const char* kind) { fail(name, "expected a strided tensor, got ", kind); };
  if (!tensor.defined()) reject("an undefined one");
  if (tensor.is_nested()) reject("a nested one");
  if (tensor.layout() == at::kStrided) {
    if (!tensor.has_storage()) reject("one without storage");
    return;
  }
  const bool is_sparse = tensor.layout() == at::kSparse || tensor.is_sparse_csr() ||
                         tensor.layout() == at::kSparseCsc || tensor.layout() == at::kSparseBsr ||
                         tensor.layout() == at::kSparseBsc;
  reject(is_sparse ? "a sparse one" : "one of another layout");
}

inline void device(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  if (tensor.defined() && tensor.device() != q.device()) {
    fail(name, "expected a tensor on q's device (", q.device(), "), got one on ", tensor.device());
  }
  strided(name, tensor);
}

inline void rank(const char* name, const at::Tensor& tensor, int64_t expected, const char* axes) {
  if (tensor.dim() != expected) fail(name, "expected ", expected, " dimensions (", axes, "), got ", tensor.dim());
}

inline void shape(const char* name, const at::Tensor& tensor, at::IntArrayRef expected) {
  if (tensor.sizes() != expected) {
    fail(name, "expected shape ", expected, ", got ", tensor.sizes());
  }
}

inline void last_stride(const char* name, const at::Tensor& tensor) {
  if (tensor.size(-1) > 1 && tensor.stride(-1) != 1 && tensor.numel() > 0) {
    fail(name, "expected a contiguous last dimension (stride 1), got stride ", tensor.stride(-1));
  }
}

inline void dtype_of_q(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  if (tensor.scalar_type() != q.scalar_type()) {
    fail(name, "expected the dtype of q (", dtype_name(q.scalar_type()), "), got ", dtype_name(tensor.scalar_type()));
  }
}

inline void dtype(const char* name, const at::Tensor& tensor, at::ScalarType expected) {
  if (tensor.scalar_type() != expected) {
    fail(name, "expected dtype ", dtype_name(expected), ", got ", dtype_name(tensor.scalar_type()));
  }
}

inline bool is_8bit(const at::Tensor& tensor) { return tensor.defined() && is_eight_bit(dtype_of(tensor)); }

inline void same_dtype(const char* name, const at::Tensor& tensor, const char* like_name, const at::Tensor& like) {
  if (tensor.scalar_type() != like.scalar_type()) {
    fail(name, "expected the dtype of ", like_name, " (", dtype_name(like.scalar_type()), "), got ",
         dtype_name(tensor.scalar_type()));
  }
}

// Sizes that a kernel keeps as an int; expanded tensors may exceed them without the memory.
inline void at_most(const char* name, int64_t value, const char* what) {
  if (value > kMaxLength) fail(name, "expected at most ", int64_t{kMaxLength}, " ", what, ", got ", value);
}

// Batch or pages (with four dimensions), rows and heads.
inline void sizes(const char* name, const at::Tensor& tensor, const char* first) {
  if (tensor.dim() == 4) at_most(name, tensor.size(0), first);
  at_most(name, tensor.size(-3), "rows");
  at_most(name, tensor.size(-2), "heads");
}

// Q of 8 bits: multiplied as it is, or converted by run_rescale_rows().
inline bool is_8bit_query_type(at::ScalarType type) { return type == at::kFloat8_e4m3fn; }

// takes_8bit: Q may have 8 bits.
inline void query(const at::Tensor& q, int64_t dims, const char* axes, bool takes_8bit = false) {
  if (q.defined() && !q.is_cuda()) fail("q", "expected a CUDA tensor, got one on ", q.device());
  strided("q", q);
  if (!is_supported(q.scalar_type()) && !(takes_8bit && is_8bit_query_type(q.scalar_type()))) {
    fail("q", "expected dtype ", kSupportedDtypes, ", got ", dtype_name(q.scalar_type()));
  }
  rank("q", q, dims, axes);
  last_stride("q", q);
  const int64_t head_dim = q.size(-1);
  if (head_dim > plan::kMaxHeadDim) {
    fail("q", "expected a head dim of at most ", int64_t{plan::kMaxHeadDim}, ", got ", head_dim);
  }
  if (head_dim == 0) fail("q", "expected a head dim of at least 1, got 0");
  sizes("q", q, "sequences");
}

// What the forward and backward kernels require beyond query().
inline void whole_vectors(const at::Tensor& q) {
  if (q.size(-1) % 8 != 0) fail("q", "expected a head dim that is a multiple of 8, got ", q.size(-1));
}

inline void head_counts(const char* name, int64_t heads, int64_t heads_k) {
  if (heads_k == 0 ? heads != 0 : heads % heads_k != 0) {
    fail(name, "expected a head count divisible by the K/V head count ", heads_k, ", got ", heads);
  }
}

inline void head_counts(const at::Tensor& q, const at::Tensor& k) { head_counts("q", q.size(-2), k.size(-2)); }

// v follows k in all axes but the last.
inline void value(const at::Tensor& v, const at::Tensor& k) {
  at::DimVector expected(k.sizes().begin(), k.sizes().end());
  if (v.dim() == k.dim() && !expected.empty()) expected.back() = v.size(-1);
  shape("v", v, expected);
  const int64_t head_dim = v.size(-1);
  if (head_dim < 1 || head_dim > plan::kMaxHeadDim) {
    fail("v", "expected a head dim from 1 to ", int64_t{plan::kMaxHeadDim}, ", got ", head_dim);
  }
}

// Of k or v of 8 bits.
inline void eight_bit_head_dim(const char* name, int64_t head_dim) {
  if (head_dim > plan::kMaxKv8HeadDim) {
    fail(name, "expected a head dim of at most ", int64_t{plan::kMaxKv8HeadDim}, " with 8 bits, got ", head_dim);
  }
}

// `expected`: the shape of k, with -1 on axes that k itself decides. takes_8bit: k and v may have 8 bits and one head
// dim.
inline void key_value(const at::Tensor& k, const at::Tensor& v, const at::Tensor& q, at::IntArrayRef expected_,
                      const char* axes, bool takes_8bit = false) {
  at::DimVector expected(expected_.begin(), expected_.end());
  const bool are_8bit = takes_8bit && is_8bit(k);
  device("k", k, q);
  device("v", v, q);
  if (!are_8bit || is_8bit(q)) dtype_of_q("k", k, q);
  rank("k", k, static_cast<int64_t>(expected.size()), axes);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] < 0) expected[i] = k.size(static_cast<int64_t>(i));
  }
  shape("k", k, expected);
  last_stride("k", k);
  sizes("k", k, "pages");
  if (are_8bit) {
    eight_bit_head_dim("k", k.size(-1));
    same_dtype("v", v, "k", k);
    shape("v", v, k.sizes());
  } else {
    dtype_of_q("v", v, q);
  }
  if (v.sizes() != k.sizes()) value(v, k);
  last_stride("v", v);
  head_counts(q, k);
}

inline at::DimVector output_shape(const at::Tensor& q, const at::Tensor& v) {
  at::DimVector result(q.sizes().begin(), q.sizes().end());
  result.back() = v.size(-1);
  return result;
}

// type: of the result of 8-bit queries.
inline void output(const std::optional<at::Tensor>& out, const at::Tensor& q, at::IntArrayRef expected,
                   at::ScalarType type = at::kBFloat16) {
  if (!out.has_value()) return;
  device("out", *out, q);
  is_8bit(q) ? dtype("out", *out, type) : dtype_of_q("out", *out, q);
  shape("out", *out, expected);
  last_stride("out", *out);
}

// The kernels compute in fp32: scale log2(e) has to be finite there, with a softcap scale / softcap as well, times a
// dot product of a head.
constexpr double kMaxScale = 2e38, kMaxSoftcap = 1e15, kMinSoftcap = 1e-15;

inline void numbers(double dropout_p, double softmax_scale, double softcap) {
  if (!(dropout_p >= 0.0 && dropout_p < 1.0)) fail("dropout_p", "expected a value in [0, 1), got ", dropout_p);
  if (!std::isfinite(softmax_scale)) fail("softmax_scale", "expected a finite value, got ", softmax_scale);
  if (!(softcap >= 0.0)) fail("softcap", "expected a value >= 0, got ", softcap);
  if (softcap != 0.0 && !(kMinSoftcap <= softcap && softcap <= kMaxSoftcap)) {
    fail("softcap", "expected 0 or a value from ", kMinSoftcap, " to ", kMaxSoftcap, ", got ", softcap);
  }
  const double most = softcap > 0.0 ? kMaxSoftcap : kMaxScale;
  if (std::fabs(softmax_scale) > most) {
    fail("softmax_scale", "expected a magnitude of at most ", most, softcap > 0.0 ? " with a softcap" : "", ", got ",
         softmax_scale);
  }
}

inline void alibi(const std::optional<at::Tensor>& slopes, const at::Tensor& q, int64_t batch) {
  if (!slopes.has_value()) return;
  const char* name = "alibi_slopes";
  const int64_t heads = q.size(-2);
  device(name, *slopes, q);
  dtype(name, *slopes, at::kFloat);
  if (slopes->sizes() != at::IntArrayRef({heads}) && slopes->sizes() != at::IntArrayRef({batch, heads})) {
    fail(name, "expected shape [", heads, "] or [", batch, ", ", heads, "], got ", slopes->sizes());
  }
  last_stride(name, *slopes);
}

inline void sinks(const std::optional<at::Tensor>& tensor, const at::Tensor& q) {
  if (!tensor.has_value()) return;
  device("sinks", *tensor, q);
  dtype("sinks", *tensor, at::kFloat);
  shape("sinks", *tensor, {q.size(-2)});
  last_stride("sinks", *tensor);
}

// Where the scores of each sequence begin: document, head, row, column.
inline void origins(const std::optional<at::Tensor>& tensor, const at::Tensor& q, int64_t batch) {
  if (!tensor.has_value()) return;
  device("origins", *tensor, q);
  dtype("origins", *tensor, at::kLong);
  shape("origins", *tensor, {batch, 4});
  if (!tensor->is_contiguous()) fail("origins", "expected a contiguous tensor, got strides ", tensor->strides());
}

// An int32 vector of lengths or offsets.
inline void lengths(const char* name, const std::optional<at::Tensor>& tensor, const at::Tensor& q, int64_t size) {
  if (!tensor.has_value()) return;
  device(name, *tensor, q);
  dtype(name, *tensor, at::kInt);
  shape(name, *tensor, {size});
  if (!tensor->is_contiguous()) {
    fail(name, "expected a contiguous tensor, got strides ", tensor->strides());
  }
}

// Returns the number of sequences.
inline int64_t cu_seqlens(const at::Tensor& cu_q, const at::Tensor& cu_k, const at::Tensor& q) {
  device("cu_seqlens_q", cu_q, q);
  if (cu_q.dim() != 1 || cu_q.numel() < 1) {
    fail("cu_seqlens_q", "expected shape [b + 1], got ", cu_q.sizes());
  }
  at_most("cu_seqlens_q", cu_q.numel() - 1, "sequences");
  lengths("cu_seqlens_q", cu_q, q, cu_q.numel());
  lengths("cu_seqlens_k", cu_k, q, cu_q.numel());
  return cu_q.numel() - 1;
}

inline void block_table(const std::optional<at::Tensor>& table, const at::Tensor& q, int64_t batch) {
  if (!table.has_value()) return;
  const char* name = "block_table";
  device(name, *table, q);
  dtype(name, *table, at::kInt);
  if (table->dim() != 2 || table->size(0) != batch) {
    fail(name, "expected shape [", batch, ", max_blocks], got ", table->sizes());
  }
  last_stride(name, *table);
  at_most(name, table->size(1), "columns");
}

inline void max_seqlen(const char* name, int64_t value) {
  if (value < 0) fail(name, "expected a value >= 0, got ", value);
}

// A tensor of the backward with q's dtype and the shape of a forward tensor; any strides.
inline void like(const char* name, const at::Tensor& tensor, at::IntArrayRef expected, const at::Tensor& q) {
  device(name, tensor, q);
  dtype_of_q(name, tensor, q);
  shape(name, tensor, expected);
}

// A gradient of `forward` that a call adds to.
inline void accumulated(const char* name, const std::optional<at::Tensor>& tensor, const at::Tensor& forward) {
  if (!tensor.has_value()) fail(name, "expected a tensor with accumulate_dkv, got None");
  device(name, *tensor, forward);
  dtype(name, *tensor, at::kFloat);
  shape(name, *tensor, forward.sizes());
}

// The LSE or its gradient.
inline void lse(const char* name, const at::Tensor& tensor, const at::Tensor& q, at::IntArrayRef expected) {
  device(name, tensor, q);
  dtype(name, tensor, at::kFloat);
  shape(name, tensor, expected);
}

inline void rng_state(const std::optional<at::Tensor>& state, double dropout_p, const at::Tensor& q) {
  if (dropout_p == 0.0) return;
  const char* expected = "expected the int64 (2,) state that the forward returned when dropout_p > 0, got ";
  if (!state.has_value()) fail("rng_state", expected, "None");
  device("rng_state", *state, q);
  if (state->scalar_type() != at::kLong || state->sizes() != at::IntArrayRef({2}) || !state->is_contiguous()) {
    fail("rng_state", expected, dtype_name(state->scalar_type()), " ", state->sizes());
  }
}

inline void generator(const std::optional<at::Generator>& gen) {
  if (gen.has_value() && gen->defined() && !gen->device().is_cuda()) {
    fail("gen", "expected a CUDA generator, got one on ", gen->device());
  }
}

}  // namespace checks

// ---- overlaps ----

// An output must not overlap itself, another output or an input. flash_attn/cpu/overlap.py is the twin for CPU tensors.
namespace overlap {

// Of a strided tensor of at most kMaxAxes dimensions.
inline Layout layout_of(const at::Tensor& tensor) {
  Layout layout;
  layout.begin = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  layout.element_bytes = tensor.element_size();
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    layout.add_axis(tensor.size(axis), tensor.stride(axis) * layout.element_bytes);
  }
  return layout;
}

// The same elements in the same order.
inline bool same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// A named argument; null: not given.
struct Operand {
  const char* name;
  const at::Tensor* tensor;

  Operand(const char* name_, const at::Tensor& tensor_) : name(name_), tensor(&tensor_) {}
  Operand(const char* name_, const std::optional<at::Tensor>& given)
      : name(name_), tensor(given.has_value() ? &*given : nullptr) {}
};

using Operands = std::initializer_list<Operand>;

// All of them have passed the checks of their shapes. Costs nothing where no output is given.
inline void check(Operands written, Operands read) {
  const auto is_given = [](const Operand& operand) { return operand.tensor != nullptr; };
  if (std::none_of(written.begin(), written.end(), is_given)) return;
  struct NamedLayout {
    const char* name;
    Layout layout;
  };
  c10::SmallVector<NamedLayout, 16> before;  // inputs, then outputs
  for (const Operand& operand : read) {
    if (is_given(operand)) before.push_back({operand.name, layout_of(*operand.tensor)});
  }
  for (const Operand& target : written) {
    if (!is_given(target)) continue;
    const NamedLayout target_layout{target.name, layout_of(*target.tensor)};
    if (!target.tensor->is_contiguous() && overlaps_itself(target_layout.layout)) {
      checks::fail(target.name, "expected elements that do not overlap each other, got shape ", target.tensor->sizes(),
                   " with strides ", target.tensor->strides());
    }
    for (const NamedLayout& other : before) {
      if (!share_elements(target_layout.layout, other.layout)) continue;
      checks::fail(target.name, "expected memory that does not overlap ", other.name, ", got elements of both");
    }
    before.push_back(target_layout);
  }
}

}  // namespace overlap

}  // namespace flash
