// Turns cu_seqlens, seqused_k and leftpad_k, whatever values they hold, into segments that cover every row once.
#pragma once

#include "kernels/common/sequence.h"

namespace flash {

constexpr int kPrepareThreads = 1024;  // maximum of the thread block that calls prepare_varlen()

// Inclusive prefix maximum over the threads of a block. warp_max: one value per warp.
__device__ __forceinline__ int block_prefix_max(int value, int* warp_max) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value = max(value, lower);
  }
  if (lane == 31) warp_max[warp] = value;
  __syncthreads();
  for (int i = 0; i < warp; ++i) value = max(value, warp_max[i]);
  __syncthreads();  // warp_max may be overwritten
  return value;
}

// The prefix maximum of cu_seqlens, clamped to [0, total]: a sequence that would begin before the end of an earlier one
// begins at that end, so that no two overlap.
__device__ __forceinline__ void fill_segments(const int* cu_seqlens, int batch, int total, int* segments) {
  __shared__ int warp_max[kPrepareThreads / 32], carry;
  if (threadIdx.x == 0) {
    segments[0] = carry = 0;
    segments[batch + 2] = total;
  }
  __syncthreads();
  const int threads = blockDim.x;
  for (int64_t first = 0; first <= batch; first += threads) {
    const int64_t i = first + threadIdx.x;
    const int begin = i <= batch ? clamp(cu_seqlens[i], 0, total) : 0;
    const int running = max(block_prefix_max(begin, warp_max), carry);
    if (i <= batch) segments[i + 1] = running;
    __syncthreads();  // every thread has read `carry`
    if (threadIdx.x == threads - 1) carry = running;
    __syncthreads();
  }
}

// With seqused_k as length, cu_seqlens_k only says where a sequence begins; a paged sequence begins at row 0 of its
// pages. The length includes the left padding.
__device__ __forceinline__ void fill_key_ranges(const Flash_fwd_params& params) {
  const Varlen& varlen = params.varlen;
  const int64_t table_keys = static_cast<int64_t>(params.paged.pages_per_sequence) * params.paged.page_size.divisor;
  const int page_capacity = static_cast<int>(min(table_keys, int64_t{kMaxLength}));
  for (int64_t i = threadIdx.x; i < params.b; i += blockDim.x) {
    int begin = varlen.segments_k[i + 1], length = varlen.segments_k[i + 2] - begin;
    if (params.is_paged()) begin = 0;
    if (varlen.seqused_k != nullptr) {
      if (!params.is_paged()) begin = clamp(varlen.cu_seqlens_k[i], 0, params.seqlen_k);
      length = max(varlen.seqused_k[i], 0);
    }
    length = min(length, params.is_paged() ? page_capacity : params.seqlen_k - begin);
    const int leftpad = varlen.leftpad_k != nullptr ? clamp(varlen.leftpad_k[i], 0, length) : 0;
    varlen.key_ranges[2 * i] = begin + leftpad;
    varlen.key_ranges[2 * i + 1] = length - leftpad;
  }
}

// Called by all threads of a block of whole warps; on return all of them may read the results.
__device__ __forceinline__ void prepare_varlen(const Flash_fwd_params& params) {
  const Varlen& varlen = params.varlen;
  fill_segments(varlen.cu_seqlens_q, params.b, params.seqlen_q, varlen.segments_q);
  fill_segments(varlen.cu_seqlens_k, params.b, params.is_paged() ? kMaxLength : params.seqlen_k, varlen.segments_k);
  __syncthreads();
  fill_key_ranges(params);
  __syncthreads();
}

}  // namespace flash
