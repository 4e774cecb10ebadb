// Asking an mbarrier without waiting for it.
#pragma once

#include "kernels/tma/mbarrier.h"

namespace flash {
namespace tma {

// Whether the phase of this parity is complete.
__device__ __forceinline__ bool is_complete(const Barrier& barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{\n\t"
      ".reg .pred complete;\n\t"
      "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
      "selp.u32 %0, 1, 0, complete;\n\t"
      "}"
      : "=r"(complete)
      : "r"(barrier.address()), "r"(parity)
      : "memory");
  return complete != 0;
}

}  // namespace tma
}  // namespace flash
