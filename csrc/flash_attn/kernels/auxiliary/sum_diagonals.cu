// The gradient of rel_bias from a dS that the backward has stored: sums over its diagonals in a fixed order. Bound by
// memory: dS is read once.
#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "params/bias.h"

namespace flash {
namespace {

constexpr int kThreads = DiagonalParts::kBlockDiagonals, kWarps = kThreads / 32;  // a diagonal each

__device__ __forceinline__ float sum_warp(float value) {
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffffu, value, apart);
  return value;
}

// The sum of a thread block, for thread 0.
__device__ __forceinline__ float sum_block(float value, float (&shared)[kWarps]) {
  const float of_warp = sum_warp(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = of_warp;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < kWarps; ++i) sum += shared[i];
  return sum;
}

// A thread for each diagonal of kPartRows rows of one head: those within the table's reach are stored by distance,
// those beyond as a sum of the thread block for each end.
template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads) sum_diagonals_kernel(const __grid_constant__ DiagonalSum params) {
  __shared__ float shared[kWarps];
  const DiagonalParts parts = params.parts;
  const int64_t strip = blockIdx.x / parts.blocks;
  const int block = static_cast<int>(blockIdx.x - strip * parts.blocks);
  const int64_t head = strip / parts.parts, part = strip - head * parts.parts;
  const int64_t batch = part / parts.row_parts;
  const int row_begin = static_cast<int>(part - batch * parts.row_parts) * DiagonalParts::kPartRows;
  const int rows = min(DiagonalParts::kPartRows, static_cast<int>(params.rows) - row_begin), cols = params.ds.cols;
  const int first_col = block * kThreads + static_cast<int>(threadIdx.x) - (DiagonalParts::kPartRows - 1);
  const auto* const data = static_cast<const uint16_t*>(params.ds.data) + batch * params.ds.strides.batch +
                           head * params.ds.strides.head + row_begin * params.ds.strides.row + first_col;
  const int64_t step = params.ds.strides.row + 1;
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < rows; ++i) {
    if (first_col + i >= 0 && first_col + i < cols) {
      sum += static_cast<float>(ElementOf<kDtype>::bitcast(__ldg(data + i * step)));
    }
  }
  const int distance = parts.distance(row_begin, first_col), reach = parts.reach;
  const bool is_before = distance <= -reach, is_behind = !is_before && distance >= reach;
  if (!is_before && !is_behind && first_col < cols) {
    params.partial_ptr[parts.near_index(strip, distance)] = sum;
  }
  const float before = sum_block(is_before ? sum : 0.0f, shared), behind = sum_block(is_behind ? sum : 0.0f, shared);
  if (threadIdx.x == 0) {
    params.partial_ptr[parts.end_index(strip, block, 0)] = before;
    params.partial_ptr[parts.end_index(strip, block, 1)] = behind;
  }
}

// A warp for each element of the table.
__global__ void __launch_bounds__(kThreads) sum_parts_kernel(const __grid_constant__ DiagonalSum params) {
  const DiagonalParts parts = params.parts;
  const int64_t result = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32, table_cols = 2 * int64_t{parts.reach} + 1;
  if (result >= params.heads * table_cols) return;
  const int64_t head = result / table_cols;
  const int distance = static_cast<int>(result - head * table_cols) - parts.reach, lane = threadIdx.x % 32;
  float sum = 0.0f;
  for (int end = 0; end < 2; ++end) {
    if (distance != (end == 0 ? -parts.reach : parts.reach)) continue;
    for (int64_t i = lane; i < parts.parts * parts.blocks; i += 32) {
      sum += params.partial_ptr[parts.end_index(head * parts.parts + i / parts.blocks, i % parts.blocks, end)];
    }
  }
  if (distance > -parts.reach && distance < parts.reach) {
    for (int64_t part = lane; part < parts.parts; part += 32) {
      const int row_begin = static_cast<int>(part % parts.row_parts) * DiagonalParts::kPartRows;
      if (!parts.has(row_begin, distance, params.ds.cols)) continue;
      sum += params.partial_ptr[parts.near_index(head * parts.parts + part, distance)];
    }
  }
  sum = sum_warp(sum);
  if (lane == 0) params.out_ptr[result] = sum;
}

template <Dtype kDtype>
cudaError_t run(const DiagonalSum& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const DiagonalParts& parts = params.parts;
  const cudaError_t status = launch(sum_diagonals_kernel<kDtype>, params.heads * parts.parts * parts.blocks, kThreads,
                                    0, params, params.device, stream, configured_devices);
  if (status != cudaSuccess) return status;
  const int64_t warps = params.heads * (2 * int64_t{parts.reach} + 1);
  return launch(sum_parts_kernel, (warps + kWarps - 1) / kWarps, kThreads, 0, params, params.device, stream,
                configured_devices);
}

}  // namespace

cudaError_t run_sum_diagonals(const DiagonalSum& params, cudaStream_t stream) {
  return FP16_SWITCH(params.dtype, [&] { return run<kDtype>(params, stream); });
}

}  // namespace flash
