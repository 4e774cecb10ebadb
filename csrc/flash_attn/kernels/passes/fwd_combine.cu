// Combines the partial results of a wgmma forward that split the keys of its work tiles.
#include <atomic>

#include <cute/arch/copy_sm80.hpp>

#include "kernels/common/convert.h"
#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/common/sequence.h"

namespace flash {
namespace {

constexpr int kThreads = 128;
constexpr int kCols = 4;   // of a thread
constexpr int kBatch = 8;  // splits whose results are loaded at a time

struct Row {
  int batch, head, token;
};

__device__ Row row_at(const Flash_fwd_params& params, int row) {
  const int matrix = row / params.seqlen_q, token = row % params.seqlen_q;
  return params.is_varlen() ? Row{0, matrix, token} : Row{matrix / params.h, matrix % params.h, token};
}

// -inf: none. Rows of no sequence have none.
__device__ float sink_of(const Flash_fwd_params& params, const Row& at) {
  if (params.sinks_ptr == nullptr) return -INFINITY;
  if (params.is_varlen()) {
    const int* const segments = params.varlen.segments_q;
    if (at.token < segments[1] || at.token >= segments[params.b + 1]) return -INFINITY;
  }
  return params.sinks_ptr[at.head];
}

// The splits of a row added up so far, referred to the largest LSE.
struct Combined {
  float top = -INFINITY;
  float sum = 0.0f;
  float4 value{};

  __device__ void raise(float lse) {
    if (lse <= top) return;
    const float correction = expf(top - lse);
    sum *= correction;
    value = {value.x * correction, value.y * correction, value.z * correction, value.w * correction};
    top = lse;
  }

  // lse: at most `top`, or NaN, as is the sum then. -inf adds nothing, whatever `other` is.
  __device__ void add(float lse, const float4& other) {
    const bool counts = lse != -INFINITY;
    const float weight = counts ? expf(lse - top) : 0.0f;
    sum += weight;
    value.x = fmaf(weight, counts ? other.x : 0.0f, value.x);
    value.y = fmaf(weight, counts ? other.y : 0.0f, value.y);
    value.z = fmaf(weight, counts ? other.z : 0.0f, value.z);
    value.w = fmaf(weight, counts ? other.w : 0.0f, value.w);
  }

  __device__ float factor() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
  __device__ float lse() const { return sum == 0.0f ? INFINITY : top + logf(sum); }
};

// A thread has kCols columns of a row, of which a thread block has as many as fit it.
template <class Element>
__global__ void __launch_bounds__(kThreads) fwd_combine_kernel(const __grid_constant__ Flash_fwd_split_params params) {
  // A thread's own: by way of shared memory all loads of a batch are under way at the same time, whatever ptxas makes
  // of loads into registers.
  __shared__ float4 values[kBatch][kThreads];
  const KvSplits& splits = params.splits;
  const int threads_of_row = params.d_v / kCols, rows_of_block = blockDim.x / threads_of_row;
  const int row_of_block = threadIdx.x / threads_of_row;
  const int col = (threadIdx.x - row_of_block * threads_of_row) * kCols;
  const int row = static_cast<int>(blockIdx.x) * rows_of_block + row_of_block;
  const bool exists = row < splits.rows;
  const Row at = row_at(params, exists ? row : 0);
  const float sink = sink_of(params, at);
  wait_for_previous_kernel();
  if (!exists) return;
  Combined combined;
  const float* lse_at = splits.lse_ptr + row;
  const float4* value_at =
      reinterpret_cast<const float4*>(splits.out_ptr + static_cast<int64_t>(row) * params.d_v + col);
  const int64_t step = splits.rows, value_step = step * threads_of_row;
  for (int left = splits.count; left > 0; left -= kBatch) {
    float lse[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (i < left) cute::SM80_CP_ASYNC_CACHEGLOBAL<float4>::copy(*value_at, values[i][threadIdx.x]);
      lse[i] = i < left ? *lse_at : INFINITY;
      lse_at += step;
      value_at += value_step;
    }
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (lse[i] == INFINITY) lse[i] = -INFINITY;  // no key
      top = fmaxf(top, lse[i]);
    }
    combined.raise(top);
    cute::cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) combined.add(lse[i], values[i][threadIdx.x]);
  }
  if (sink != -INFINITY) {
    combined.raise(sink);
    combined.add(sink, float4{});
  }
  const float factor = combined.factor();
  Element* const out = static_cast<Element*>(params.o_ptr) +
                       matrix_offset(params.o_strides, params.is_varlen(), at.batch, at.token, at.head) + col;
  *reinterpret_cast<uint2*>(out) = {pack_pair(combined.value.x * factor, combined.value.y * factor, Element{}),
                                    pack_pair(combined.value.z * factor, combined.value.w * factor, Element{})};
  if (col == 0) params.softmax_lse_ptr[row] = combined.lse();
}

template <class Element>
cudaError_t run(const Flash_fwd_split_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int threads_of_row = params.d_v / kCols, rows_of_block = kThreads / threads_of_row;
  const int64_t blocks = (params.splits.rows + rows_of_block - 1) / rows_of_block;
  return launch_dependent(fwd_combine_kernel<Element>, blocks, rows_of_block * threads_of_row, 0, params, params.device,
                          stream, configured_devices);
}

}  // namespace

template <>
cudaError_t run_fwd_combine_<Dtype::kFp16>(const Flash_fwd_split_params& params, cudaStream_t stream) {
  return run<ElementOf<Dtype::kFp16>>(params, stream);
}

template <>
cudaError_t run_fwd_combine_<Dtype::kBf16>(const Flash_fwd_split_params& params, cudaStream_t stream) {
  return run<ElementOf<Dtype::kBf16>>(params, stream);
}

}  // namespace flash
