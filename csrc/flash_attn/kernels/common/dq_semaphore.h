// Counters of dQ tiles. The dQ semaphore of the deterministic backward, by which n_blocks reduce into a tile in
// ascending order (dq_semaphore_value()); and the same counter in both modes, where the last n_block converts the tile.
#pragma once

#include "core/bwd_schedule.h"
#include "params/flash.h"

namespace flash {

// A load of the counter; issued well before dq_semaphore_acquire(), its latency is hidden.
__device__ __forceinline__ int dq_semaphore_peek(const int* semaphore) {
  int current;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(current) : "l"(semaphore) : "memory");
  return current;
}

__device__ __forceinline__ void fence_acquire() {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  __threadfence();
#endif
}

// Waits until n_block may reduce into the dQ tile of an m_block. By every thread that reduces. `peeked`: the counter as
// dq_semaphore_peek() returned it. The fence orders the reductions after those of earlier n_blocks; fence.acquire,
// where it exists, invalidates the L1 cache and waits for nothing else.
template <class Config, class Mask>
__device__ __forceinline__ void dq_semaphore_acquire(const Flash_bwd_params& params, const Mask& mask, int m_block,
                                                     int n_block, int64_t dq_tile, int peeked) {
  const int* const semaphore = params.dq_semaphore_ptr + dq_tile;
  const int value = dq_semaphore_value(mask, m_block, n_block, Config::kBlockM, Config::kBlockN);
  while (peeked != value) peeked = dq_semaphore_peek(semaphore);
  fence_acquire();
}

// By one thread, after a barrier of all threads that reduced: the release is cumulative over what the barrier ordered.
__device__ __forceinline__ void dq_semaphore_release(int* semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

// Waits until a tile has `least` contributions; returns how many it has. By the thread that adds the next one. Without
// fence_acquire(): nothing is read, and a reduction issued behind the wait cannot overtake what L2 has counted.
__device__ __forceinline__ int dq_count_wait(const int* count, int least) {
  int seen = dq_semaphore_peek(count);
  while (seen < least) seen = dq_semaphore_peek(count);
  return seen;
}

// One contribution more to a dQ tile; returns how many there were. By the thread that has waited for its own
// reductions: whoever counts the last one sees them all behind fence_acquire(). That fence apart, because it clears the
// L1 cache, which a conversion beside it needs.
__device__ __forceinline__ int dq_count_add(int* count) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 13
  asm volatile("fence.release.gpu;" ::: "memory");
#else
  __threadfence();
#endif
  int previous;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(previous) : "l"(count) : "memory");
  return previous;
}

}  // namespace flash
