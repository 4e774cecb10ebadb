// Calls over codes by kernels that read none: the memory and the launches of the passes that dequantise.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include "api/allocate.h"
#include "api/kvcache_params.h"
#include "api/launch_check.h"
#include "params/kvcache.h"

namespace flash {

// Points `forward` to what a pass makes of the keys and values of `params`, which is no longer paged; its key_ranges
// are written where it has any and rows are gathered. rows: of a sequence; 0: packed rows stay where they are. The
// result has to outlive the launches that read it.
inline at::Tensor dequantize_kv(const Flash_kvcache_params& params, int rows, int64_t bytes, const at::Tensor& q,
                                Flash_fwd_params& forward) {
  at::Tensor memory = new_empty(q, {bytes}, at::kByte);
  DequantizedKv to;
  to.k_ptr = memory.mutable_data_ptr();
  to.v_ptr = static_cast<char*>(to.k_ptr) + bytes / 2;
  to.rows_per_sequence = rows;
  to.key_ranges = rows > 0 ? forward.varlen.key_ranges : nullptr;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (params.b > 0) check_launch(run_dequantize_kv(params, to, stream), "dequantize_kv_kernel", q);
  forward.k_ptr = to.k_ptr;
  forward.v_ptr = to.v_ptr;
  forward.k_strides = forward.v_strides = dequantized_strides(params.h_k, params.d, rows);
  forward.paged = PagedKv{};
  return memory;
}

// Queries of codes, into q.
inline void dequantize_query(const Flash_kvcache_params& params, const KvCacheCall& call) {
  QueryCodes codes;
  codes.ptr = call.q_codes->const_data_ptr();
  codes.strides = cache_strides(*call.q_codes);
  codes.vectors = is_aligned(*call.q_codes, 8);
  if (call.descales.q.has_value()) {
    const at::Tensor& descale = *call.descales.q;
    codes.descale = kv_descale(descale, false);
    codes.of_kv_heads = descale.numel() > 1 && descale.size(-1) == params.h_k;
  }
  check_launch(
      run_dequantize_query(params, codes, call.q.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream().stream()),
      "dequantize_query_kernel", call.q);
}

}  // namespace flash
