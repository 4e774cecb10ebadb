// Bulk reduction of a shared memory buffer into global memory (cp.reduce.async.bulk). Threads that reduce from
// registers stall until the L2 cache accepts their values, which costs the GEMMs more time than staging in shared
// memory.
#pragma once

#include <cstdint>

#include "kernels/tma/mbarrier.h"

namespace flash {
namespace tma {

// Called by one thread, after fence_buffer() by all that wrote to `source`; both pointers are 16-byte aligned. hint: L2
// policy, a cute::TMA::CacheHintSm90.
// cute::tma_store_wait<0>() waits until the buffer has been read.
__device__ __forceinline__ void reduce_bulk(float* target, const float* source, int count, uint64_t hint) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(source));
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.f32 [%0], [%1], %2, %3;" ::"l"(target),
      "r"(address), "r"(count * static_cast<int>(sizeof(float))), "l"(hint)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Proxy fence: orders this thread's later bulk reductions after its earlier generic-proxy reads of global memory.
__device__ __forceinline__ void fence_before_reductions() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Called by the thread that issued them: waits until its bulk reductions and copies, but for those of the last kGroups
// groups, are performed in global memory.
template <int kGroups = 0>
__device__ __forceinline__ void wait_for_reductions() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

}  // namespace tma
}  // namespace flash
