// Two thread blocks that are launched as a cluster: neighbours 2 i and 2 i + 1 of a grid of one dimension, which run at
// the same time and read each other's shared memory. Before sm_90 nothing is launched in pairs.
#pragma once

#include <cstdint>

namespace flash {
namespace decode {

struct ClusterPair {
  __device__ __forceinline__ static int rank() { return static_cast<int>(blockIdx.x % 2); }

  // All threads of both: what they have written before is there for all of them.
  __device__ __forceinline__ static void sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
  }

  // Where thread block `rank` has what this one has at `shared`.
  template <class T>
  __device__ __forceinline__ static const T* at(const T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<const T*>(address);
#else
    return shared;
#endif
  }
};

}  // namespace decode
}  // namespace flash
