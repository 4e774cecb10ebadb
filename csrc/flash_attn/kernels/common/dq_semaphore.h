// The dQ semaphore of the deterministic backward: one counter per dQ tile, by which n_blocks reduce into it in
// ascending order (dq_semaphore_value()).
#pragma once

#include "core/bwd_schedule.h"
#include "params/flash.h"

namespace flash {

// Loads the counter. Called well before dq_semaphore_acquire(), it hides the latency.
__device__ __forceinline__ int dq_semaphore_peek(const int* semaphore) {
  int current;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(current) : "l"(semaphore) : "memory");
  return current;
}

// Orders what follows after all that a counter's increments had released when it was peeked at. fence.acquire, where it
// exists, only invalidates the L1 cache.
__device__ __forceinline__ void fence_after_peek() {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  __threadfence();
#endif
}

// Waits until n_block may reduce into the dQ tile of an m_block. Every thread that reduces calls it. `peeked`:
// the result of dq_semaphore_peek().
template <class Config, class Mask>
__device__ __forceinline__ void dq_semaphore_acquire(const Flash_bwd_params& params, const Mask& mask, int m_block,
                                                     int n_block, int64_t dq_tile, int peeked) {
  const int* const semaphore = params.dq_semaphore_ptr + dq_tile;
  const int value = dq_semaphore_value(mask, m_block, n_block, Config::kBlockM, Config::kBlockN);
  while (peeked != value) peeked = dq_semaphore_peek(semaphore);
  fence_after_peek();
}

// Called by one thread after a barrier of all threads that reduced: the release is cumulative over the writes
// that the barrier ordered.
__device__ __forceinline__ void dq_semaphore_release(int* semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

}  // namespace flash
