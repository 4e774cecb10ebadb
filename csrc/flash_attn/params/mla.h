// Attention of [qv, q] over cached rows of a latent and a rotated part, whose latent part is also the value (multi-head
// latent attention in its absorbed form): interface between the binding and the kernel archive.
#pragma once

#include <cuda_runtime_api.h>

#include "params/flash.h"

namespace flash {

constexpr int kMlaLatentDim = 512, kMlaRopeDim = 64;
// Bytes of an FP8 row: e4m3 latent columns, a float32 scale of each kMlaScaleCols of them, rotated columns of 16 bits.
constexpr int kMlaScaleCols = 128, kMlaScales = kMlaLatentDim / kMlaScaleCols;
constexpr int kMlaRopeByte = kMlaLatentDim + 4 * kMlaScales;

// One K/V head. Rows of all operands have 16-byte vectors. Of a packed batch seqlen_q is total_q, and the shapes of q,
// o, the LSE and their partial results have one sequence of that length.
struct Flash_mla_params {
  const void* __restrict__ q_ptr = nullptr;                                      // (b, seqlen_q, h, kMlaRopeDim)
  const void* __restrict__ qv_ptr = nullptr;                                     // (b, seqlen_q, h, kMlaLatentDim)
  const void* __restrict__ rope_ptr = nullptr;                                   // (pages, page_size, kMlaRopeDim)
  const void* __restrict__ latent_ptr = nullptr;                                 // (pages, page_size, kMlaLatentDim)
  void* __restrict__ o_ptr = nullptr;                                            // as qv
  float* __restrict__ softmax_lse_ptr = nullptr;                                 // (b, h, seqlen_q)
  MatrixStrides q_strides, qv_strides, rope_strides, latent_strides, o_strides;  // of pages: batch is a page
  PagedKv paged;

  const int* __restrict__ seqlens_k = nullptr;    // (b) or null: all keys; an invalid one: no result
  const int* __restrict__ leftpad_k = nullptr;    // (b) or null
  const int* __restrict__ segments_q = nullptr;   // (b + 3), as of Varlen; null: no packed batch
  const int* __restrict__ key_ranges = nullptr;   // (b, 2) of a packed batch, in place of seqlens_k and leftpad_k
  const float* __restrict__ sinks_ptr = nullptr;  // (h) or null; of split requests the combine adds them
  float* __restrict__ partial_o = nullptr;        // (splits, b, seqlen_q, h, kMlaLatentDim), normalised
  float* __restrict__ partial_lse = nullptr;      // (splits, b, h, seqlen_q); no key: -inf, an invalid request: +inf

  int b = 0, h = 0, seqlen_q = 0;
  int splits = 1;     // of the keys of each request
  int row_tiles = 0;  // of a request's seqlen_q * h rows; of a packed batch all
  int box_rows = 0;   // of a TMA box of keys, which crosses no page; 0: keys are copied one by one
  FastDiv heads;      // h
  bool is_causal = false;
  bool has_fp8_rows = false;        // at latent_ptr, by latent_strides in bytes
  float softmax_scale_log2 = 0.0f;  // > 0
  int device = 0;
};

// Tiles of 64 rows, of the wgmma kernel, or `tile_rows` of 16 or 32 with 3 stages of keys; on GPUs with 99 KB of shared
// memory 16 with 2. Partial results are for run_combine().
cudaError_t run_mla_decode(const Flash_mla_params& params, Dtype dtype, int tile_rows, int stages, cudaStream_t stream);

// The first by wgmma, for GPUs of compute capability 9.0. Head dims: kMlaRopeDim and kMlaLatentDim.
template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_mla_wgmma_(const Flash_mla_params& params, cudaStream_t stream);

}  // namespace flash
