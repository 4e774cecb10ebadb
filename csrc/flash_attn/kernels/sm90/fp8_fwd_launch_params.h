// Kernel parameters of the e4m3 forward.
#pragma once

#include "kernels/sm90/fwd_launch_params.h"
#include "params/fp8.h"

namespace flash {
namespace sm90 {

struct Fp8FwdLaunch : FwdLaunch {
  Descale q_descale, k_descale, v_descale;
  uint32_t bits_shift;  // of Fp8Softmax
};

}  // namespace sm90
}  // namespace flash
