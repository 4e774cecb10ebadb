// Combines partial results of the caller: attention of the same queries over disjoint sets of keys.
#include <atomic>

#include "kernels/common/convert.h"
#include "kernels/common/launch.h"
#include "params/kvcache.h"

namespace flash {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

struct Row {
  int b, s, h;
};

__device__ Row row_at(const Flash_combine_params& params, int row) {
  const int token = row / params.h;
  return {token / params.s, token % params.s, row % params.h};
}

__device__ bool saw_keys(float lse) { return !isinf(lse); }

// LSE over all splits; all lanes of a warp together. -inf: no split saw a key.
__device__ float total_lse(const float* lse, int64_t stride, int splits) {
  float top = -INFINITY;
  for (int i = threadIdx.x % 32; i < splits; i += 32) {
    if (saw_keys(lse[i * stride])) top = fmaxf(top, lse[i * stride]);
  }
  for (int distance = 16; distance > 0; distance /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, distance));
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < splits; i += 32) {
    if (saw_keys(lse[i * stride])) sum += expf(lse[i * stride] - (top == -INFINITY ? 0.0f : top));
  }
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum == 0.0f ? -INFINITY : top + logf(sum);
}

// One warp to a row.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads, 8) combine_kernel(const __grid_constant__ Flash_combine_params params) {
  const int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (row >= params.b * params.s * params.h) return;
  const Row at = row_at(params, row);
  const int64_t* const in = params.partial_strides;
  const int64_t* const in_lse = params.lse_partial_strides;
  const In* const from = static_cast<const In*>(params.partial_ptr) + at.b * in[1] + at.s * in[2] + at.h * in[3];
  const float* const lse = params.lse_partial_ptr + at.b * in_lse[1] + at.s * in_lse[2] + at.h * in_lse[3];
  Out* const to = static_cast<Out*>(params.o_ptr) + at.b * params.o_strides[0] + at.s * params.o_strides[1] +
                  at.h * params.o_strides[2];
  const float total = total_lse(lse, in_lse[0], params.splits);
  if (threadIdx.x % 32 == 0) params.lse_ptr[row] = total == -INFINITY ? INFINITY : total;
  for (int col = threadIdx.x % 32; col < params.d; col += 32) {
    float sum = 0.0f;
    for (int i = 0; i < params.splits; ++i) {
      const float own = lse[i * in_lse[0]];
      if (saw_keys(own)) sum += expf(own - total) * static_cast<float>(from[i * in[0] + col]);
    }
    to[col] = static_cast<Out>(sum);
  }
}

template <class In, class Out>
cudaError_t run(const Flash_combine_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int rows = params.b * params.s * params.h;
  return launch(combine_kernel<In, Out>, (static_cast<int64_t>(rows) + kWarps - 1) / kWarps, kThreads, 0, params,
                params.device, stream, configured_devices);
}

template <class In>
cudaError_t run_to(const Flash_combine_params& params, CombineType out, cudaStream_t stream) {
  switch (out) {
    case CombineType::kFp32: return run<In, float>(params, stream);
    case CombineType::kFp16: return run<In, ElementOf<Dtype::kFp16>>(params, stream);
    default: return run<In, ElementOf<Dtype::kBf16>>(params, stream);
  }
}

}  // namespace

cudaError_t run_combine(const Flash_combine_params& params, CombineType partial, CombineType out, cudaStream_t stream) {
  switch (partial) {
    case CombineType::kFp32: return run_to<float>(params, out, stream);
    case CombineType::kFp16: return run_to<ElementOf<Dtype::kFp16>>(params, out, stream);
    default: return run_to<ElementOf<Dtype::kBf16>>(params, out, stream);
  }
}

}  // namespace flash
