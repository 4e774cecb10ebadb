// Attention against a KV cache, its plan, and forwards by the same kernels: check -> describe -> allocate -> launch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "api/allocate.h"
#include "api/kvcache_checks.h"
#include "api/launch_check.h"
#include "api/overlap.h"
#include "api/run_fwd.h"
#include "api/set_params.h"
#include "core/static_switch.h"
#include "params/kvcache.h"
#include "plan/kvcache.h"

namespace flash {

inline const int* int_or_null(const OptionalTensor& tensor) {
  return tensor.has_value() ? tensor->const_data_ptr<int>() : nullptr;
}

// The widest pieces, of 16, 4 or 2 bytes, in which rows can be read: what start, strides and row length are multiples
// of.
inline int piece_bytes(const at::Tensor& tensor) {
  for (const int bytes : {16, 4}) {
    const int64_t elements = bytes / 2;
    bool fits = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0 && tensor.size(-1) % elements == 0;
    for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis) {
      fits &= tensor.size(axis) <= 1 || tensor.stride(axis) % elements == 0;
    }
    if (fits) return bytes;
  }
  return 2;
}

// ---- sizes ----

// What decides how the work is spread; the same for a plan and for the call that uses it.
struct KvCallSizes {
  int64_t batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, capacity;
  bool is_causal;
  int64_t window_left, window_right, num_splits;
  bool batch_invariant;
  bool is_packed = false;
  int64_t packed_keys = 0;
};

inline plan::KvPlan set_params_sizes(Flash_kvcache_params& params, const KvCallSizes& sizes, int device) {
  auto as_int = [](int64_t value) {
    return static_cast<int>(std::min<int64_t>(value, std::numeric_limits<int>::max()));
  };
  params.b = static_cast<int>(sizes.batch);
  params.h = static_cast<int>(sizes.heads);
  params.h_k = static_cast<int>(sizes.heads_k);
  params.h_h_k_ratio = params.h_k > 0 ? params.h / params.h_k : 1;
  params.group = FastDiv(std::max(params.h_h_k_ratio, 1));
  params.d = params.d_v = static_cast<int>(sizes.head_dim);
  params.seqlen_q = static_cast<int>(sizes.seqlen_q);
  params.seqlen_new = static_cast<int>(sizes.seqlen_new);
  params.capacity = static_cast<int>(sizes.capacity);
  params.window =
      make_window({1.0, sizes.is_causal, sizes.window_left, sizes.window_right, 0.0, std::nullopt, std::nullopt});
  params.device = device;
  const DeviceFacts& facts = device_facts(device);
  params.multiprocessors = facts.multiprocessors;

  const plan::KvProblem problem{params.b,
                                params.seqlen_q,
                                params.h,
                                params.h_k,
                                params.d,
                                params.capacity,
                                as_int(sizes.num_splits),
                                sizes.batch_invariant,
                                sizes.is_packed,
                                as_int(sizes.packed_keys)};
  const plan::KvPlan plan =
      plan::kv_plan(problem, {facts.multiprocessors, facts.smem_per_multiprocessor, facts.smem_per_block});
  const plan::KvTile tile = plan::kv_tile(params.d, plan.tile_size);
  if (plan.is_too_large) {
    checks::fail("q", "expected at most ", plan::kMaxKvTiles, " tiles of ", int64_t{tile.rows()}, " rows, got ",
                 plan.items, " for each of ", sizes.heads_k, " K/V heads");
  }
  params.tile_size = plan.tile_size;
  params.tile_rows = tile.rows();
  params.block_n = plan::kv_block_n(tile);
  params.padded_dim = tile.head_dim;
  params.stages = plan.stages;
  params.row_tiles = plan.row_tiles;
  params.items = static_cast<int>(plan.items);
  params.thread_blocks = plan.thread_blocks;
  params.min_blocks_per_cta = plan.min_blocks_per_cta;
  params.split_points = plan.split_points;
  params.run_blocks = plan.run_blocks;
  params.max_runs = plan.max_runs;
  params.slot_rows = plan.slot_rows;
  params.merges = plan::kv_may_split(plan, params.capacity, params.block_n);
  params.in_clusters = params.merges && plan.in_clusters;
  params.combines_one_row = plan.combines_one_row;
  return plan;
}

inline void set_params_workspace(Flash_kvcache_params& params, const plan::KvPlan& plan, float* workspace) {
  params.partial_o = workspace;
  params.partial_stats = workspace + plan.slots * plan.slot_rows * params.padded_dim;
}

// ---- attention ----

struct KvCacheTensors {
  const at::Tensor& k;
  const at::Tensor& v;
  const OptionalTensor& k_new;
  const OptionalTensor& v_new;
  const OptionalTensor& seqlens;
  const OptionalTensor& cache_batch_idx;
  const OptionalTensor& leftpad;
  const OptionalTensor& block_table;

  // Rows that a sequence can hold.
  int64_t capacity() const {
    const int64_t pages = block_table.has_value() ? block_table->size(1) : 1;
    return std::min<int64_t>(pages * k.size(1), kMaxLength);
  }
};

// Axes of size 1 may have any stride, also one that a 16-byte access must not see.
inline MatrixStrides cache_strides(const at::Tensor& tensor) {
  MatrixStrides strides = matrix_strides(tensor);
  if (tensor.size(0) <= 1) strides.batch = 0;
  if (tensor.size(1) <= 1) strides.row = 0;
  if (tensor.size(2) <= 1) strides.head = 0;
  return strides;
}

inline void set_params_cache(Flash_kvcache_params& params, const KvCacheTensors& cache) {
  params.kcache_ptr = cache.k.data_ptr();
  params.vcache_ptr = cache.v.data_ptr();
  params.k_ptr = params.kcache_ptr;
  params.v_ptr = params.vcache_ptr;
  params.k_strides = cache_strides(cache.k);
  params.v_strides = cache_strides(cache.v);
  params.seqlens_k = int_or_null(cache.seqlens);
  params.cache_batch_idx = int_or_null(cache.cache_batch_idx);
  params.leftpad_k = int_or_null(cache.leftpad);
  params.cache_batch = static_cast<int>(cache.k.size(0));
  params.kv_bytes = std::min(piece_bytes(cache.k), piece_bytes(cache.v));
  if (cache.block_table.has_value()) {
    params.paged.block_table = int_or_null(cache.block_table);
    params.paged.block_table_stride = cache.block_table->stride(0);
    params.paged.page_size = FastDiv(static_cast<int>(std::max<int64_t>(cache.k.size(1), 1)));
    params.paged.pages_per_sequence = static_cast<int>(cache.block_table->size(1));
    params.paged.num_pages = static_cast<int>(cache.k.size(0));
  }
  if (params.seqlen_new == 0) return;
  params.knew_ptr = cache.k_new->const_data_ptr();
  params.vnew_ptr = cache.v_new->const_data_ptr();
  params.knew_strides = cache_strides(*cache.k_new);
  params.vnew_strides = cache_strides(*cache.v_new);
  params.new_vectors = params.kv_bytes == 16 && piece_bytes(*cache.k_new) == 16 && piece_bytes(*cache.v_new) == 16;
}

// Without a mask all queries of a sequence are rotated by one row of the tables.
inline bool has_one_position(const Window& window) { return window.left == kUnbounded && window.right == kUnbounded; }

// The caches are written where new rows come. One cache for keys and values is none if the same rows go to it.
inline void check_written(const at::Tensor& q, const KvCacheTensors& cache, const OptionalTensor& cos,
                          const OptionalTensor& sin, const OptionalTensor& alibi_slopes, const OptionalTensor& out,
                          const OptionalTensor& plan) {
  const bool appends = cache.k_new.has_value() && cache.k_new->numel() > 0;
  if (!appends && !out.has_value() && !plan.has_value()) return;
  const bool is_one_cache = appends && !cos.has_value() && overlap::same_view(cache.k, cache.v) &&
                            overlap::same_view(*cache.k_new, *cache.v_new);
  const OptionalTensor none, k = cache.k, v = cache.v;
  const overlap::Operands read = {{"q", q},
                                  {"k_cache", appends ? none : k},
                                  {"v_cache", appends ? none : v},
                                  {"k", cache.k_new},
                                  {"v", cache.v_new},
                                  {"cache_seqlens", cache.seqlens},
                                  {"rotary_cos", cos},
                                  {"rotary_sin", sin},
                                  {"cache_batch_idx", cache.cache_batch_idx},
                                  {"cache_leftpad", cache.leftpad},
                                  {"block_table", cache.block_table},
                                  {"alibi_slopes", alibi_slopes}};
  overlap::check(
      {{"out", out}, {"plan", plan}, {"k_cache", appends ? k : none}, {"v_cache", appends && !is_one_cache ? v : none}},
      read);
}

inline void set_params_rotary(Flash_kvcache_params& params, const OptionalTensor& cos, const OptionalTensor& sin,
                              bool interleaved) {
  if (!cos.has_value()) return;
  Rotary& rotary = params.rotary;
  rotary.cos_ptr = cos->const_data_ptr();
  rotary.sin_ptr = sin->const_data_ptr();
  rotary.cos_stride = cos->stride(0);
  rotary.sin_stride = sin->stride(0);
  rotary.rows = static_cast<int>(std::min<int64_t>(cos->size(0), std::numeric_limits<int>::max()));
  rotary.pairs = static_cast<int>(cos->size(1));
  rotary.interleaved = interleaved;
  rotary.one_position = has_one_position(params.window);
}

// ---- many query rows over a cache: by the families of the forward ----

// Rows of a cache from one sequence to the next; -1: not a whole number, the cache is no packed tensor.
inline int64_t rows_per_sequence(const MatrixStrides& strides) {
  return strides.row > 0 && strides.batch % strides.row == 0 ? strides.batch / strides.row : -1;
}

inline bool is_packed_cache(const Flash_kvcache_params& params) {
  if (params.paged.block_table != nullptr) return true;
  const int64_t rows = rows_per_sequence(params.k_strides);
  return rows >= 0 && rows == rows_per_sequence(params.v_strides) &&
         rows * params.cache_batch + params.capacity <= kMaxLength;
}

inline Flash_fwd_params forward_over_cache(const Flash_kvcache_params& params) {
  Flash_fwd_params forward = params;
  forward.seqlen_k = params.capacity;
  return forward;
}

// Tiles of 16 packed rows are what the kernels of the KV cache are made for; of more rows only where tiles of rows
// would leave multiprocessors idle.
inline plan::FwdPlan plan_over_cache(const Flash_kvcache_params& params, const at::Tensor& q, const at::Tensor& k,
                                     const at::Tensor& v, const at::Tensor& out) {
  const bool has_many_rows =
      static_cast<int64_t>(params.seqlen_q) * params.h_h_k_ratio > plan::kv_tile(params.d, 0).rows();
  const bool served = params.d % 8 == 0 && is_aligned(q) && is_aligned(k) && is_aligned(v) && is_aligned(out) &&
                      is_packed_cache(params);
  if (has_many_rows && served) {
    return plan_forward(fwd_problem(forward_over_cache(params), dtype_of(q), true), params.device);
  }
  plan::FwdPlan plan;
  plan.family = plan::Family::kDecode;
  return plan;
}

inline void run_forward_over_cache(const plan::FwdPlan& forward_plan, const Flash_kvcache_params& params,
                                   const at::Tensor& q) {
  Flash_fwd_params forward = forward_over_cache(params);
  const int64_t rows = params.paged.block_table != nullptr ? 0 : rows_per_sequence(params.k_strides);
  at::Tensor scratch = new_empty(q, {params.b + 1, 2}, at::kLong);  // the random state, which nobody reads; the keys
  forward.dropout.rng_state = scratch.mutable_data_ptr<int64_t>();
  int* const cached_keys = reinterpret_cast<int*>(forward.dropout.rng_state + 2);
  forward.varlen.key_ranges = cached_keys;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  check_launch(run_kvcache_keys(params, static_cast<int>(rows), cached_keys, stream), "kvcache_keys_kernel", q);
  at::Tensor rotated;
  if (params.rotary.cos_ptr != nullptr) {
    rotated = new_empty(q, q.sizes(), q.scalar_type());
    forward.q_ptr = rotated.const_data_ptr();
    forward.q_strides = matrix_strides(rotated);
    check_launch(FP16_SWITCH(q.scalar_type() == at::kHalf,
                             [&] { return run_kvcache_rotate_<kDtype>(params, rotated.mutable_data_ptr(), stream); }),
                 "kvcache_rotate_kernel", q);
  }
  launch_forward(forward, forward_plan, q);
}

inline void run_kvcache(const plan::FwdPlan& forward_plan, const Flash_kvcache_params& params, const at::Tensor& q) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  FP16_SWITCH(q.scalar_type() == at::kHalf, [&] {
    if (params.seqlen_new > 0 && params.h_k > 0) {
      check_launch(run_kvcache_append_<kDtype>(params, stream), "kvcache_append_kernel", q);
    }
    if (q.numel() == 0) return;
    if (forward_plan.family != plan::Family::kDecode) return run_forward_over_cache(forward_plan, params, q);
    check_launch(HEADDIM_SWITCH(params.d, [&] { return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream); }),
                 "flash_fwd_split_kernel", q);
  });
}

inline std::vector<at::Tensor> fwd_kvcache(const at::Tensor& q, const at::Tensor& kcache, const at::Tensor& vcache,
                                           const OptionalTensor& k, const OptionalTensor& v,
                                           const OptionalTensor& seqlens_k, const OptionalTensor& rotary_cos,
                                           const OptionalTensor& rotary_sin, const OptionalTensor& cache_batch_idx,
                                           const OptionalTensor& leftpad_k, const OptionalTensor& block_table,
                                           const OptionalTensor& alibi_slopes, const OptionalTensor& out_,
                                           double softmax_scale, bool is_causal, int64_t window_left,
                                           int64_t window_right, double softcap, bool rotary_interleaved,
                                           int64_t num_splits, const OptionalTensor& plan_, bool batch_invariant) {
  const KvCacheTensors cache{kcache, vcache, k, v, seqlens_k, cache_batch_idx, leftpad_k, block_table};
  checks::query(q, 4, "batch, seqlen, heads, head_dim");
  checks::caches(q, kcache, vcache, block_table.has_value());
  checks::numbers(0.0, softmax_scale, softcap);
  checks::num_splits(num_splits);
  checks::alibi(alibi_slopes, q, q.size(0));
  checks::output(out_, q, q.sizes());
  checks::new_rows(q, kcache, k, v, seqlens_k);
  checks::cache_places(q, kcache, cache_batch_idx, leftpad_k, block_table);
  if (plan_.has_value()) checks::strided("plan", *plan_);
  const Window window = make_window({1.0, is_causal, window_left, window_right, 0.0, std::nullopt, std::nullopt});
  checks::rotary(q, k, rotary_cos, rotary_sin, has_one_position(window));
  check_written(q, cache, rotary_cos, rotary_sin, alibi_slopes, out_, plan_);
  const c10::cuda::CUDAGuard guard(q.device());
  check_device_supported(q);

  Flash_kvcache_params params;
  const int64_t seqlen_new = k.has_value() ? k->size(1) : 0;
  const plan::KvPlan plan =
      set_params_sizes(params,
                       {q.size(0), q.size(1), seqlen_new, q.size(2), kcache.size(2), q.size(3), cache.capacity(),
                        is_causal, window_left, window_right, num_splits, batch_invariant},
                       q.device().index());
  const int64_t schedule_words = plan::kv_schedule_words(plan);
  const int64_t workspace_words = plan::kv_workspace_words(plan, params.d);
  if (plan_.has_value()) checks::plan(*plan_, q.device(), schedule_words + workspace_words);

  at::Tensor out = out_.has_value() ? *out_ : new_empty(q, q.sizes(), q.scalar_type());
  at::Tensor lse = new_empty(q, {q.size(0), q.size(2), q.size(1)}, at::kFloat);
  if (q.numel() == 0) lse.fill_(std::numeric_limits<float>::infinity());
  at::Tensor workspace;
  if (plan_.has_value()) {
    int* const words = plan_->mutable_data_ptr<int>();
    params.schedule = reinterpret_cast<const SchedHeader*>(words);
    set_params_workspace(params, plan, reinterpret_cast<float*>(words + schedule_words));
  } else if (workspace_words > 0) {
    workspace = new_empty(q, {workspace_words}, at::kFloat);
    set_params_workspace(params, plan, workspace.mutable_data_ptr<float>());
  }
  params.q_ptr = q.const_data_ptr();
  params.q_strides = cache_strides(q);
  params.q_vectors = piece_bytes(q) == 16;
  params.o_ptr = out.mutable_data_ptr();
  params.o_strides = cache_strides(out);
  params.o_vectors = piece_bytes(out) == 16;
  params.softmax_lse_ptr = lse.mutable_data_ptr<float>();
  set_params_scores(params, {softmax_scale, is_causal, window_left, window_right, softcap, alibi_slopes, std::nullopt});
  set_params_cache(params, cache);
  set_params_rotary(params, rotary_cos, rotary_sin, rotary_interleaved);
  if (q.size(0) == 0) return {out, lse};
  const bool free_choice = num_splits == 0 && !batch_invariant && q.numel() > 0;
  plan::FwdPlan forward_plan;
  forward_plan.family = plan::Family::kDecode;
  if (free_choice) forward_plan = plan_over_cache(params, q, kcache, vcache, out);
  run_kvcache(forward_plan, params, q);
  return {out, lse};
}

// ---- a forward by the same kernels ----

// Keys that a sequence may have.
inline int split_capacity(const Flash_fwd_params& forward) {
  const PagedKv& paged = forward.paged;
  if (paged.block_table == nullptr) return forward.seqlen_k;
  return static_cast<int>(
      std::min<int64_t>(static_cast<int64_t>(paged.pages_per_sequence) * paged.page_size.divisor, kMaxLength));
}

// A dense batch is a full cache; the line of work of a packed one is laid out by the kernel that makes plans. k, v and
// out are those of `forward`.
inline cudaError_t run_decode_forward(const Flash_fwd_params& forward, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const at::Tensor& out) {
  Flash_kvcache_params params;
  static_cast<Flash_fwd_params&>(params) = forward;
  params.capacity = split_capacity(forward);
  const plan::KvPlan plan = set_params_sizes(
      params,
      {forward.b, forward.seqlen_q, 0, forward.h, forward.h_k, forward.d, params.capacity, false, forward.window.left,
       forward.window.right, 0, false, forward.is_varlen(), fwd_problem(forward, dtype_of(q)).keys()},
      forward.device);
  params.cache_batch = forward.b;
  params.kv_bytes = std::min(piece_bytes(k), piece_bytes(v));
  params.q_vectors = piece_bytes(q) == 16;
  params.o_vectors = piece_bytes(out) == 16;
  const int64_t schedule_words = forward.is_varlen() ? plan::kv_schedule_words(plan) : 0;
  const int64_t workspace_words = params.merges ? plan::kv_workspace_words(plan, params.d) : 0;
  const int64_t all_words = schedule_words + workspace_words + varlen_words(forward);
  at::Tensor workspace;
  if (all_words > 0) {
    workspace = new_empty(q, {all_words}, at::kInt);
    int* const words = workspace.mutable_data_ptr<int>();
    if (workspace_words > 0) set_params_workspace(params, plan, reinterpret_cast<float*>(words + schedule_words));
    if (schedule_words > 0) params.schedule = reinterpret_cast<const SchedHeader*>(words);
    set_params_varlen_workspace(params, words + schedule_words + workspace_words);  // the plan's kernel fills it
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (params.schedule != nullptr) {
    const cudaError_t status = run_kvcache_plan(params, const_cast<SchedHeader*>(params.schedule), stream);
    if (status != cudaSuccess) return status;
  }
  return FP16_SWITCH(q.scalar_type() == at::kHalf, [&] {
    return HEADDIM_SWITCH(params.d, [&] { return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream); });
  });
}

// ---- plan ----

inline at::Tensor kvcache_plan(const at::Tensor& seqlens_k, const OptionalTensor& leftpad_k, int64_t batch,
                               int64_t seqlen_q, int64_t seqlen_new, int64_t heads, int64_t heads_k, int64_t head_dim,
                               int64_t seqlen_cache, bool is_causal, int64_t window_left, int64_t window_right,
                               int64_t num_splits, bool batch_invariant, const OptionalTensor& plan_) {
  checks::strided("cache_seqlens", seqlens_k);
  if (!seqlens_k.is_cuda()) checks::fail("cache_seqlens", "expected a CUDA tensor, got one on ", seqlens_k.device());
  checks::not_negative("batch", batch);
  checks::not_negative("seqlen_q", seqlen_q);
  checks::not_negative("seqlen_new", seqlen_new);
  checks::not_negative("heads", heads);
  checks::not_negative("heads_k", heads_k);
  checks::not_negative("seqlen_cache", seqlen_cache);
  checks::num_splits(num_splits);
  if (head_dim < 1 || head_dim > 256) checks::fail("head_dim", "expected a value from 1 to 256, got ", head_dim);
  if (heads_k == 0 ? heads != 0 : heads % heads_k != 0) {
    checks::fail("heads", "expected a head count divisible by the K/V head count ", heads_k, ", got ", heads);
  }
  checks::lengths("cache_seqlens", seqlens_k, seqlens_k, batch);
  checks::lengths("cache_leftpad", leftpad_k, seqlens_k, batch);
  if (heads_k > 0) checks::at_most("seqlen_q", seqlen_q * (heads / heads_k), "rows for each K/V head");
  if (plan_.has_value()) checks::strided("plan", *plan_);
  overlap::check({{"plan", plan_}}, {{"cache_seqlens", seqlens_k}, {"cache_leftpad", leftpad_k}});
  const c10::cuda::CUDAGuard guard(seqlens_k.device());
  check_device_supported(seqlens_k);

  Flash_kvcache_params params;
  const plan::KvPlan plan = set_params_sizes(
      params,
      {batch, seqlen_q, seqlen_new, heads, heads_k, head_dim, std::min<int64_t>(seqlen_cache, kMaxLength), is_causal,
       window_left, window_right, num_splits, batch_invariant},
      seqlens_k.device().index());
  const int64_t elements = plan::kv_schedule_words(plan) + plan::kv_workspace_words(plan, params.d);
  if (plan_.has_value()) checks::plan(*plan_, seqlens_k.device(), elements);
  at::Tensor result = plan_.has_value() ? *plan_ : new_empty(seqlens_k, {elements}, at::kInt);
  params.seqlens_k = seqlens_k.const_data_ptr<int>();
  params.leftpad_k = int_or_null(leftpad_k);
  SchedHeader* const schedule = reinterpret_cast<SchedHeader*>(result.mutable_data_ptr<int>());
  check_launch(run_kvcache_plan(params, schedule, c10::cuda::getCurrentCUDAStream().stream()), "kvcache_plan_kernel",
               seqlens_k);
  return result;
}

}  // namespace flash
