// S_dmask: P of a finished forward with the dropout mask in its sign. A diagnostic output: a plain fp32 kernel for
// every head dim and feature, so that the forward kernels need not write P.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/dropout.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/common/origin.h"
#include "kernels/common/paged_kv.h"
#include "kernels/common/score_bias.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/sequence.h"
#include "params/flash.h"

namespace flash {
namespace {

constexpr int kTile = 32;      // rows and columns per thread block
constexpr int kThreads = 256;  // each computes 4 rows of one column
constexpr int kRowsPerThread = kTile * kTile / kThreads;

__device__ float to_float(__half value) { return __half2float(value); }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ void from_float(float value, __half& result) { result = __float2half_rn(value); }
__device__ void from_float(float value, __nv_bfloat16& result) { result = __float2bfloat16_rn(value); }

// 0 becomes the negative subnormal nearest to it: a dropped probability that underflows keeps its sign.
__device__ void make_dropped(__half& value) {
  value = __float2half_rn(0.0f) == value ? __ushort_as_half(0x8001) : __hneg(value);
}
__device__ void make_dropped(__nv_bfloat16& value) {
  value = __float2bfloat16_rn(0.0f) == value ? __ushort_as_bfloat16(0x8001) : __hneg(value);
}

// A work tile of a whole sequence.
__device__ WorkTile whole_sequence(const Flash_fwd_params& params, int batch, int head) {
  WorkTile tile;
  tile.batch = batch;
  if (params.is_varlen()) {
    tile = varlen_segment(params, batch + 1);
  } else {
    tile.seqlen_q = params.seqlen_q;
    tile.seqlen_k = params.seqlen_k;
  }
  tile.head = head;
  return tile;
}

// Row `key` of K of a sequence, or null if no page holds it.
template <class Element>
__device__ const Element* key_row(const Flash_fwd_params& params, const WorkTile& tile, int key) {
  const Element* base =
      static_cast<const Element*>(params.k_ptr) + (tile.head / params.h_h_k_ratio) * params.k_strides.head;
  const int row = tile.k_begin + key;
  if (!params.is_paged()) {
    const int64_t batch = params.is_varlen() ? 0 : tile.batch * params.k_strides.batch;
    return base + batch + row * params.k_strides.row;
  }
  const int* table = params.paged.block_table + tile.batch * params.paged.block_table_stride;
  const PageRow at = page_row(params.paged, table, row, true);
  return at.valid ? base + at.page * params.k_strides.batch + at.row * params.k_strides.row : nullptr;
}

// The mask as data of a tile's sequence and head; without one all is seen.
__device__ MaskFactors factors_of(const Flash_fwd_split_params& params, const WorkTile& tile) {
  return params.mask.factors.of(tile.batch, tile.head, params.seqlen_q, params.seqlen_k, tile.q_begin, tile.k_begin);
}

template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads)
    dropout_probs_kernel(const __grid_constant__ Flash_fwd_split_params params) {
  using Element = NativeOf<kDtype>;
  __shared__ float q_tile[kTile][kTile + 1];  // (row, d)
  __shared__ float k_tile[kTile][kTile + 1];  // (col, d)
  const int col_tiles = params.p_cols / kTile, row_tiles = params.p_rows / kTile;
  const int tile_index = blockIdx.x % (col_tiles * row_tiles);
  const int batch_head = blockIdx.x / (col_tiles * row_tiles);
  const int row0 = tile_index / col_tiles * kTile, col0 = tile_index % col_tiles * kTile;
  const WorkTile tile = whole_sequence(params, batch_head / params.h, batch_head % params.h);
  const int lane = threadIdx.x % kTile, first_row = threadIdx.x / kTile * kRowsPerThread;

  const Element* q = static_cast<const Element*>(params.q_ptr) + q_offset(tile, params.q_strides);
  float score[kRowsPerThread] = {};
  for (int d0 = 0; d0 < params.d; d0 += kTile) {
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = row0 + first_row + i, col = col0 + first_row + i, d = d0 + lane;
      const Element* k = col < tile.seqlen_k ? key_row<Element>(params, tile, col) : nullptr;
      q_tile[first_row + i][lane] =
          row < tile.seqlen_q && d < params.d ? to_float(q[row * params.q_strides.row + d]) : 0.0f;
      k_tile[first_row + i][lane] = k != nullptr && d < params.d ? to_float(k[d]) : 0.0f;
    }
    __syncthreads();
    for (int d = 0; d < kTile; ++d) {
      for (int i = 0; i < kRowsPerThread; ++i) score[i] += q_tile[first_row + i][d] * k_tile[lane][d];
    }
    __syncthreads();
  }

  const ScoreMod score_mod(params, tile.batch, tile.head);
  const DropoutMask mask(params, tile.batch, tile.head);
  const Visibility visibility{tile.seqlen_q, tile.seqlen_k, params.window};
  const MaskFactors factors = factors_of(params, tile);
  const ScoreBias bias = params.mask.bias.of(tile.batch, tile.head, tile.q_begin);
  const float* lse = params.softmax_lse_ptr + lse_offset(tile, params);
  const int col = col0 + lane;
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = row0 + first_row + i;
    Element result;
    from_float(0.0f, result);
    if (row < tile.seqlen_q && col < tile.seqlen_k) {
      const bool in_window = col >= visibility.key_begin(row) && col < visibility.key_end(row);
      const bool visible = in_window && factors.sees(row, col);
      const float log2_sum = lse[row] * ScoreMod::kLog2e;
      const int diagonal = alibi_diagonal(params, tile.batch, visibility, row);
      const BiasTile at{row, col, tile.seqlen_q, tile.seqlen_k, diagonal};
      const float logit = score_mod.modified(score[i], diagonal, col) + bias_at<ElementOf<kDtype>>(bias, at, 0, 0);
      if (visible) from_float(exp2f(logit - log2_sum), result);
      if (!dropout_keeps(mask.stream, mask.first_row + row, mask.first_col + col, mask.threshold)) make_dropped(result);
    }
    static_cast<Element*>(
        params.p_ptr)[(static_cast<int64_t>(batch_head) * params.p_rows + row) * params.p_cols + col] = result;
  }
}

template <Dtype kDtype>
cudaError_t run(const Flash_fwd_split_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t tiles = static_cast<int64_t>(params.p_rows / kTile) * (params.p_cols / kTile);
  return launch(dropout_probs_kernel<kDtype>, tiles * params.b * params.h, kThreads, 0, params, params.device, stream,
                configured_devices);
}

}  // namespace

cudaError_t run_dropout_probs(const Flash_fwd_split_params& params, Dtype dtype, cudaStream_t stream) {
  return FP16_SWITCH(dtype, [&] { return run<kDtype>(params, stream); });
}

}  // namespace flash
