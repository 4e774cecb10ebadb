// The gradient of attn_bias from a dS that the backward has stored: sums over batches and heads in a fixed order. Bound
// by memory: visible scores are read once.
#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/common/score_bias.h"
#include "params/bias.h"

namespace flash {
namespace {

constexpr int kThreads = 256, kVectorCols = 8, kLoads = 4;  // at a time

// Vectors of kCount matrices, `step` apart. All loads are on their way at once.
template <class Element, int kCount>
__device__ __forceinline__ void add_matrices(float (&sums)[kVectorCols], const uint4* at, int64_t step) {
  uint4 loaded[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) loaded[i] = __ldcs(at + i * step);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t words[] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
    for (int j = 0; j < kVectorCols / 2; ++j) {
      const float2 pair = unpack_pair<Element>(words[j]);
      sums[2 * j] += pair.x;
      sums[2 * j + 1] += pair.y;
    }
  }
}

// kVectorCols numbers, or those of them before `cols`, where rows are no whole vectors.
template <class Number>
__device__ __forceinline__ void store(Number* out, const float (&sums)[kVectorCols], int cols, bool whole_vectors) {
  alignas(16) Number values[kVectorCols];
#pragma unroll
  for (int i = 0; i < kVectorCols; ++i) values[i] = static_cast<Number>(sums[i]);
  if (whole_vectors) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(uint4)); ++i) {
      reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(values)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorCols; ++i) {
      if (i < cols) out[i] = values[i];
    }
  }
}

// A thread for each 16-byte vector of the sums. Vectors of dS that the window hides may not have been written.
template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads) sum_scores_kernel(const __grid_constant__ ScoreSum params) {
  using Element = ElementOf<kDtype>;
  const int64_t matrix = blockIdx.x / params.blocks;
  const int64_t vector = (blockIdx.x - matrix * params.blocks) * kThreads + threadIdx.x;
  if (vector >= params.matrix_vectors()) return;
  const int64_t row = vector / params.row_vectors;
  const int col = static_cast<int>(vector - row * params.row_vectors) * kVectorCols;
  const int begin = max(params.visibility.key_begin(static_cast<int>(row)), col);
  const int end = min(params.visibility.key_end(static_cast<int>(row)), col + kVectorCols);
  float sums[kVectorCols] = {};
  if (begin < end) {
    const uint4* at =
        static_cast<const uint4*>(params.data) + matrix * params.first_step * params.matrix_vectors() + vector;
    const int64_t step = params.step * params.matrix_vectors();
    int left = params.count;
    for (; left >= kLoads; left -= kLoads, at += kLoads * step) add_matrices<Element, kLoads>(sums, at, step);
    for (; left > 0; --left, at += step) add_matrices<Element, 1>(sums, at, step);
  }
  const int64_t offset = (matrix * params.rows() + row) * params.cols + col;
  const int cols = params.cols - col;
  const bool whole_vectors = params.cols % kVectorCols == 0;
  if (params.out_is_float) {
    store(static_cast<float*>(params.out_ptr) + offset, sums, cols, whole_vectors);
  } else {
    store(static_cast<Element*>(params.out_ptr) + offset, sums, cols, whole_vectors);
  }
}

// A thread block for each row: 0 in the vectors of dS that the window hides.
__global__ void __launch_bounds__(kThreads) clear_hidden_kernel(const __grid_constant__ ScoreSum params) {
  const int row = static_cast<int>(blockIdx.x % params.rows());
  const int words = params.out_is_float ? 2 : 1;  // of 16 bytes in a vector
  const int begin = params.visibility.key_begin(row), end = params.visibility.key_end(row);
  uint4* const out = static_cast<uint4*>(params.out_ptr) + blockIdx.x * params.row_vectors * words;
  const int count = static_cast<int>(params.row_vectors) * words;
  const int first = begin < end ? begin / kVectorCols * words : count;  // visible words
  const int last = begin < end ? (end + kVectorCols - 1) / kVectorCols * words : count;
  for (int i = threadIdx.x; i < first; i += kThreads) out[i] = uint4{};
  for (int i = last + static_cast<int>(threadIdx.x); i < count; i += kThreads) out[i] = uint4{};
}

}  // namespace

cudaError_t run_sum_scores(const ScoreSum& given, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  ScoreSum params = given;
  if (params.in_place()) {
    return launch(clear_hidden_kernel, params.matrices * params.rows(), kThreads, 0, params, params.device, stream,
                  configured_devices);
  }
  params.blocks = (params.matrix_vectors() + kThreads - 1) / kThreads;
  return FP16_SWITCH(params.dtype, [&] {
    return launch(sum_scores_kernel<kDtype>, params.matrices * params.blocks, kThreads, 0, params, params.device,
                  stream, configured_devices);
  });
}

}  // namespace flash
