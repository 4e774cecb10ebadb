// The forward of e4m3 q, k and v: parameters and kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/fast_div.h"
#include "params/flash.h"

namespace flash {

// A value is an 8-bit value times its descale.
struct Descale {
  const float* __restrict__ ptr = nullptr;  // (1 or b, 1, h_k or h) by any strides; null: 1
  int64_t batch_stride = 0;
  int64_t head_stride = 0;
  FastDiv group;  // query heads that share one
};

struct Flash_fwd_fp8_params : Flash_fwd_params {
  Descale q_descale, k_descale, v_descale;
  // V^T with the keys of a P V operand (core/e4m3.h): (b or 1, h_k, d_v, vt_keys). Keys of packed sequences begin at
  // slots of kVtKeys keys (varlen_first_slot()). Zero where no query sees a key.
  uint8_t* __restrict__ vt_ptr = nullptr;  // null: the kernel transposes V
  int64_t vt_keys = 0;
  bool exp_bits = false;  // P as e4m3 straight from the scores, without exp2
};

// Fills vt_ptr and clears the semaphore. After run_prepare() in a packed call; the next kernel of the stream may be
// launched as its dependent.
cudaError_t run_transpose_v(const Flash_fwd_fp8_params& params, cudaStream_t stream);

// kDtype: of O. For GPUs of compute capability 9.0.
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_fp8_wgmma_(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream);

}  // namespace flash
