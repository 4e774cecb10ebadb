// Merges the results of the shares of keys into which the wgmma forward cut its row blocks.
#include <atomic>

#include "common/convert.h"
#include "common/launch.h"
#include "common/pdl.h"
#include "common/sequence.h"

namespace flash {
namespace {

constexpr int kThreads = 128;
constexpr int kCols = 4;   // of a thread
constexpr int kBatch = 8;  // shares whose results are loaded at a time

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
    const int* const starts = params.varlen.cu_seqlens_q;
    const int begin = segment_begin(starts, params.b, params.seqlen_q, 1);
    const int end = segment_begin(starts, params.b, params.seqlen_q, params.b + 1);
    if (at.token < begin || at.token >= end) return -INFINITY;
  }
  return params.sinks_ptr[at.head];
}

__device__ bool saw_keys(float lse) { return lse != INFINITY; }

// The normalised results of a row's shares so far, referred to the largest LSE.
struct Merged {
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

  __device__ void add(float lse, const float4& other) {
    const float weight = expf(lse - top);
    sum += weight;
    value = {value.x + weight * other.x, value.y + weight * other.y, value.z + weight * other.z,
             value.w + weight * other.w};
  }

  __device__ float factor() const { return sum == 0.0f ? 0.0f : 1.0f / sum; }
  __device__ float lse() const { return sum == 0.0f ? INFINITY : top + logf(sum); }
};

// A thread has kCols columns of a row, of which a thread block has as many as fit it.
template <class Element>
__global__ void __launch_bounds__(kThreads) fwd_merge_kernel(const __grid_constant__ Flash_fwd_shares_params params) {
  const KeyShares& shares = params.shares;
  const int threads_of_row = params.d_v / kCols, rows_of_block = blockDim.x / threads_of_row;
  const int row_of_block = threadIdx.x / threads_of_row;
  const int col = (threadIdx.x - row_of_block * threads_of_row) * kCols;
  const int row = static_cast<int>(blockIdx.x) * rows_of_block + row_of_block;
  const bool exists = row < shares.rows;
  const Row at = row_at(params, exists ? row : 0);
  const float sink = sink_of(params, at);
  wait_for_previous_kernel();
  if (!exists) return;
  Merged merged;
  for (int first = 0; first < shares.count; first += kBatch) {
    float lse[kBatch];
    float4 values[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool is_share = first + i < shares.count;
      const int64_t place = (is_share ? first + i : first) * shares.rows + row;
      lse[i] = is_share ? shares.lse_ptr[place] : INFINITY;
      values[i] = *reinterpret_cast<const float4*>(shares.out_ptr + place * params.d_v + col);
    }
    float top = -INFINITY;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) top = saw_keys(lse[i]) ? fmaxf(top, lse[i]) : top;
    merged.raise(top);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (saw_keys(lse[i])) merged.add(lse[i], values[i]);
    }
  }
  if (sink != -INFINITY) {
    merged.raise(sink);
    merged.add(sink, float4{});
  }
  const float factor = merged.factor();
  Element* const out = static_cast<Element*>(params.o_ptr) +
                       matrix_offset(params.o_strides, params.is_varlen(), at.batch, at.token, at.head) + col;
  *reinterpret_cast<uint2*>(out) = {pack_pair(merged.value.x * factor, merged.value.y * factor, Element{}),
                                    pack_pair(merged.value.z * factor, merged.value.w * factor, Element{})};
  if (col == 0) params.softmax_lse_ptr[row] = merged.lse();
}

template <class Element>
cudaError_t run(const Flash_fwd_shares_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int threads_of_row = params.d_v / kCols, rows_of_block = kThreads / threads_of_row;
  const int64_t blocks = (params.shares.rows + rows_of_block - 1) / rows_of_block;
  return launch_dependent(fwd_merge_kernel<Element>, blocks, rows_of_block * threads_of_row, 0, params, params.device,
                          stream, configured_devices);
}

}  // namespace

template <>
cudaError_t run_fwd_merge_<Dtype::kFp16>(const Flash_fwd_shares_params& params, cudaStream_t stream) {
  return run<ElementOf<Dtype::kFp16>>(params, stream);
}

template <>
cudaError_t run_fwd_merge_<Dtype::kBf16>(const Flash_fwd_shares_params& params, cudaStream_t stream) {
  return run<ElementOf<Dtype::kBf16>>(params, stream);
}

}  // namespace flash
