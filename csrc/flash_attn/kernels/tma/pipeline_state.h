// Stage and mbarrier phase parity in a ring of shared memory buffers.
#pragma once

#include <cstdint>

namespace flash {
namespace tma {

// Consumers wait for parity `phase` of a full barrier, producers for the opposite parity of an empty one, which a fresh
// mbarrier passes: all buffers are free at first.
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
