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

// The gradient of attn_bias from a 16-bit dS that the backward has stored: sums of its matrices, which follow each
// other, over batches, heads or both. In place, also in fp32, it writes 0 where the window hides scores.
struct ScoreSum {
  const void* data = nullptr;
  void* out_ptr = nullptr;  // contiguous, of dS's dtype or fp32
  bool out_is_float = false;
  Dtype dtype = Dtype::kBf16;
  int device = 0;
  int cols = 0;
  int64_t row_vectors = 0, blocks = 0;  // 16-byte vectors of a row; thread blocks of a sum
  Visibility visibility;                // of every matrix
  int64_t matrices = 1;                 // of the result
  // A sum's matrices of dS: `count` of them, `step` apart, the first ones first_step apart.
  int64_t first_step = 1, step = 1;
  int count = 1;

  FLASH_HOST_DEVICE int64_t rows() const { return visibility.seqlen_q; }
  FLASH_HOST_DEVICE int64_t matrix_vectors() const { return rows() * row_vectors; }
  FLASH_HOST_DEVICE bool in_place() const { return out_ptr == data; }
};
cudaError_t run_sum_scores(const ScoreSum& params, cudaStream_t stream);

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
