// Additions of a shared memory buffer to global memory in one asynchronous piece: threads that add by themselves wait
// until the L2 cache takes their values, which costs the products more time than the way through shared memory.
#pragma once

#include <cstdint>

#include "kernels/tma/mbarrier.h"

namespace flash {
namespace tma {

// By one thread, after fence_buffer() by all that wrote to `source`; both places are 16-byte aligned.
// cute::tma_store_wait<0>() says when the buffer has been read.
__device__ __forceinline__ void reduce_bulk(float* target, const float* source, int count) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(source));
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(target), "r"(address),
               "r"(count * static_cast<int>(sizeof(float)))
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Orders additions to come behind what this thread has seen in global memory.
__device__ __forceinline__ void fence_before_additions() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// By the thread that added: everything is in its place.
__device__ __forceinline__ void wait_for_additions() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace tma
}  // namespace flash
