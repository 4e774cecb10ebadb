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

// The same from a dS that the backward has stored, of an attn_bias with all rows and columns or of rel_bias.
struct ScoreGradientSum {
  ScoreGradients ds;
  Dtype dtype = Dtype::kBf16;
  int device = 0;
  int64_t all_batches = 1, all_heads = 1;  // of dS; packed sequences are one batch
  int64_t batches = 1, heads = 1;          // of the result
  int64_t rows = 0;
  void* __restrict__ out_ptr = nullptr;  // contiguous
  bool out_is_float = false;
  DiagonalParts parts;                    // of rel_bias
  float* __restrict__ partial_ptr = nullptr;  // null: not of rel_bias
};
cudaError_t run_sum_score_gradients(const ScoreGradientSum& params, cudaStream_t stream);

}  // namespace flash
