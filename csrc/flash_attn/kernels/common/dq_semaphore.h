// Turns at the tiles of dQ: with a counter per tile the thread blocks of keys add in a fixed order
// (dq_semaphore_value()).
#pragma once

namespace flash {

// May be issued long before wait_for_turn(), which hides its latency.
__device__ __forceinline__ int dq_semaphore_peek(const int* semaphore) {
  int current;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(current) : "l"(semaphore) : "memory");
  return current;
}

// Each thread that adds waits for itself. `seen`: the counter as dq_semaphore_peek() found it. The fence orders the
// additions behind those of earlier turns; where there is an acquire fence, it drops the L1 cache and waits for
// nothing.
__device__ __forceinline__ void dq_semaphore_wait(const int* semaphore, int value, int seen) {
  while (seen != value) seen = dq_semaphore_peek(semaphore);
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  __threadfence();
#endif
}

// By one thread, after a barrier of all threads that added: the release covers what the barrier ordered before it.
__device__ __forceinline__ void dq_semaphore_release(int* semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

}  // namespace flash
