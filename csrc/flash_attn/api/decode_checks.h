// A call over a KV cache, by argument name, and its checks. flash_attn/cpu/kvcache.py is the twin for CPU tensors.
// Lengths and table entries are on the device: a request with invalid ones is marked there, not rejected here.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "api/checks.h"
#include "api/quantized.h"
#include "api/scores.h"
#include "core/block_range.h"
#include "core/kv_schedule.h"

namespace flash {

// Of the last mask_keys keys of a sequence, which of them each query sees: words of kMaskWordKeys keys.
struct MaskBitsArgs {
  OptionalTensor mask_bits;  // int32 (1 or batch, mask heads, seqlen_q, words), contiguous
  int64_t mask_keys = 0;

  bool given() const { return mask_bits.has_value() && mask_bits->numel() > 0; }

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("mask_bits", mask_bits, "a Tensor");
    visit("mask_keys", mask_keys, "an int");
  }
};

struct KvCacheCall {
  const at::Tensor& given_q;  // (batch, seqlen_q, heads, d)
  at::Tensor q;               // the same in 16 bits, or memory for it
  const at::Tensor& k_cache;  // (cache_batch, capacity, heads_k, d) or (pages, page_size, heads_k, d)
  const at::Tensor& v_cache;  // as k_cache
  const OptionalTensor& k;    // (batch, seqlen_new, heads_k, d): rows to append
  const OptionalTensor& v;    // as k
  const OptionalTensor& seqlens;
  const OptionalTensor& rotary_cos;
  const OptionalTensor& rotary_sin;
  const OptionalTensor& cache_batch_idx;
  const OptionalTensor& leftpad;
  const OptionalTensor& block_table;
  const OptionalTensor& out;
  const ScoreOptions& scores;
  bool rotary_interleaved;
  int64_t num_splits;
  const OptionalTensor& plan;  // a schedule and its workspace (KvCachePlan)
  bool batch_invariant;
  const CacheQuantArgs& quant;
  int64_t sm_margin;
  const MaskBitsArgs& mask_bits;

  bool has_8bit_cache() const { return checks::is_8bit(k_cache); }
  bool has_8bit_q() const { return checks::is_8bit(given_q); }
  bool is_paged() const { return block_table.has_value(); }
  int64_t seqlen_new() const { return k.has_value() ? k->size(1) : 0; }

  // Rows that a sequence can hold.
  int64_t capacity() const {
    const int64_t pages = is_paged() ? block_table->size(1) : 1;
    return std::min<int64_t>(pages * k_cache.size(1), kMaxLength);
  }
};

// Without a mask, all queries of a sequence are rotated by one row of the tables.
inline bool has_one_position(const Window& window) { return !window.may_mask(); }

namespace checks {

// The packed rows of a K/V head are counted in 32 bits. `name`: the argument with the number of queries.
inline void packed_rows(const char* name, int64_t seqlen_q, int64_t heads, int64_t heads_k) {
  if (heads_k > 0) at_most(name, seqlen_q * (heads / heads_k), "rows for each K/V head");
}

// A tensor with q's device and dtype; -1 in `expected`: any size. any_dtype: it has been checked.
inline void like_query(const char* name, const at::Tensor& tensor, const at::Tensor& q, std::vector<int64_t> expected,
                       const char* axes, bool any_dtype = false) {
  device(name, tensor, q);
  if (!any_dtype) dtype_of_q(name, tensor, q);
  rank(name, tensor, static_cast<int64_t>(expected.size()), axes);
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] < 0) expected[i] = tensor.size(static_cast<int64_t>(i));
  }
  shape(name, tensor, expected);
  last_stride(name, tensor);
}

inline void caches(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool paged) {
  const char* axes = paged ? "blocks, page_size, heads, head_dim" : kDenseAxes;
  like_query("k_cache", k, q, {-1, -1, -1, q.size(3)}, axes, is_8bit(k));
  if (is_8bit(k)) eight_bit_head_dim("k_cache", k.size(3));
  if (is_8bit(k) && v.defined()) same_dtype("v_cache", v, "k_cache", k);
  like_query("v_cache", v, q, k.sizes().vec(), axes, is_8bit(k));
  sizes("k_cache", k, paged ? "pages" : "sequences");
  head_counts(q, k);
  packed_rows("q", q.size(1), q.size(2), k.size(2));
}

// New rows need lengths that say where they are appended. any_wide: those of 16 bits need not have q's dtype.
inline void new_rows(const at::Tensor& q, const at::Tensor& k_cache, const OptionalTensor& k, const OptionalTensor& v,
                     const OptionalTensor& seqlens, bool any_wide) {
  lengths("cache_seqlens", seqlens, q, q.size(0));
  if (!k.has_value()) {
    if (v.has_value()) fail("v", "expected None when k is None, got a tensor");
    return;
  }
  if (!v.has_value()) fail("v", "expected a tensor when k is given, got None");
  if (!seqlens.has_value()) fail("cache_seqlens", "expected cache lengths when k is given, got None");
  const char* axes = kDenseAxes;
  const bool quantizes = is_8bit(k_cache);
  if (quantizes) {
    device("k", *k, q);
    const bool is_wide = any_wide ? is_supported(k->scalar_type()) : k->scalar_type() == q.scalar_type();
    if (!is_wide && k->scalar_type() != k_cache.scalar_type()) {
      fail("k", "expected dtype ", any_wide ? "float16, bfloat16" : dtype_name(q.scalar_type()), " or ",
           dtype_name(k_cache.scalar_type()), ", got ", dtype_name(k->scalar_type()));
    }
    dtype("v", *v, k->scalar_type());
  }
  like_query("k", *k, q, {q.size(0), -1, k_cache.size(2), q.size(3)}, axes, quantizes);
  like_query("v", *v, q, k->sizes().vec(), axes, quantizes);
  at_most("k", k->size(1), "rows");
}

// A scale for each row, written with new ones. given: the argument that it replaces.
inline void token_descale(const char* name, const OptionalTensor& descale, const OptionalTensor& given,
                          const at::Tensor& cache, const OptionalTensor& rows, const at::Tensor& q) {
  if (!descale.has_value()) return;
  if (given.has_value()) fail(name, "expected None with a descale of each row, got a tensor");
  scale_of(name, *descale, cache, q);
  shape(name, *descale, cache.sizes().slice(0, 3));
  if (!rows.has_value() || is_8bit(*rows)) {
    const std::string own(1, name[0]);
    fail(own.c_str(), "expected new rows of at least 16 bits with ", name, " of each row, got ",
         rows.has_value() ? dtype_name(rows->scalar_type()) : "None");
  }
}

inline void scales(const KvCacheCall& call) {
  quant_args(call.quant, call.given_q, call.k_cache, call.v_cache, call.q.size(0));
  token_descale("k_descale", call.quant.k_token, call.quant.k, call.k_cache, call.k, call.q);
  token_descale("v_descale", call.quant.v_token, call.quant.v, call.v_cache, call.v, call.q);
  if (call.rotary_cos.has_value() && call.k.has_value() && is_8bit(*call.k)) {
    fail("rotary_cos", "expected None with k of 8 bits, got a tensor");
  }
  if (call.rotary_cos.has_value() && call.has_8bit_q()) {
    fail("rotary_cos", "expected None with q of 8 bits, got a tensor");
  }
}

inline void cache_location(const at::Tensor& q, const at::Tensor& k_cache, const OptionalTensor& cache_batch_idx,
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

inline void mask_bits(const MaskBitsArgs& mask, const at::Tensor& q) {
  if (!mask.mask_bits.has_value()) return;
  const at::Tensor& bits = *mask.mask_bits;
  mask_factor("mask_bits", bits, q, 4, at::kInt);
  if (bits.size(0) != 1 && bits.size(0) != q.size(0)) {
    fail("mask_bits", "expected a batch of 1 or ", q.size(0), ", got shape ", bits.sizes());
  }
  if (mask.mask_keys < 0 || mask.mask_keys > kMaxLength) {
    fail("mask_keys", "expected a value from 0 to ", int64_t{kMaxLength}, ", got ", mask.mask_keys);
  }
  mask_sizes("mask_bits", bits, q.size(1), mask_words(mask.mask_keys), false);
}

// Whether equal rows of K and V become equal 8-bit rows.
inline bool quantizes_alike(const KvCacheCall& call) {
  if (!call.has_8bit_cache() || is_8bit(*call.k)) return true;
  const CacheQuantArgs& quant = call.quant;
  if (quant.k_token.has_value() || quant.v_token.has_value() || quant.v_per_channel) return false;
  if (!quant.k.has_value() || !quant.v.has_value()) return quant.k.has_value() == quant.v.has_value();
  return overlap::same_view(*quant.k, *quant.v);
}

// With new rows the caches are written. One tensor as both caches does not overlap itself if the same rows are appended
// to both.
inline void kvcache_overlap(const KvCacheCall& call) {
  const bool appends = call.k.has_value() && call.k->numel() > 0;
  if (!appends && !call.out.has_value() && !call.plan.has_value()) return;
  const bool is_one_cache = appends && !call.rotary_cos.has_value() && overlap::same_view(call.k_cache, call.v_cache) &&
                            overlap::same_view(*call.k, *call.v) && quantizes_alike(call);
  const OptionalTensor none, k = call.k_cache, v = call.v_cache;
  const overlap::Operands read = {{"q", call.given_q},
                                  {"k_cache", appends ? none : k},
                                  {"v_cache", appends ? none : v},
                                  {"k", call.k},
                                  {"v", call.v},
                                  {"cache_seqlens", call.seqlens},
                                  {"rotary_cos", call.rotary_cos},
                                  {"rotary_sin", call.rotary_sin},
                                  {"cache_batch_idx", call.cache_batch_idx},
                                  {"cache_leftpad", call.leftpad},
                                  {"block_table", call.block_table},
                                  {"alibi_slopes", call.scores.alibi_slopes},
                                  {"sinks", call.scores.sinks},
                                  {"mask_bits", call.mask_bits.mask_bits},
                                  {"q_descale", call.quant.q},
                                  {"k_descale", call.quant.k},
                                  {"v_descale", call.quant.v}};
  overlap::check({{"out", call.out},
                  {"plan", call.plan},
                  {"k_descale", call.quant.k_token},
                  {"v_descale", call.quant.v_token},
                  {"k_cache", appends ? k : none},
                  {"v_cache", appends && !is_one_cache ? v : none}},
                 read);
}

// A call as a whole.
inline void kvcache(const KvCacheCall& call) {
  const at::Tensor& q = call.q;
  query(q, 4, kDenseAxes);
  caches(q, call.k_cache, call.v_cache, call.is_paged());
  check_scores_with_sinks_alone(call.scores, q, q.size(0), " over a KV cache");
  num_splits(call.num_splits);
  mask_bits(call.mask_bits, q);
  output(call.out, q, q.sizes());
  new_rows(q, call.k_cache, call.k, call.v, call.seqlens, call.has_8bit_q());
  cache_location(q, call.k_cache, call.cache_batch_idx, call.leftpad, call.block_table);
  scales(call);
  if (call.plan.has_value()) strided("plan", *call.plan);
  rotary(q, call.k, call.rotary_cos, call.rotary_sin, has_one_position(make_window(call.scores)));
  kvcache_overlap(call);
}

// What a schedule depends on, but for the mask.
struct ScheduleSizes {
  int64_t batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, seqlen_cache, num_splits;
};

inline void kvcache_schedule(const at::Tensor& seqlens, const OptionalTensor& leftpad, const ScheduleSizes& sizes,
                             const OptionalTensor& plan) {
  strided("cache_seqlens", seqlens);
  if (!seqlens.is_cuda()) fail("cache_seqlens", "expected a CUDA tensor, got one on ", seqlens.device());
  not_negative("batch", sizes.batch);
  not_negative("seqlen_q", sizes.seqlen_q);
  not_negative("seqlen_new", sizes.seqlen_new);
  not_negative("nheads", sizes.heads);
  not_negative("nheads_k", sizes.heads_k);
  not_negative("seqlen_cache", sizes.seqlen_cache);
  num_splits(sizes.num_splits);
  if (sizes.head_dim < 1 || sizes.head_dim > plan::kMaxHeadDim) {
    fail("head_dim", "expected a value from 1 to ", int64_t{plan::kMaxHeadDim}, ", got ", sizes.head_dim);
  }
  head_counts("nheads", sizes.heads, sizes.heads_k);
  lengths("cache_seqlens", seqlens, seqlens, sizes.batch);
  lengths("cache_leftpad", leftpad, seqlens, sizes.batch);
  packed_rows("seqlen_q", sizes.seqlen_q, sizes.heads, sizes.heads_k);
  if (plan.has_value()) strided("plan", *plan);
  overlap::check({{"plan", plan}}, {{"cache_seqlens", seqlens}, {"cache_leftpad", leftpad}});
}

}  // namespace checks
}  // namespace flash
