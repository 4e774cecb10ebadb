// Calls over codes by kernels that read none: the memory and the launches of the passes that dequantise.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include "api/allocate.h"
#include "api/kvcache_params.h"
#include "api/launch_check.h"
#include "params/kvcache.h"

namespace flash {

// Whether queries and results are converted: those of bf16, whose products with descales would lose bits. K and V are
// then multiplied by their per-row descales only; queries and results take the others. Of K's descale K takes the power
// of two, as far as it stays exact in fp16: queries times the whole descale could leave the range of fp16.
inline bool converts_queries(const Flash_kvcache_params& params) { return params.q_dtype == Dtype::kBf16; }

// Of queries that a pass writes.
inline MatrixStrides half_query_strides(const Flash_fwd_params& params) {
  const int64_t row = static_cast<int64_t>(params.h) * params.d;
  return {params.is_varlen() ? 0 : params.seqlen_q * row, row, params.d};
}

// Points `forward` to what a pass makes of the keys and values of `params`, which is no longer paged; its key_ranges
// are written where it has any and rows are gathered. rows: of a sequence; 0: packed rows stay where they are. The
// result has to outlive the launches that read it.
inline at::Tensor dequantize_kv(Flash_kvcache_params params, int rows, int64_t bytes, const at::Tensor& q,
                                Flash_fwd_params& forward) {
  at::Tensor memory = new_empty(q, {bytes}, at::kByte);
  DequantizedKv to;
  to.k_ptr = memory.mutable_data_ptr();
  to.v_ptr = static_cast<char*>(to.k_ptr) + bytes / 2;
  to.rows_per_sequence = rows;
  to.key_ranges = rows > 0 ? forward.varlen.key_ranges : nullptr;
  to.multiprocessors = device_facts(params.device).multiprocessors;
  if (converts_queries(params)) {
    to.k_by_power = !params.k_descale.by_row;
    if (!params.v_descale.by_row) params.v_descale = KvDescale{};
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (params.b > 0) check_launch(run_dequantize_kv(params, to, stream), "dequantize_kv_kernel", q);
  forward.k_ptr = to.k_ptr;
  forward.v_ptr = to.v_ptr;
  forward.k_strides = forward.v_strides = dequantized_strides(params.h_k, params.d, rows);
  forward.paged = PagedKv{};
  return memory;
}

// The queries of a call as a pass reads them.
inline RescaledRows query_rows(const Flash_kvcache_params& params) {
  RescaledRows rows;
  rows.from_ptr = params.q_ptr;
  rows.from_strides = params.q_strides;
  rows.from_dtype = params.q_dtype;
  return rows;
}

// The same of queries of codes.
inline RescaledRows query_rows(const Flash_kvcache_params& params, const KvCacheCall& call) {
  if (call.q_codes == nullptr) return query_rows(params);
  RescaledRows rows;
  rows.from_ptr = call.q_codes->const_data_ptr();
  rows.from_strides = cache_strides(*call.q_codes);
  rows.from_dtype = Dtype::kE4m3;
  rows.from_vectors = is_aligned(*call.q_codes, 8);
  if (call.descales.q.has_value()) {
    const at::Tensor& descale = *call.descales.q;
    rows.descales[0] = kv_descale(descale, false);
    rows.of_kv_heads[0] = descale.numel() > 1 && descale.size(-1) == params.h_k;
  }
  return rows;
}

inline void rescale_rows(const Flash_kvcache_params& params, const RescaledRows& rows, const at::Tensor& q) {
  check_launch(run_rescale_rows(params, rows, c10::cuda::getCurrentCUDAStream().stream()), "rescale_rows_kernel", q);
}

// Queries of codes, into q, which params points to.
inline void dequantize_query(const Flash_kvcache_params& params, RescaledRows rows, const at::Tensor& q) {
  rows.to_ptr = q.mutable_data_ptr();
  rows.to_strides = params.q_strides;
  rows.to_dtype = params.q_dtype;
  rescale_rows(params, rows, q);
}

// Points `forward` to queries of fp16, times what K does not take of descales that are none of rows. The result, q if
// it has them, has to outlive the launches that read it.
inline at::Tensor half_query(const Flash_kvcache_params& params, RescaledRows rows, const at::Tensor& q,
                             Flash_fwd_params& forward) {
  if (!converts_queries(params)) return q;
  const at::Tensor half = new_empty(q, q.sizes(), at::kHalf);
  rows.to_ptr = half.mutable_data_ptr();
  rows.to_strides = half_query_strides(params);
  rows.to_dtype = Dtype::kFp16;
  if (!params.k_descale.by_row) rows.descales[1] = params.k_descale;
  rows.without_key_power = true;
  rescale_rows(params, rows, q);
  forward.q_ptr = rows.to_ptr;
  forward.q_strides = rows.to_strides;
  return half;
}

// The results of fp16 queries, which stand where O will, times those descales of V that are none of rows.
inline void rescale_results(const Flash_kvcache_params& params, const at::Tensor& q) {
  if (!converts_queries(params)) return;
  RescaledRows rows;
  rows.from_ptr = rows.to_ptr = params.o_ptr;
  rows.from_strides = rows.to_strides = params.o_strides;
  rows.from_dtype = Dtype::kFp16;
  rows.to_dtype = Dtype::kBf16;
  if (!params.v_descale.by_row) rows.descales[0] = params.v_descale;
  rescale_rows(params, rows, q);
}

}  // namespace flash
