// softmax_d = rowsum(dO * O) - dlse, which the backward subtracts from dP. rowsum(dO * O) is the gradient through the
// softmax normalisation (Dao et al. 2022, appendix B.2). A gradient dlse of the LSE adds dlse * P to dS, because dLSE /
// dS = P. A sink is a key without a value: its dP is 0, and its gradient is the sum of P (0 - softmax_d) over the rows.
// O of fully masked rows is constant: their dO is not read. Bound by reading dO and O once, and by clearing the fp32
// dQ.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>

#include "core/static_switch.h"
#include "core/visible_range.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/common/seen_bits.h"
#include "kernels/common/sequence.h"
#include "params/flash.h"
#include "plan/tiles.h"

namespace flash {
namespace {

constexpr int kRows = 128;  // per thread block
static_assert(kRows == plan::kSoftmaxDGap, "the last block of a dense head covers its padding rows");
constexpr int kThreads = 256;
constexpr int kVectorCols = 8;  // elements of one 16-byte load

__device__ float2 to_floats(__half2 pair) { return __half22float2(pair); }
__device__ float2 to_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

template <class Pair>
__device__ float dot(const uint4& a, const uint4& b) {
  const Pair* x = reinterpret_cast<const Pair*>(&a);
  const Pair* y = reinterpret_cast<const Pair*>(&b);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectorCols / 2; ++i) {
    const float2 u = to_floats(x[i]), v = to_floats(y[i]);
    sum += u.x * v.x + u.y * v.y;
  }
  return sum;
}

// Subtracts a row's dlse from its softmax_d; returns the row's contribution to the gradient of the sink. The infinite
// LSE of a fully masked row is constant.
__device__ float apply_lse(const Flash_bwd_params& params, int64_t row, float sink, float& softmax_d) {
  if (params.dlse_ptr == nullptr && params.dsinks_ptr == nullptr) return 0.0f;
  const float lse = params.softmax_lse_ptr[row];
  if (isinf(lse)) return 0.0f;
  if (params.dlse_ptr != nullptr) softmax_d -= params.dlse_ptr[row];
  return -expf(sink - lse) * softmax_d;
}

// Whether a row's O depends on Q. A call that keeps dQ adds to that of other keys, which it does not know: the LSE
// tells.
__device__ bool has_keys(const Flash_bwd_params& params, const WorkTile&, int64_t lse_row, int row, int first_row) {
  return params.keeps_dq ? !isinf(params.softmax_lse_ptr[lse_row + row]) : row >= first_row;
}

// The same under a mask as data.
__device__ bool has_keys(const Flash_bwd_mask_params& params, const WorkTile& tile, int64_t, int row, int) {
  return is_seen(seen_rows(params, params.mask, tile.batch, tile.head, tile.q_begin, tile.segment), row);
}

// Clears this thread block's part of the fp32 dQ and of the semaphores.
__device__ void clear_workspace(const Flash_bwd_params& params, int cta) {
  const int64_t count = params.workspace_vectors, length = (count + gridDim.x - 1) / gridDim.x;
  const int64_t begin = length * cta, end = min(begin + length, count);
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) params.workspace_ptr[i] = float4{};
}

// The sum over the thread block, in a fixed order, valid in thread 0.
__device__ float block_sum(float value) {
  __shared__ float warp_sums[kThreads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0.0f;
  for (const float part : warp_sums) sum += part;
  return sum;
}

// Padding rows of a dense softmax_d are set to 0 here, so that it needs no fill; those of a packed one stay
// uninitialised.
template <class Pair, class Params>
__global__ void __launch_bounds__(kThreads) softmax_d_kernel(const __grid_constant__ Params params) {
  const int index = reversed_block();
  clear_workspace(params, index);
  wait_for_previous_kernel();
  const WorkTile tile = work_tile_at(params, kRows, index);
  if (tile.empty()) return;
  const bool is_varlen = params.is_varlen();
  if (!in_sequence(params, tile)) return;
  static_assert(plan::kMaxHeadDim <= 32 * kVectorCols, "the lanes of a row are of one warp");
  int lanes = 4;  // per row: a power of two
  while (lanes * kVectorCols < params.d_v) lanes *= 2;
  const int lane = threadIdx.x % lanes, col = lane * kVectorCols;
  auto row_of = [&](const void* data, const MatrixStrides& strides, int row) {
    return static_cast<const uint16_t*>(data) +
           matrix_offset(strides, is_varlen, tile.batch, tile.q_begin + row, tile.head) + col;
  };
  const int first_row = first_visible_row(Visibility{tile.seqlen_q, tile.seqlen_k, params.window});
  const int64_t lse_row = lse_offset(tile, params);
  const float sink = row_sink(params, tile);
  float dsink = 0.0f;
  float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, tile.head, tile.q_begin);
  for (int offset = 0; offset < kRows; offset += kThreads / lanes) {
    const int row = tile.row_begin + offset + threadIdx.x / lanes;
    float sum = 0.0f;
    if (row < tile.row_end && col < params.d_v && has_keys(params, tile, lse_row, row, first_row)) {
      sum = dot<Pair>(*reinterpret_cast<const uint4*>(row_of(params.do_ptr, params.do_strides, row)),
                      *reinterpret_cast<const uint4*>(row_of(params.o_ptr, params.o_strides, row)));
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (lane == 0 && row < tile.row_end) dsink += apply_lse(params, lse_row + row, sink, sum);
    if (lane == 0 && (row < tile.row_end || !is_varlen)) delta[row] = sum;
  }
  if (params.dsinks_ptr == nullptr) return;
  dsink = block_sum(dsink);
  if (threadIdx.x == 0) params.dsinks_ptr[index] = dsink;
}

template <class Pair, class Params>
cudaError_t run(const Params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t blocks = params.h * plan::m_blocks(params.is_varlen(), params.b, params.seqlen_q, kRows);
  if (params.is_varlen()) {  // run_prepare() is the preceding launch
    return launch_dependent(softmax_d_kernel<Pair, Params>, blocks, kThreads, 0, params, params.device, stream,
                            configured_devices);
  }
  return launch(softmax_d_kernel<Pair, Params>, blocks, kThreads, 0, params, params.device, stream, configured_devices);
}

}  // namespace

cudaError_t run_softmax_d(const Flash_bwd_params& params, Dtype dtype, cudaStream_t stream) {
  return FP16_SWITCH(dtype, [&] { return run<NativePairOf<kDtype>>(params, stream); });
}

cudaError_t run_softmax_d(const Flash_bwd_mask_params& params, Dtype dtype, cudaStream_t stream) {
  if (!params.mask.factors.given()) return run_softmax_d(static_cast<const Flash_bwd_params&>(params), dtype, stream);
  return FP16_SWITCH(dtype, [&] { return run<NativePairOf<kDtype>>(params, stream); });
}

}  // namespace flash
