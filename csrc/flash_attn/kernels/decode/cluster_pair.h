// Two CTAs launched as a cluster: 2 i and 2 i + 1 of a one-dimensional grid, which run at the same time and read each
// other's shared memory (DSMEM). Before sm_90 there are no clusters.
#pragma once

#include <cstdint>

namespace flash {
namespace decode {

struct ClusterPair {
  __device__ __forceinline__ static int rank() { return static_cast<int>(blockIdx.x % 2); }

  // Cluster barrier of all threads of both CTAs; what was written before it is visible after it.
  __device__ __forceinline__ static void sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
  }

  // Address in CTA `rank` of the object at `shared` in this one.
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
