// Combines normalised partial results over disjoint splits of the keys: a forward's splits, or results of the caller.
// Bound by reading them once: (splits + 1) rows (d values + LSE). A thread has a 16-byte vector of a row and keeps the
// loads of eight splits in flight.
#include <atomic>
#include <type_traits>

#include <cute/arch/copy_sm80.hpp>

#include "core/static_switch.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/common/partial.h"
#include "kernels/common/pdl.h"
#include "params/combine.h"

namespace flash {
namespace {

constexpr int kThreads = 128;
constexpr int kBatch = 8;  // splits that are loaded at a time

template <class In>
constexpr int kVectorCols = kCombineVectorBytes / sizeof(In);

template <class In>
using Combined = CombinedRow<kVectorCols<In> / 4>;

struct Row {
  int outer, middle, inner;

  __device__ Row(const Flash_combine_params& params, int row)
      : outer(row / params.inner / params.middle),
        middle(row / params.inner % params.middle),
        inner(row % params.inner) {}

  __device__ int64_t offset(const int64_t* strides) const {
    return outer * strides[0] + middle * strides[1] + inner * strides[2];
  }
};

// The rows of a thread block: as many as fit, or a part of one row.
struct Tiling {
  int row_threads, rows, col_blocks;

  __host__ __device__ Tiling(int d, int cols)
      : row_threads((d + cols - 1) / cols), rows(1), col_blocks((row_threads + kThreads - 1) / kThreads) {
    if (col_blocks == 0) row_threads = col_blocks = 1;  // the LSE of rows without columns
    if (col_blocks > 1) row_threads = kThreads;
    rows = kThreads / row_threads;
  }
};

// -inf: no sink. Rows outside all sequences have none.
__device__ float sink_of(const Flash_combine_params& params, const Row& at) {
  if (params.sinks_ptr == nullptr) return -INFINITY;
  const int* const segments = params.segments_q;
  if (segments != nullptr && (at.inner < segments[1] || at.inner >= segments[params.segments + 1])) return -INFINITY;
  return params.sinks_ptr[at.middle];
}

// Copies vectors of up to kBatch splits to shared memory, of which a thread reads only its own: all copies are in
// flight at the same time, which ptxas does not ensure for loads into registers. If the vector is not whole: its first
// `cols` elements.
template <class In>
__device__ void load_vectors(const Flash_combine_params& params, const In* from, int count, int cols,
                             uint4 (&vectors)[kBatch][kThreads]) {
  const int64_t stride = params.partial_strides[0];
  if (params.partial_vectors) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint4& vector = *reinterpret_cast<const uint4*>(from + i * stride);
      if (i < count) cute::SM80_CP_ASYNC_CACHEGLOBAL<uint4>::copy(vector, vectors[i][threadIdx.x]);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < min(count, kBatch); ++i) {
    In* const elements = reinterpret_cast<In*>(&vectors[i][threadIdx.x]);
#pragma unroll
    for (int col = 0; col < kVectorCols<In>; ++col) {
      if (col < cols) elements[col] = from[i * stride + col];
    }
  }
}

template <class In>
__device__ RowValue<kVectorCols<In> / 4> row_value(const uint4& vector) {
  const In* const elements = reinterpret_cast<const In*>(&vector);
  RowValue<kVectorCols<In> / 4> value;
#pragma unroll
  for (int i = 0; i < kVectorCols<In> / 4; ++i) {
    const In* const quad = elements + 4 * i;
    value.quads[i] = {static_cast<float>(quad[0]), static_cast<float>(quad[1]), static_cast<float>(quad[2]),
                      static_cast<float>(quad[3])};
  }
  return value;
}

// A vector of a row, and the row's LSE, from its splits. is_invalid: params.inf_is_invalid, and a split has +inf.
template <class In>
__device__ Combined<In> combine_splits(const Flash_combine_params& params, const In* partial, const float* lse_partial,
                                       int cols, bool& is_invalid) {
  __shared__ uint4 vectors[kBatch][kThreads];
  const int64_t stride = params.partial_strides[0], lse_stride = params.lse_partial_strides[0];
  Combined<In> combined;
  for (int left = params.splits; left > 0; left -= kBatch) {
    float lse[kBatch], top = -INFINITY;
    load_vectors(params, partial, left, cols, vectors);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) lse[i] = i < left ? lse_partial[i * lse_stride] : -INFINITY;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      is_invalid |= params.inf_is_invalid && lse[i] == INFINITY;
      lse[i] = partial_lse(lse[i]);
      top = fmaxf(top, lse[i]);
    }
    combined.update_max(top);
    cute::cp_async_wait<0>();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) combined.add(lse[i], row_value<In>(vectors[i][threadIdx.x]));
    partial += kBatch * stride;
    lse_partial += kBatch * lse_stride;
  }
  return combined;
}

__device__ float4 converted(const float4& quad, float) { return quad; }

template <class Out>
__device__ uint2 converted(const float4& quad, Out element) {
  return {pack_pair(quad.x, quad.y, element), pack_pair(quad.z, quad.w, element)};
}

// `offset`: of the vector in o.
template <class Out, int kQuads>
__device__ void store_vector(const Flash_combine_params& params, int64_t offset, int cols,
                             const RowValue<kQuads>& value) {
  using Quad = decltype(converted(float4{}, Out{}));
  using Vector = std::conditional_t<kQuads * sizeof(Quad) == 8, uint2, uint4>;
  Out* const to = static_cast<Out*>(params.o_ptr) + offset;
  alignas(16) Quad quads[kQuads];
#pragma unroll
  for (int i = 0; i < kQuads; ++i) quads[i] = converted(value.quads[i], Out{});
  if (params.o_vectors) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(quads) / sizeof(Vector)); ++i) {
      reinterpret_cast<Vector*>(to)[i] = reinterpret_cast<const Vector*>(quads)[i];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4 * kQuads; ++i) {
    if (i < cols) to[i] = reinterpret_cast<const Out*>(quads)[i];
  }
}

template <class In>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ Flash_combine_params params) {
  const Tiling tiling(params.d, kVectorCols<In>);
  const int row_block = static_cast<int>(blockIdx.x) / tiling.col_blocks;
  const int col_block = static_cast<int>(blockIdx.x) - row_block * tiling.col_blocks;
  const int row_of_block = static_cast<int>(threadIdx.x) / tiling.row_threads;
  const int thread = static_cast<int>(threadIdx.x) - row_of_block * tiling.row_threads;
  const int row = row_block * tiling.rows + row_of_block, col = (col_block * kThreads + thread) * kVectorCols<In>;
  const bool exists = row < params.outer * params.middle * params.inner && (col == 0 || col < params.d);
  const Row at(params, exists ? row : 0);
  // Sinks and segments are read before the wait: the forward waited for the kernels that wrote them before it triggered
  // this launch (flash_fwd_kernel() of splits).
  const float sink = sink_of(params, at);
  const In* const partial = static_cast<const In*>(params.partial_ptr) + at.offset(params.partial_strides + 1) + col;
  const float* const lse_partial = params.lse_partial_ptr + at.offset(params.lse_partial_strides + 1);
  const int64_t o_offset = at.offset(params.o_strides) + col;
  const int cols = params.d - col;
  wait_for_previous_kernel();
  if (!exists) return;
  bool is_invalid = false;
  Combined<In> combined = combine_splits(params, partial, lse_partial, cols, is_invalid);
  if (is_invalid) {
    combined = Combined<In>();
  } else {
    combined.add_sink(sink);
  }
  if (col == 0) params.lse_ptr[row] = combined.lse();
  combined.normalize();
  switch (params.o_type) {
    case CombineType::kFp32: return store_vector<float>(params, o_offset, cols, combined.value);
    case combine_type(Dtype::kFp16):
      return store_vector<ElementOf<Dtype::kFp16>>(params, o_offset, cols, combined.value);
    case combine_type(Dtype::kBf16):
      return store_vector<ElementOf<Dtype::kBf16>>(params, o_offset, cols, combined.value);
  }
}

template <class In>
cudaError_t run(const Flash_combine_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const Tiling tiling(params.d, kVectorCols<In>);
  const int64_t rows = static_cast<int64_t>(params.outer) * params.middle * params.inner;
  const int64_t blocks = (rows + tiling.rows - 1) / tiling.rows * tiling.col_blocks;
  return launch_dependent(combine_kernel<In>, blocks, tiling.rows * tiling.row_threads, 0, params, params.device,
                          stream, configured_devices);
}

}  // namespace

cudaError_t run_combine(const Flash_combine_params& params, CombineType partial_type, cudaStream_t stream) {
  if (partial_type == CombineType::kFp32) return run<float>(params, stream);
  return FP16_SWITCH(dtype_of(partial_type), [&] { return run<ElementOf<kDtype>>(params, stream); });
}

}  // namespace flash
