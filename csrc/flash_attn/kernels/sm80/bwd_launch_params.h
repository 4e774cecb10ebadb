// Variants and kernel parameters of the mma.sync backward.
#pragma once

#include "core/bwd_schedule.h"
#include "params/flash.h"

namespace flash {
namespace sm80 {

// kAccumulate: with or without dropout; dK and dV are added to fp32 matrices. As a branch of the others it would make
// them spill.
enum class BwdVariant { kPlain, kDropout, kAccumulate };

struct BwdLaunch {
  Flash_bwd_params params;
  int stages;       // buffers of Q and of dO
  BwdGrid grid;     // of the main kernel
  MaskParams mask;  // of kDropout, and its biases
  ScoreGradients ds;
};

}  // namespace sm80
}  // namespace flash
