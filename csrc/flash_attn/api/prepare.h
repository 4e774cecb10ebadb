// Memory that the kernels of one call share, and the launch that fills it first: from the allocator of the call's
// stream, freed with the call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include "api/tensors.h"
#include "params/flash.h"
#include "plan/fwd_plan.h"

namespace flash {

inline int64_t varlen_words(const Flash_fwd_params& params) { return plan::varlen_words(params.is_varlen(), params.b); }

// Points the parameters of a packed batch to varlen_words() of memory.
inline void set_params_varlen_workspace(Flash_fwd_params& params, int* words) {
  if (!params.is_varlen()) return;
  params.varlen.segments_q = words;
  params.varlen.segments_k = params.varlen.segments_q + params.b + 3;
  params.varlen.key_ranges = params.varlen.segments_k + params.b + 3;
}

// `workspace` must outlive the launches that read it.
inline cudaError_t prepare(Flash_fwd_params& params, bool takes_semaphore, const at::Tensor& q, at::Tensor& workspace) {
  const int64_t words = varlen_words(params) + takes_semaphore;
  if (words == 0) return cudaSuccess;
  workspace = new_empty(q, {words}, at::kInt);
  int* const begin = workspace.mutable_data_ptr<int>();
  set_params_varlen_workspace(params, begin);
  if (takes_semaphore) params.tile_count_semaphore = begin + words - 1;
  return run_prepare(params, c10::cuda::getCurrentCUDAStream().stream());
}

}  // namespace flash
