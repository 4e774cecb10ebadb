// Turns at the tiles of dQ: with a counter per tile the thread blocks of keys add in a fixed order (dq_turn()).
#pragma once

namespace flash {

// May be issued long before wait_for_turn(), which hides its latency.
__device__ __forceinline__ int peek_turn(const int* turns) {
  int current;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(current) : "l"(turns) : "memory");
  return current;
}

// Each thread that adds waits for itself. `seen`: the counter as peek_turn() found it. The fence orders the additions
// behind those of earlier turns; where there is an acquire fence, it drops the L1 cache and waits for nothing.
__device__ __forceinline__ void wait_for_turn(const int* turns, int turn, int seen) {
  while (seen != turn) seen = peek_turn(turns);
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  __threadfence();
#endif
}

// By one thread, after a barrier of all threads that added: the release covers what the barrier ordered before it.
__device__ __forceinline__ void pass_turn(int* turns) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns) : "memory");
}

}  // namespace flash
