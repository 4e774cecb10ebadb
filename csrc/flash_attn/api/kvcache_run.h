// The launches of a call over a KV cache, as its plan says: append, then attention.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include "api/allocate.h"
#include "api/dequantize.h"
#include "api/kvcache_params.h"
#include "api/launch_check.h"
#include "api/run_fwd.h"
#include "core/static_switch.h"
#include "params/kvcache.h"
#include "plan/decode_plan.h"

namespace flash {

// Many query rows: by the forward's kernels, with the cache as packed sequences or pages. queries: as a pass reads
// them.
inline void run_forward_over_cache(const plan::DecodePlan& plan, const Flash_kvcache_params& params,
                                   RescaledRows queries, const at::Tensor& q) {
  Flash_fwd_params forward = params;
  forward.seqlen_k = params.capacity;
  at::Tensor scratch = new_empty(q, {params.b + 1, 2}, at::kLong);  // rng_state, unused; cached_keys
  forward.dropout.rng_state = scratch.mutable_data_ptr<int64_t>();
  int* const cached_keys = reinterpret_cast<int*>(forward.dropout.rng_state + 2);
  forward.varlen.key_ranges = cached_keys;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  at::Tensor rotated, dequantized;
  if (plan.dequantized_bytes > 0) {
    dequantized = dequantize_kv(params, params.capacity, plan.dequantized_bytes, q, forward);
  } else {
    const int64_t rows = params.paged.block_table != nullptr ? 0 : rows_per_sequence(params.k_strides);
    check_launch(run_kvcache_keys(params, static_cast<int>(rows), cached_keys, stream), "kvcache_keys_kernel", q);
  }
  if (plan.rotates) {
    rotated = new_empty(q, q.sizes(), q.scalar_type());
    forward.q_ptr = rotated.const_data_ptr();
    forward.q_strides = matrix_strides(rotated);
    queries.from_ptr = forward.q_ptr;
    queries.from_strides = forward.q_strides;
    check_launch(run_kvcache_rotate(params, dtype_of(q), rotated.mutable_data_ptr(), stream), "kvcache_rotate_kernel",
                 q);
  }
  const bool is_over_codes = plan.dequantized_bytes > 0;
  const at::Tensor half = is_over_codes ? half_query(params, queries, q, forward) : q;
  launch_forward(forward, plan.forward, half);
  if (is_over_codes) rescale_results(params, q);
  if (params.sinks_ptr != nullptr) check_launch(run_kvcache_lse(params, stream), "kvcache_lse_kernel", q);
}

inline cudaError_t run_mha_fwd_split(const Flash_kvcache_params& params, const at::Tensor& q, cudaStream_t stream) {
  if (is_eight_bit(params.kv_dtype)) {
    return E4M3_SWITCH(params.kv_dtype, [&] {
      return HEADDIM_8BIT_SWITCH(params.d, [&] { return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream); });
    });
  }
  return FP16_SWITCH(dtype_of(q), [&] {
    return HEADDIM_SWITCH(params.d, [&] { return run_mha_fwd_split_<kDtype, kHeadDim>(params, stream); });
  });
}

inline void run_kvcache(const plan::DecodePlan& plan, const Flash_kvcache_params& params, const RescaledRows& queries,
                        const at::Tensor& q) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  if (plan.appends) {
    const bool quantizes = is_eight_bit(params.kv_dtype);
    check_launch(
        quantizes ? run_kvcache_append_quantized(params, stream) : run_kvcache_append(params, dtype_of(q), stream),
        quantizes ? "kvcache_quantize_kernel" : "kvcache_append_kernel", q);
  }
  switch (plan.kernel) {
    case plan::DecodeKernel::kNone: return;
    case plan::DecodeKernel::kForward: return run_forward_over_cache(plan, params, queries, q);
    case plan::DecodeKernel::kSplitKv:
      check_launch(run_mha_fwd_split(params, q, stream), "flash_fwd_split_kernel", q, params.kv_dtype);
  }
}

}  // namespace flash
