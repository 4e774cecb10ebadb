// mbarrier in shared memory. Every operation clobbers memory for the compiler, because plain loads and stores access
// the buffers that the barriers guard.
#pragma once

#include <cstdint>

namespace flash {
namespace tma {

struct Barrier {
  uint64_t state;

  __device__ __forceinline__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&state));
  }

  // Called by one thread, followed by fence_init() and a barrier of all threads.
  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }

  // Before its memory is used otherwise.
  __device__ __forceinline__ void invalidate() {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(address()) : "memory");
  }

  __device__ __forceinline__ static void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // Arrives at the barrier in the same place of thread block `rank` of the cluster. Ordered as arrive() is: with the
  // scope of the cluster it would wait for all memory operations of the thread.
  __device__ __forceinline__ void arrive_at(uint32_t rank) {
    asm volatile(
        "{\n\t"
        ".reg .b32 remote;\n\t"
        "mapa.shared::cluster.u32 remote, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n\t"
        "}" ::"r"(address()),
        "r"(rank)
        : "memory");
  }

  // Arrives `count` times.
  __device__ __forceinline__ void arrive(uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(count) : "memory");
  }

  // Arrives once, as soon as all copies by cp.async have landed that the thread has begun. No proxy fence is implied.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(address()) : "memory");
  }

  // Arrives and adds `bytes` of TMA copies to the transaction count of the phase.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }

  // Whether the phase of this parity is complete.
  __device__ __forceinline__ bool test(uint32_t parity) const {
    uint32_t complete;
    asm volatile(
        "{\n\t"
        ".reg .pred complete;\n\t"
        "mbarrier.test_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
        "selp.b32 %0, 1, 0, complete;\n\t"
        "}"
        : "=r"(complete)
        : "r"(address()), "r"(parity)
        : "memory");
    return complete != 0;
  }

  // Waits until the phase of this parity is complete.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n\t"
        ".reg .pred complete;\n\t"
        "WAIT:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n\t"
        "@complete bra DONE;\n\t"
        "bra WAIT;\n\t"
        "DONE:\n\t"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
};

// Proxy fence between plain stores to a buffer of shared memory and TMA or wgmma that read it: by every thread that
// wrote, before it signals; or by the thread that issues the copy, after its wait for them. And between plain loads and
// a TMA copy over what they read, by every thread that loaded: an arrival waits for no load, so the copy may land
// first. Unlike cute::tma_store_fence() it also keeps the compiler from sinking plain stores below it.
__device__ __forceinline__ void fence_buffer() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tma
}  // namespace flash
