// softmax_d = rowsum(dO * O) - dlse, which the backward subtracts from dP. rowsum(dO * O) is the gradient through the
// softmax normalisation (Dao et al. 2022, appendix B.2). A gradient dlse of the LSE adds dlse * P to dS, because dLSE /
// dS = P. A sink is a key without a value: its dP is 0, and its gradient is the sum of P (0 - softmax_d) over the rows.
// O of fully masked rows is constant: their dO is not read. Bound by reading dO and O once, and by clearing the fp32
// dQ.
#include <atomic>
#include <type_traits>

#include "core/static_switch.h"
#include "core/visible_range.h"
#include "kernels/common/dot.h"
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
// Threads of a thread block: few in large calls, so that several blocks fill a multiprocessor; in calls of one wave as
// many as take all rows at once, since nothing else hides the latency of a row.
constexpr int kLeastThreads = 256, kMostThreads = 1024;
constexpr int kThreadsAtATime = 132 * kMostThreads;  // on most Hopper GPUs
// Registers for as many threads as a multiprocessor holds: 2048, or 1536.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000)
constexpr int kLargestBlocksPerSm = 2;
#else
constexpr int kLargestBlocksPerSm = 1;
#endif
// A mask takes more registers: the addresses of its seen bits.
template <class Params>
constexpr bool kHasMask = std::is_same_v<Params, Flash_bwd_mask_params>;
constexpr int kVectorCols = 8;  // elements of one 16-byte load

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
__device__ bool has_keys(const Flash_bwd_params& params, int64_t lse_row, int row, int first_row) {
  return params.keeps_dq ? !isinf(params.softmax_lse_ptr[lse_row + row]) : row >= first_row;
}

// Under a mask as data its bit tells.
template <class Params>
__device__ const uint32_t* seen_rows_of(const Params& params, const WorkTile& tile) {
  if constexpr (kHasMask<Params>) {
    return seen_rows(params, params.mask, tile.batch, tile.head, tile.q_begin, tile.segment);
  } else {
    return nullptr;
  }
}

// Divisions are the host's: a row waits for them.
template <class Params>
struct SoftmaxDLaunch {
  HeadTiles tiles;
  int64_t cleared_vectors;  // of the workspace, by each thread block
  Params params;

  // blocks: at least one.
  SoftmaxDLaunch(const Params& params_, int64_t blocks)
      : tiles{FastDiv(params_.h),
              FastDiv(static_cast<int>(blocks / params_.h / (params_.is_varlen() ? 1 : params_.b)))},
        cleared_vectors((params_.workspace_vectors + blocks - 1) / blocks),
        params(params_) {}
};

// Clears this thread block's part of the fp32 dQ and of the semaphores.
template <class Params>
__device__ void clear_workspace(const SoftmaxDLaunch<Params>& launch, int cta) {
  const int64_t begin = launch.cleared_vectors * cta;
  const int64_t end = min(begin + launch.cleared_vectors, launch.params.workspace_vectors);
#pragma unroll 1  // to unroll it, nvcc would divide by the number of threads first
  for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) launch.params.workspace_ptr[i] = float4{};
}

// The sum over a thread block of kLeastThreads, in a fixed order, valid in thread 0.
__device__ float block_sum(float value) {
  __shared__ float warp_sums[kLeastThreads / 32];
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
__global__ void __launch_bounds__(kMostThreads, kLargestBlocksPerSm)
    softmax_d_kernel(const __grid_constant__ SoftmaxDLaunch<Params> launch) {
  const Params& params = launch.params;
  // The order matters. An earlier kernel of the stream may still use the memory of the workspace. And the next kernel,
  // which may start from here on, relies on all earlier ones being complete.
  wait_for_previous_kernel();
  allow_next_kernel();
  clear_workspace(launch, reversed_block());
  const WorkTile tile = launch.tiles.at(params, kRows, reversed_block());
  if (tile.empty()) return;
  const bool is_varlen = params.is_varlen();
  if (!in_sequence(params, tile)) return;
  int lane_bits = 2;  // of the lanes of a row, a power of two, of one warp at most
  while (lane_bits < 5 && (kVectorCols << lane_bits) < params.d_v) ++lane_bits;
  const int lanes = 1 << lane_bits, lane = threadIdx.x & (lanes - 1), col = lane * kVectorCols;
  const auto load = [&](const void* data, const MatrixStrides& strides, int row, int col) {
    const uint16_t* const matrix = static_cast<const uint16_t*>(data);
    const int64_t offset = matrix_offset(strides, is_varlen, tile.batch, tile.q_begin + row, tile.head) + col;
    return *reinterpret_cast<const uint4*>(matrix + offset);
  };
  const int first_row = first_visible_row(Visibility{tile.seqlen_q, tile.seqlen_k, params.window});
  const int64_t lse_row = lse_offset(tile, params);
  const float sink = row_sink(params, tile);
  const uint32_t* const seen = seen_rows_of(params, tile);
  float dsink = 0.0f;
  float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, tile.head, tile.q_begin);
  for (int offset = threadIdx.x >> lane_bits; offset < kRows; offset += blockDim.x >> lane_bits) {
    const int row = tile.row_begin + offset;
    float sum = 0.0f;
    uint32_t bits = ~0u;  // asked for before the row, since nothing hides a second latency
    if (kHasMask<Params> && row < tile.row_end) bits = seen[row / kMaskWordKeys];
    if (row < tile.row_end && col < params.d_v && (kHasMask<Params> || has_keys(params, lse_row, row, first_row))) {
      // Copies: through references to memory the products would load four bytes at a time.
      const uint4 dout = load(params.do_ptr, params.do_strides, row, col);
      const uint4 out = load(params.o_ptr, params.o_strides, row, col);
      sum = dot<Pair>(dout, out);
      constexpr int kWarpCols = 32 * kVectorCols;
      static_assert(plan::kMaxHeadDim <= 2 * kWarpCols, "a warp has a row in one load or two");
      if (col + kWarpCols < params.d_v) {
        sum += dot<Pair>(load(params.do_ptr, params.do_strides, row, col + kWarpCols),
                         load(params.o_ptr, params.o_strides, row, col + kWarpCols));
      }
      if (kHasMask<Params> && !(bits >> row % kMaskWordKeys & 1u)) sum = 0.0f;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance < lanes) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    if (lane == 0 && row < tile.row_end) dsink += apply_lse(params, lse_row + row, sink, sum);
    if (lane == 0 && (row < tile.row_end || !is_varlen)) delta[row] = sum;
  }
  if (params.dsinks_ptr == nullptr) return;
  dsink = block_sum(dsink);
  if (threadIdx.x == 0) params.dsinks_ptr[reversed_block()] = dsink;
}

template <class Pair, class Params>
cudaError_t run(const Params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t blocks = params.h * plan::m_blocks(params.is_varlen(), params.b, params.seqlen_q, kRows);
  if (blocks == 0) return cudaSuccess;
  int threads = params.dsinks_ptr != nullptr ? kLeastThreads : kMostThreads;
  while (threads > kLeastThreads && blocks * threads > kThreadsAtATime) threads /= 2;
  return launch_dependent(softmax_d_kernel<Pair, Params>, blocks, threads, 0, SoftmaxDLaunch<Params>(params, blocks),
                          params.device, stream, configured_devices);
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
