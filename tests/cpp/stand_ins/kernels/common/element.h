// The emulator's bf16 in place of CUTLASS's.
#pragma once

#include "params/flash.h"

namespace flash {

template <Dtype kDtype>
using ElementOf = bf16;

inline uint32_t pack_pair(float low, float high, bf16) { return pack(low, high); }

}  // namespace flash
