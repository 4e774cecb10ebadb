// Interface of the kernels for the gradients of biases as data.
#pragma once

#include "core/bias_tiles.h"
#include "params/flash.h"

namespace flash {

struct BiasGradientParams {
  Flash_bwd_params call;  // after the backward: with segments and softmax_d
  MaskFactors factors;
  ScoreBias bias;
  BiasTiles tiles;
  void* __restrict__ out_ptr = nullptr;       // of the bias, contiguous
  float* __restrict__ partial_ptr = nullptr;  // sums of chunks; null: one chunk, stored at once
  bool out_is_float = false;
  Dtype dtype = Dtype::kBf16;
};

// dS summed over the axes along which a bias is broadcast, of attn_bias or rel_bias: the same bits in every run.
cudaError_t run_bias_gradient(const BiasGradientParams& params, cudaStream_t stream);

// The gradient of rel_bias from a dense dS that the backward has stored.
struct DiagonalSum {
  ScoreGradients ds;
  DiagonalParts parts;
  Dtype dtype = Dtype::kBf16;
  int device = 0;
  int64_t heads = 0, rows = 0;
  float* __restrict__ out_ptr = nullptr;      // (heads, 2 * reach + 1)
  float* __restrict__ partial_ptr = nullptr;  // of all strips
};
cudaError_t run_sum_diagonals(const DiagonalSum& params, cudaStream_t stream);

}  // namespace flash
