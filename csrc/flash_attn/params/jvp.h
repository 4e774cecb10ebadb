// The forward together with its derivative along tangents of Q, K and V: parameters and kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "params/flash.h"

namespace flash {

struct Flash_fwd_jvp_params : Flash_fwd_params {
  const void* __restrict__ tq_ptr = nullptr;  // as Q, K and V; null: zero, and no products of it
  const void* __restrict__ tk_ptr = nullptr;
  const void* __restrict__ tv_ptr = nullptr;
  void* __restrict__ to_ptr = nullptr;      // as O
  float* __restrict__ t_lse_ptr = nullptr;  // as the LSE; 0 in rows without keys
  MatrixStrides tq_strides, tk_strides, tv_strides, to_strides;
};

// For GPUs of compute capability 8.0 and newer. tq, tk or tv is given.
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_jvp_(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

// The same by the wgmma family, for GPUs of compute capability 9.0.
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_jvp_wgmma_(const Flash_fwd_jvp_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

}  // namespace flash
