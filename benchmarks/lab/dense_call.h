// The parameters of a plain forward without torch, for the launchers of tiles and designs.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

#include "params/flash.h"

// q, out: contiguous (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads, head_dim). The causal mask is
// aligned to the last query and key. For the current device, which the returned status is about.
inline cudaError_t set_dense_call(flash::Flash_fwd_params& params, const void* q, const void* k, const void* v,
                                  void* out, int batch, int seqlen_q, int seqlen_k, int heads, int head_dim,
                                  bool causal) {
  params.q_ptr = q;
  params.k_ptr = k;
  params.v_ptr = v;
  params.o_ptr = out;
  flash::MatrixStrides strides;
  strides.head = head_dim;
  strides.row = strides.head * heads;
  strides.batch = strides.row * seqlen_q;
  params.q_strides = params.o_strides = strides;
  strides.batch = strides.row * seqlen_k;
  params.k_strides = params.v_strides = strides;
  params.b = batch;
  params.h = params.h_k = heads;
  params.d = params.d_v = head_dim;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  if (causal) params.window.right = 0;
  params.scale_softmax = 1.0f / std::sqrt(static_cast<float>(head_dim));
  params.softmax_scale_log2 = params.scale_softmax * 1.44269504f;
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  params.device = static_cast<int16_t>(device);
  return status;
}
