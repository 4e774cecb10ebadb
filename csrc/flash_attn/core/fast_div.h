// Division of a non-negative int by a divisor known before the launch: one high multiply and a shift.
// Granlund & Montgomery, "Division by invariant integers using multiplication" (1994), round-up method.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash {

struct FastDiv {
  int divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;

  FastDiv() = default;

  // divisor >= 1. With shift = ceil(log2(divisor)), the multiplier fits 32 bits once its implied 2^32 is split off.
  FLASH_HOST_DEVICE explicit FastDiv(int divisor_) : divisor(divisor_) {
    while ((uint64_t{1} << shift) < static_cast<uint64_t>(divisor)) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }

  // value in [0, 2^31): the sum below cannot overflow 32 bits because the high product is below value.
  FLASH_HOST_DEVICE int divide(int value) const {
    const uint32_t n = static_cast<uint32_t>(value);
#if defined(__CUDA_ARCH__)
    const uint32_t high = __umulhi(n, multiplier);
#else
    const uint32_t high = static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> 32);
#endif
    return static_cast<int>((high + n) >> shift);
  }
};

}  // namespace flash
