// Attention over a KV cache: the problem that the plan takes, and the parameters of the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "api/environment.h"
#include "api/kvcache_call.h"
#include "api/launch_check.h"
#include "api/problem.h"
#include "api/set_params.h"
#include "params/kvcache.h"
#include "plan/decode_plan.h"

namespace flash {

// The widest vectors, of 16 or 4 bytes or one element, in which rows can be read: start, strides and row length are
// multiples of it.
inline int vector_bytes(const at::Tensor& tensor) {
  const int element_bytes = static_cast<int>(tensor.element_size());
  for (const int bytes : {16, 4}) {
    if (is_aligned(tensor, bytes) && tensor.size(-1) % (bytes / element_bytes) == 0) return bytes;
  }
  return element_bytes;
}

// Axes of size 1 may have any stride, also one that does not suit 16-byte vectors.
inline MatrixStrides cache_strides(const at::Tensor& tensor) {
  MatrixStrides strides = matrix_strides(tensor);
  if (tensor.size(0) <= 1) strides.batch = 0;
  if (tensor.size(1) <= 1) strides.row = 0;
  if (tensor.size(2) <= 1) strides.head = 0;
  return strides;
}

// ---- problem ----

inline int clamped_int(int64_t value) {
  return static_cast<int>(std::min<int64_t>(value, std::numeric_limits<int>::max()));
}

// Rows of a cache from one sequence to the next; -1: not a whole number, so the cache is no packed tensor.
inline int64_t rows_per_sequence(const MatrixStrides& strides) {
  return strides.row > 0 && strides.batch % strides.row == 0 ? strides.batch / strides.row : -1;
}

// Whether the forward's kernels can read the cache as pages or as packed sequences.
inline bool is_packed_cache(const KvCacheCall& call) {
  if (call.is_paged()) return true;
  const int64_t rows = rows_per_sequence(cache_strides(call.k_cache));
  return rows >= 0 && rows == rows_per_sequence(cache_strides(call.v_cache)) &&
         rows * call.k_cache.size(0) + call.capacity() <= kMaxLength;
}

inline PagedKv cache_pages(const KvCacheCall& call) {
  PagedKv paged;
  if (!call.is_paged()) return paged;
  paged.block_table = int_or_null(call.block_table);
  paged.block_table_stride = call.block_table->stride(0);
  paged.page_size = FastDiv(static_cast<int>(std::max<int64_t>(call.k_cache.size(1), 1)));
  paged.pages_per_sequence = static_cast<int>(call.block_table->size(1));
  paged.num_pages = static_cast<int>(call.k_cache.size(0));
  return paged;
}

// Of rows that a pass writes in the place of codes, so many of a sequence.
inline MatrixStrides dequantized_strides(int64_t heads_k, int64_t head_dim, int64_t rows) {
  return {rows * heads_k * head_dim, heads_k * head_dim, head_dim};
}

// The call as a forward over packed keys or pages, whose lengths only the device knows.
inline plan::FwdProblem forward_problem(const KvCacheCall& call) {
  Flash_fwd_params params;
  set_params_qkv(params, call.q, call.k_cache, call.v_cache);
  params.b = static_cast<int>(call.q.size(0));
  params.seqlen_k = static_cast<int>(call.capacity());
  const bool dequantizes = call.is_eight_bit();
  const MatrixStrides dequantized = dequantized_strides(params.h_k, params.d, params.seqlen_k);
  params.k_strides = dequantizes ? dequantized : cache_strides(call.k_cache);
  params.v_strides = dequantizes ? dequantized : cache_strides(call.v_cache);
  const MatrixStrides contiguous = contiguous_strides(call.q, params.d);
  const bool converts_queries = dequantizes && dtype_of(call.q) == Dtype::kBf16;
  params.q_strides = call.rotary_cos.has_value() || converts_queries ? contiguous : cache_strides(call.q);
  params.o_strides = call.out.has_value() ? cache_strides(*call.out) : contiguous;
  set_params_scores(params, call.scores);
  if (!dequantizes) params.paged = cache_pages(call);
  plan::FwdProblem problem = fwd_problem(params, dequantizes ? Dtype::kFp16 : dtype_of(call.q), true);
  problem.converts_queries = converts_queries;
  problem.kv_dtype = dtype_of(call.k_cache);
  problem.gathers_keys = dequantizes;
  return problem;
}

// Whether the forward's kernels can read q and the cache, or what a pass makes of its codes, and write out.
inline bool forward_reads(const KvCacheCall& call) {
  if (!is_aligned(call.q) || (call.out.has_value() && !is_aligned(*call.out))) return false;
  if (!call.is_eight_bit()) return is_aligned(call.k_cache) && is_aligned(call.v_cache) && is_packed_cache(call);
  // Units of columns and rows are ints in the pass.
  return call.capacity() > 0 && call.q.size(0) * call.capacity() <= kMaxLength &&
         call.k_cache.size(2) * call.k_cache.size(3) <= kMaxLength;
}

inline plan::DecodeProblem decode_problem(const KvCacheCall& call) {
  plan::DecodeProblem problem;
  problem.batch = static_cast<int>(call.q.size(0));
  problem.seqlen_q = static_cast<int>(call.q.size(1));
  problem.heads = static_cast<int>(call.q.size(2));
  problem.heads_k = static_cast<int>(call.k_cache.size(2));
  problem.head_dim = static_cast<int>(call.q.size(3));
  problem.capacity = static_cast<int>(call.capacity());
  problem.num_splits = clamped_int(call.num_splits);
  problem.batch_invariant = call.batch_invariant;
  problem.kv_dtype = dtype_of(call.k_cache);
  plan::DecodeOptions& options = problem.options;
  options.seqlen_new = static_cast<int>(call.seqlen_new());
  options.window = make_window(call.scores);
  options.has_score_mod = has_score_mod(call.scores);
  options.has_rotary = call.rotary_cos.has_value();
  options.has_leftpad = call.leftpad.has_value();
  if (call.is_paged()) {
    options.page_size = static_cast<int>(std::max<int64_t>(call.k_cache.size(1), 1));
  }
  options.q_vectors = vector_bytes(call.q) == 16;
  options.kv_vector_bytes = std::min(vector_bytes(call.k_cache), vector_bytes(call.v_cache));
  options.v_per_channel = call.descales.v_per_channel;
  if (forward_reads(call)) options.forward = forward_problem(call);
  options.forced_family = forced_family();
  return problem;
}

// Keys that a sequence of a forward may have.
inline int split_capacity(const Flash_fwd_params& forward) {
  const PagedKv& paged = forward.paged;
  if (paged.block_table == nullptr) return forward.seqlen_k;
  return static_cast<int>(
      std::min<int64_t>(static_cast<int64_t>(paged.pages_per_sequence) * paged.page_size.divisor, kMaxLength));
}

// A dense batch is a full cache; for a packed one the schedule kernel linearises the work.
inline plan::DecodeProblem decode_problem(const Flash_fwd_params& forward, const at::Tensor& q, const at::Tensor& k,
                                          const at::Tensor& v, const KvDescales& descales) {
  plan::DecodeProblem problem;
  problem.is_forward = true;
  problem.batch = forward.b;
  problem.seqlen_q = forward.seqlen_q;
  problem.heads = forward.h;
  problem.heads_k = forward.h_k;
  problem.head_dim = forward.d;
  problem.capacity = split_capacity(forward);
  problem.is_packed = forward.is_varlen();
  problem.packed_keys = clamped_int(fwd_problem(forward, dtype_of(q)).keys());
  problem.kv_dtype = dtype_of(k);
  plan::DecodeOptions& options = problem.options;
  options.window = forward.window;
  options.has_score_mod = forward.has_score_mod;
  options.page_size = forward.is_paged() ? forward.paged.page_size.divisor : 0;
  options.q_vectors = vector_bytes(q) == 16;
  options.kv_vector_bytes = std::min(vector_bytes(k), vector_bytes(v));
  options.v_per_channel = descales.v_per_channel;
  return problem;
}

// ---- parameters ----

// What every kernel of a problem reads, the schedule kernel too.
inline void set_params_sizes(Flash_kvcache_params& params, const plan::DecodeProblem& problem, int device) {
  params.b = problem.batch;
  params.h = problem.heads;
  params.h_k = problem.heads_k;
  params.h_h_k_ratio = problem.group();
  params.group = FastDiv(std::max(params.h_h_k_ratio, 1));
  params.d = params.d_v = problem.head_dim;
  params.seqlen_q = problem.seqlen_q;
  params.seqlen_new = problem.options.seqlen_new;
  params.capacity = problem.capacity;
  params.window = problem.options.window;
  params.q_vectors = problem.options.q_vectors;
  params.kv_vector_bytes = problem.options.kv_vector_bytes;
  params.kv_dtype = problem.kv_dtype;
  params.device = static_cast<int16_t>(device);
}

inline void set_params_plan(Flash_kvcache_params& params, const plan::DecodePlan& plan) {
  const plan::KvTile tile = plan::kv_tile(params.d, plan.tile_size, params.kv_dtype);
  params.tile_size = plan.tile_size;
  params.tile_rows = tile.rows();
  params.block_n = plan.block_n;
  params.tile_heads = plan.tile_heads;
  params.head_tiles = plan.head_tiles;
  params.tile_query_heads = std::max(params.h_h_k_ratio * plan.tile_heads, 1);
  params.tile_group = FastDiv(params.tile_query_heads);
  params.padded_dim = tile.head_dim;
  params.stages = plan.stages;
  params.row_tiles = plan.row_tiles;
  params.work_items = static_cast<int>(plan.work_items);
  params.thread_blocks = plan.thread_blocks;
  params.min_blocks_per_cta = plan.min_blocks_per_cta;
  params.split_points = plan.split_points;
  params.split_blocks = plan.split_blocks;
  params.max_splits = plan.max_splits;
  params.slot_rows = plan.slot_rows;
  params.combines = plan.combines;
  params.combines_one_row = plan.combines_one_row;
  params.is_plain = plan.is_plain;
  params.in_clusters = plan.in_clusters;
}

inline void set_params_workspace(Flash_kvcache_params& params, const plan::DecodePlan& plan, float* workspace) {
  params.partial_o = workspace;
  params.partial_stats = workspace + plan.slots * plan.slot_rows * params.padded_dim;
}

inline void set_params_cache(Flash_kvcache_params& params, const KvCacheCall& call) {
  params.kcache_ptr = call.k_cache.data_ptr();
  params.vcache_ptr = call.v_cache.data_ptr();
  params.k_ptr = params.kcache_ptr;
  params.v_ptr = params.vcache_ptr;
  params.k_strides = cache_strides(call.k_cache);
  params.v_strides = cache_strides(call.v_cache);
  params.seqlens_k = int_or_null(call.seqlens);
  params.cache_batch_idx = int_or_null(call.cache_batch_idx);
  params.leftpad_k = int_or_null(call.leftpad);
  params.cache_batch = static_cast<int>(call.k_cache.size(0));
  params.paged = cache_pages(call);
}

inline void set_params_new_rows(Flash_kvcache_params& params, const KvCacheCall& call) {
  if (call.seqlen_new() == 0) return;
  params.knew_ptr = call.k->const_data_ptr();
  params.vnew_ptr = call.v->const_data_ptr();
  params.knew_strides = cache_strides(*call.k);
  params.vnew_strides = cache_strides(*call.v);
  params.new_vectors = params.kv_vector_bytes == 16 && vector_bytes(*call.k) == 16 && vector_bytes(*call.v) == 16;
}

// Of a shape that checks::descales() has passed.
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

// Of each row, whatever there is of them.
inline KvDescale kv_token_descale(const at::Tensor& descale) {
  KvDescale result;
  result.ptr = descale.const_data_ptr<float>();
  result.by_row = true;
  result.batch = descale.stride(0);
  result.row = descale.stride(1);
  result.head = descale.stride(2);
  return result;
}

// Of a forward.
inline void set_params_forward_descales(Flash_kvcache_params& params, const KvDescales& descales, Dtype q_dtype) {
  params.q_dtype = q_dtype;
  const bool packed = params.is_varlen() && !params.is_paged();
  if (descales.k.has_value()) params.k_descale = kv_descale(*descales.k, false, packed);
  if (descales.v.has_value()) params.v_descale = kv_descale(*descales.v, descales.v_per_channel, packed);
}

inline void set_params_descales(Flash_kvcache_params& params, const KvCacheCall& call) {
  params.q_dtype = dtype_of(call.q);
  if (!call.is_eight_bit()) return;
  params.new_dtype = call.k.has_value() ? dtype_of(*call.k) : params.q_dtype;
  if (call.descales.k.has_value()) params.k_descale = kv_descale(*call.descales.k, false);
  if (call.descales.v.has_value()) params.v_descale = kv_descale(*call.descales.v, call.descales.v_per_channel);
  if (call.descales.k_token.has_value()) {
    params.k_descale = kv_token_descale(*call.descales.k_token);
    params.k_token_descale_ptr = call.descales.k_token->mutable_data_ptr<float>();
  }
  if (call.descales.v_token.has_value()) {
    params.v_descale = kv_token_descale(*call.descales.v_token);
    params.v_token_descale_ptr = call.descales.v_token->mutable_data_ptr<float>();
  }
}

inline void set_params_rotary(Flash_kvcache_params& params, const KvCacheCall& call) {
  if (!call.rotary_cos.has_value()) return;
  const at::Tensor &cos = *call.rotary_cos, &sin = *call.rotary_sin;
  Rotary& rotary = params.rotary;
  rotary.cos_ptr = cos.const_data_ptr();
  rotary.sin_ptr = sin.const_data_ptr();
  rotary.cos_stride = cos.stride(0);
  rotary.sin_stride = sin.stride(0);
  rotary.rows = clamped_int(cos.size(0));
  rotary.pairs = static_cast<int>(cos.size(1));
  rotary.interleaved = call.rotary_interleaved;
  rotary.one_position = has_one_position(params.window);
}

inline Flash_kvcache_params set_params_kvcache(const KvCacheCall& call, const plan::DecodeProblem& problem,
                                               const plan::DecodePlan& plan, const at::Tensor& out,
                                               const at::Tensor& lse) {
  Flash_kvcache_params params;
  set_params_sizes(params, problem, call.q.device().index());
  set_params_plan(params, plan);
  params.q_ptr = call.q.const_data_ptr();
  params.q_strides = cache_strides(call.q);
  params.o_ptr = out.mutable_data_ptr();
  params.o_strides = cache_strides(out);
  params.o_vectors = vector_bytes(out) == 16;
  params.softmax_lse_ptr = lse.mutable_data_ptr<float>();
  set_params_scores(params, call.scores);
  set_params_cache(params, call);
  set_params_new_rows(params, call);
  set_params_descales(params, call);
  set_params_rotary(params, call);
  return params;
}

}  // namespace flash
