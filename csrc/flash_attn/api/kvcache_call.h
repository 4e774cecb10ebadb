// The arguments of a call over a KV cache, by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "api/set_params.h"
#include "core/block_range.h"

namespace flash {

// Of K and V of codes. FlashAttention-2 has none: the module's functions take them by name.
struct KvDescales {
  OptionalTensor k, v;
  bool v_per_channel = false;  // v has a column for each of V's

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("k_descale", k, "a Tensor");
    visit("v_descale", v, "a Tensor");
    visit("v_per_channel", v_per_channel, "a bool");
  }
};

// The same of 8-bit caches, and of queries of codes over them.
struct CacheDescales : KvDescales {
  OptionalTensor q;
  bool fp16_out = false;            // out of queries of codes: fp16 instead of bf16
  OptionalTensor k_token, v_token;  // in place of k and v: of each row, written with new ones

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    KvDescales::visit_named(visit);
    visit("q_descale", q, "a Tensor");
    visit("fp16_out", fp16_out, "a bool");
    visit("k_token_descale", k_token, "a Tensor");
    visit("v_token_descale", v_token, "a Tensor");
  }
};

struct KvCacheCall {
  const at::Tensor& q;        // (batch, seqlen_q, heads, d), of 16 bits
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
  const CacheDescales& descales;
  int64_t sm_margin;
  const at::Tensor* q_codes = nullptr;  // what q is made of, if the call has queries of codes

  bool is_eight_bit() const { return flash::is_eight_bit(dtype_of(k_cache)); }
  bool is_paged() const { return block_table.has_value(); }
  int64_t seqlen_new() const { return k.has_value() ? k->size(1) : 0; }

  // Rows that a sequence can hold.
  int64_t capacity() const {
    const int64_t pages = is_paged() ? block_table->size(1) : 1;
    return std::min<int64_t>(pages * k_cache.size(1), kMaxLength);
  }
};

// Without a mask all queries of a sequence are rotated by one row of the tables.
inline bool has_one_position(const Window& window) { return !window.may_mask(); }

}  // namespace flash
