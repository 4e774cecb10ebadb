// Kernel parameters of the mma.sync forward.
#pragma once

#include "params/flash.h"

namespace flash {
namespace sm80 {

// Of kDropout; other variants take Flash_fwd_params.
struct Flash_fwd_bias_params : Flash_fwd_params {
  ScoreBias bias;
};

}  // namespace sm80
}  // namespace flash
