// The arguments of a call over a KV cache, by name.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "api/set_params.h"
#include "core/block_range.h"

namespace flash {

struct KvCacheCall {
  const at::Tensor& q;        // (batch, seqlen_q, heads, d)
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
  const OptionalTensor& alibi_slopes;
  const OptionalTensor& out;
  double softmax_scale;
  bool is_causal;
  int64_t window_left, window_right;
  double softcap;
  bool rotary_interleaved;
  int64_t num_splits;
  const OptionalTensor& plan;  // a schedule and its workspace (KvCachePlan)
  bool batch_invariant;
  // Descales of 8-bit caches; q has none here.
  const OptionalTensor& q_descale;
  const OptionalTensor& k_descale;
  const OptionalTensor& v_descale;
  bool v_per_channel;                     // v_descale has a column for each of v's
  const OptionalTensor& k_token_descale;  // in place of k_descale: of each row, written with new ones
  const OptionalTensor& v_token_descale;

  bool is_eight_bit() const { return flash::is_eight_bit(dtype_of(k_cache)); }
  bool is_paged() const { return block_table.has_value(); }
  int64_t seqlen_new() const { return k.has_value() ? k->size(1) : 0; }

  // Rows that a sequence can hold.
  int64_t capacity() const {
    const int64_t pages = is_paged() ? block_table->size(1) : 1;
    return std::min<int64_t>(pages * k_cache.size(1), kMaxLength);
  }

  ScoreOptions scores() const {
    static const OptionalTensor no_sinks;
    return {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, no_sinks};
  }
};

// Without a mask all queries of a sequence are rotated by one row of the tables.
inline bool has_one_position(const Window& window) { return !window.may_mask(); }

}  // namespace flash
