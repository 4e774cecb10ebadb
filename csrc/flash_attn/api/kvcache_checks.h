// Argument checks of attention against a KV cache. flash_attn/cpu/kvcache.py is the twin for CPU tensors. Lengths and
// table entries are on the device: a request whose own are wrong is marked there, not refused here.
#pragma once

#include <limits>

#include "api/checks.h"
#include "core/kv_schedule.h"

namespace flash {
namespace checks {

using OptionalTensor = std::optional<at::Tensor>;

// A tensor of q's device and dtype, of any shape in the axes that `expected` leaves open (-1).
inline void like_query(const char* name, const at::Tensor& tensor, const at::Tensor& q, std::vector<int64_t> expected,
                       const char* axes) {
  device(name, tensor, q);
  dtype_of_q(name, tensor, q);
  rank(name, tensor, static_cast<int64_t>(expected.size()), axes);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] < 0) expected[i] = tensor.size(static_cast<int64_t>(i));
  }
  shape(name, tensor, expected);
  last_stride(name, tensor);
}

inline void caches(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool paged) {
  const char* axes = paged ? "blocks, page_size, heads, head_dim" : "batch, seqlen, heads, head_dim";
  like_query("k_cache", k, q, {-1, -1, -1, q.size(3)}, axes);
  like_query("v_cache", v, q, k.sizes().vec(), axes);
  sizes("k_cache", k, paged ? "pages" : "sequences");
  head_counts(q, k);
  if (k.size(2) > 0) at_most("q", q.size(1) * (q.size(2) / k.size(2)), "rows for each K/V head");
}

// New rows come with lengths that say where they go.
inline void new_rows(const at::Tensor& q, const at::Tensor& k_cache, const OptionalTensor& k, const OptionalTensor& v,
                     const OptionalTensor& seqlens) {
  lengths("cache_seqlens", seqlens, q, q.size(0));
  if (!k.has_value()) {
    if (v.has_value()) fail("v", "expected None when k is None, got a tensor");
    return;
  }
  if (!v.has_value()) fail("v", "expected a tensor when k is given, got None");
  if (!seqlens.has_value()) fail("cache_seqlens", "expected cache lengths when k is given, got None");
  const char* axes = "batch, seqlen, heads, head_dim";
  like_query("k", *k, q, {q.size(0), -1, k_cache.size(2), q.size(3)}, axes);
  like_query("v", *v, q, k->sizes().vec(), axes);
  at_most("k", k->size(1), "rows");
}

inline void cache_places(const at::Tensor& q, const at::Tensor& k_cache, const OptionalTensor& cache_batch_idx,
                         const OptionalTensor& leftpad, const OptionalTensor& table) {
  const int64_t batch = q.size(0);
  block_table(table, q, batch);
  lengths("cache_leftpad", leftpad, q, batch);
  lengths("cache_batch_idx", cache_batch_idx, q, batch);
  if (table.has_value()) {
    if (cache_batch_idx.has_value()) fail("cache_batch_idx", "expected None when block_table is given, got a tensor");
    return;
  }
  if (!cache_batch_idx.has_value() && k_cache.size(0) != batch) {
    fail("k_cache", "expected batch size ", batch, " (that of q) without cache_batch_idx, got ", k_cache.size(0));
  }
}

// one_position: all queries of a sequence are rotated by one row of the tables.
inline void rotary(const at::Tensor& q, const OptionalTensor& k, const OptionalTensor& cos, const OptionalTensor& sin,
                   bool one_position) {
  if (!cos.has_value()) {
    if (sin.has_value()) fail("rotary_sin", "expected None when rotary_cos is None, got a tensor");
    return;
  }
  if (!sin.has_value()) fail("rotary_sin", "expected a tensor when rotary_cos is given, got None");
  if (!k.has_value()) fail("k", "expected new keys when rotary_cos is given, got None");
  like_query("rotary_cos", *cos, q, {-1, -1}, "rows, rotary_dim / 2");
  like_query("rotary_sin", *sin, q, cos->sizes().vec(), "rows, rotary_dim / 2");
  if (2 * cos->size(1) > q.size(3)) {
    fail("rotary_cos", "expected at most ", q.size(3) / 2, " columns (half the head dim), got ", cos->size(1));
  }
  const int64_t needed = kv_rotary_rows(0, static_cast<int>(q.size(1)), static_cast<int>(k->size(1)), one_position);
  if (cos->size(0) < needed) fail("rotary_cos", "expected at least ", needed, " rows, got ", cos->size(0));
}

inline void num_splits(int64_t value) {
  if (value < 0) fail("num_splits", "expected a value >= 0, got ", value);
}

inline void plan(const at::Tensor& tensor, const at::Device& expected_device, int64_t elements) {
  if (tensor.defined() && tensor.device() != expected_device) {
    fail("plan", "expected a tensor on the device of the lengths (", expected_device, "), got one on ",
         tensor.device());
  }
  strided("plan", tensor);
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  if (tensor.scalar_type() != at::kInt || !tensor.is_contiguous() || tensor.numel() != elements || !aligned) {
    fail("plan", "expected ", elements, " contiguous int32 elements (made for the same sizes), got ", tensor.numel(),
         " of ", dtype_name(tensor.scalar_type()));
  }
}

inline void not_negative(const char* name, int64_t value) {
  if (value < 0 || value > std::numeric_limits<int>::max()) {
    fail(name, "expected a size in [0, 2^31), got ", value);
  }
}

inline void combine(const at::Tensor& partial, const at::Tensor& lse, const OptionalTensor& out) {
  auto known = [](at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16 || type == at::kFloat; };
  const char* types = "expected dtype float16, bfloat16 or float32, got ";
  if (partial.defined() && !partial.is_cuda()) {
    fail("out_partial", "expected a CUDA tensor, got one on ", partial.device());
  }
  strided("out_partial", partial);
  if (!known(partial.scalar_type())) fail("out_partial", types, dtype_name(partial.scalar_type()));
  rank("out_partial", partial, 5, "splits, batch, seqlen, heads, head_dim");
  last_stride("out_partial", partial);
  if (lse.device() != partial.device()) {
    fail("lse_partial", "expected a tensor on the device of out_partial (", partial.device(), "), got one on ",
         lse.device());
  }
  strided("lse_partial", lse);
  dtype("lse_partial", lse, at::kFloat);
  shape("lse_partial", lse, partial.sizes().slice(0, 4));
  at_most("out_partial", partial.size(0), "splits");
  at_most("out_partial", partial.size(4), "columns");
  int64_t rows = 1;
  for (int64_t axis = 1; axis < 4; ++axis) {
    at_most("out_partial", partial.size(axis), "rows of all heads");
    rows *= partial.size(axis);
    at_most("out_partial", rows, "rows of all heads");
  }
  if (!out.has_value()) return;
  if (out->device() != partial.device()) {
    fail("out", "expected a tensor on the device of out_partial (", partial.device(), "), got one on ", out->device());
  }
  strided("out", *out);
  if (!known(out->scalar_type())) fail("out", types, dtype_name(out->scalar_type()));
  shape("out", *out, partial.sizes().slice(1));
  last_stride("out", *out);
}

}  // namespace checks
}  // namespace flash
