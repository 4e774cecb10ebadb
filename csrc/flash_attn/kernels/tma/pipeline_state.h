// A place in a ring of shared memory buffers.
#pragma once

#include <cstdint>

namespace flash {
namespace tma {

// A consumer waits for `phase`; a producer for the opposite one, so that it finds the buffers free in its first round.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace tma
}  // namespace flash
