// Kernel parameters of the e4m3 forward.
#pragma once

#include "core/e4m3.h"
#include "kernels/sm90/fwd_launch_params.h"
#include "params/fp8.h"

namespace flash {
namespace sm90 {

struct Fp8FwdLaunch : FwdLaunch {
  Descale q_descale, k_descale, v_descale;
  uint32_t bits_shift;  // of Fp8Softmax
  // V^T as in Flash_fwd_fp8_params.
  uint8_t* vt_ptr;
  int64_t vt_keys;
  int vt_first;
  int* vt_progress;
};

// Columns of a block of V^T that a warp fills at a time: a 32-byte sector of each row of V.
constexpr int kVtPieceCols = 32;

// Pieces of each matrix of V^T.
__device__ __forceinline__ int vt_pieces(const Fp8FwdLaunch& launch, int head_dim) {
  return static_cast<int>(launch.vt_keys) / e4m3::kVtKeys * (head_dim / kVtPieceCols);
}

}  // namespace sm90
}  // namespace flash
