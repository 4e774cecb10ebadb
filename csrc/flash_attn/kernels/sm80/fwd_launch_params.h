// Kernel parameters of the mma.sync forward.
#pragma once

#include "params/flash.h"

namespace flash {
namespace sm80 {

// Of kDropout; other variants take Flash_fwd_params.
struct Flash_fwd_general_params : Flash_fwd_params {
  MaskParams mask;
};

}  // namespace sm80
}  // namespace flash
