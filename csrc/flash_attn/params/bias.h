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

}  // namespace flash
