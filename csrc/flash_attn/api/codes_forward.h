// A forward of dense or packed batches whose K and V are codes, by kernels of fp16 that read none: a pass dequantises
// them ahead, and others convert queries and results of bf16.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "api/dequantize.h"
#include "api/kvcache_params.h"
#include "api/problem.h"
#include "api/run_fwd.h"

namespace flash {

// Rows that the pass has for the keys of a sequence; 0: packed rows keep their places. Of pages at least one: key
// ranges are then written. Block tables may be far wider than sequences: where the decode kernels can serve a call
// whose max_seqlen_k, which p_cols is rounded up from, is too small (run_longer_sequences()), there is room for so
// many.
inline int dequantized_rows(const Flash_fwd_params& params) {
  if (params.is_paged()) return std::max(std::min(split_capacity(params), params.p_cols), 1);
  return params.is_varlen() ? 0 : params.seqlen_k;
}

inline void set_params_gathered(Flash_fwd_params& params, bool may_decode) {
  if (!may_decode) params.p_cols = kMaxLength;
}

// The forward as its kernels see it behind the pass, but for the pointers.
inline Flash_fwd_params over_dequantized(Flash_fwd_params params, bool converts_queries) {
  const int rows = dequantized_rows(params);
  if (converts_queries) params.q_strides = half_query_strides(params);
  params.k_strides = params.v_strides = dequantized_strides(params.h_k, params.d, rows);
  if (!params.is_paged()) return params;
  params.seqlen_k = static_cast<int>(std::min<int64_t>(static_cast<int64_t>(params.b) * rows, kMaxLength));
  params.paged = PagedKv{};
  return params;
}

inline plan::FwdProblem forward_problem(const Flash_fwd_params& params, Dtype dtype, Dtype kv_dtype) {
  if (!is_eight_bit(kv_dtype)) return fwd_problem(params, dtype);
  const bool converts_queries = dtype == Dtype::kBf16;
  plan::FwdProblem problem = fwd_problem(over_dequantized(params, converts_queries), Dtype::kFp16);
  problem.converts_queries = converts_queries;
  problem.kv_dtype = kv_dtype;
  problem.gathers_keys = params.is_paged();
  return problem;
}

// What the pass reads.
inline Flash_kvcache_params set_params_codes(const Flash_fwd_params& forward, const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, const KvDescales& descales) {
  Flash_kvcache_params params;
  static_cast<Flash_fwd_params&>(params) = forward;
  params.group = FastDiv(std::max(forward.h_h_k_ratio, 1));
  params.capacity = forward.seqlen_k;
  params.cache_batch = forward.b;
  params.kv_vector_bytes = std::min(vector_bytes(k), vector_bytes(v));
  params.kv_dtype = dtype_of(k);
  set_params_forward_descales(params, descales, dtype_of(q));
  return params;
}

inline void launch_forward_over_codes(Flash_fwd_params& params, const plan::FwdPlan& plan, const at::Tensor& q,
                                      const at::Tensor& k, const at::Tensor& v, const KvDescales& descales) {
  const int rows = dequantized_rows(params);
  const int64_t bytes = forward_problem(params, dtype_of(q), dtype_of(k)).dequantized_bytes();
  if (params.is_paged()) checks::at_most("block_table", static_cast<int64_t>(params.b) * rows, "keys of all sequences");
  at::Tensor workspace, ranges;
  check_launch(prepare(params, plan.is_dynamic, q, workspace), "prepare_kernel", q);
  const Flash_kvcache_params codes = set_params_codes(params, q, k, v, descales);
  params = over_dequantized(params, codes.q_dtype == Dtype::kBf16);
  if (codes.is_paged()) {
    ranges = new_empty(q, {params.b, 2}, at::kInt);
    params.varlen.key_ranges = ranges.mutable_data_ptr<int>();
  }
  const at::Tensor dequantized = dequantize_kv(codes, rows, bytes, q, params);
  const at::Tensor half = half_query(codes, query_rows(codes), q, params);
  launch_prepared(params, plan, half);
  rescale_results(codes, q);
}

}  // namespace flash
