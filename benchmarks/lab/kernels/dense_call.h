// The parameters of plain calls without torch, and memory, for the launchers of designs.
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>

#include "params/flash.h"
#include "plan/device.h"

#define LAB_EXPORT extern "C" __attribute__((visibility("default")))

// A buffer of the device that grows; calls are of one stream.
struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;

  cudaError_t grow(size_t wanted) {
    if (wanted <= bytes) return cudaSuccess;
    if (const cudaError_t status = cudaFree(memory); status != cudaSuccess) return status;
    memory = nullptr;
    bytes = 0;
    const cudaError_t status = cudaMalloc(&memory, wanted);
    if (status == cudaSuccess) bytes = wanted;
    return status;
  }
};

// batch, seqlen_q, seqlen_k, heads; causal: the mask is aligned to the last query and key.
struct DenseSizes {
  int batch, seqlen_q, seqlen_k, heads, head_dim;
  bool causal;

  // Of a contiguous (batch, seqlen, heads, head_dim).
  flash::MatrixStrides strides(int seqlen) const {
    flash::MatrixStrides found;
    found.head = head_dim;
    found.row = found.head * heads;
    found.batch = found.row * seqlen;
    return found;
  }
};

// q, out: contiguous (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads, head_dim). For the current
// device, which the returned status is about.
inline cudaError_t set_dense_call(flash::Flash_fwd_params& params, const void* q, const void* k, const void* v,
                                  void* out, const DenseSizes& sizes) {
  params.q_ptr = q;
  params.k_ptr = k;
  params.v_ptr = v;
  params.o_ptr = out;
  params.q_strides = params.o_strides = sizes.strides(sizes.seqlen_q);
  params.k_strides = params.v_strides = sizes.strides(sizes.seqlen_k);
  params.b = sizes.batch;
  params.h = params.h_k = sizes.heads;
  params.d = params.d_v = sizes.head_dim;
  params.seqlen_q = sizes.seqlen_q;
  params.seqlen_k = sizes.seqlen_k;
  if (sizes.causal) params.window.right = 0;
  params.scale_softmax = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
  params.softmax_scale_log2 = params.scale_softmax * 1.44269504f;
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  params.device = static_cast<int16_t>(device);
  return status;
}

template <class Problem>
void set_dense_problem(Problem& problem, const DenseSizes& sizes, flash::Dtype dtype) {
  problem.dtype = dtype;
  problem.batch = sizes.batch;
  problem.heads = problem.heads_k = sizes.heads;
  problem.head_dim = problem.head_dim_v = sizes.head_dim;
  problem.seqlen_q = sizes.seqlen_q;
  problem.seqlen_k = sizes.seqlen_k;
  if (sizes.causal) problem.window.right = 0;
}

// What a plan asks of an sm_90 GPU.
inline cudaError_t read_device(flash::plan::Device& device, int index) {
  device.capability = 90;
  cudaError_t status = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&device.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&device.smem_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
}
