// mbarrier in shared memory. Every operation also orders the compiler's memory accesses, because plain loads and stores
// stand beside the bulk copies that the barriers guard.
#pragma once

#include <cstdint>

namespace flash {
namespace tma {

struct Barrier {
  uint64_t state;

  __device__ __forceinline__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&state));
  }

  // By one thread, before fence_init() and a barrier of all threads.
  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }

  __device__ __forceinline__ static void fence_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
  }

  // Arrives, and lets the phase wait for `bytes` of bulk copies too.
  __device__ __forceinline__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }

  // Returns when the phase of this parity is complete.
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

// By every thread that wrote to a buffer of shared memory, before those are told that let bulk copies or wgmma read it;
// or by the thread that starts the copy, behind its wait for those that wrote.
// Unlike cute::tma_store_fence() it also keeps the compiler from moving plain stores behind it.
__device__ __forceinline__ void fence_buffer() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tma
}  // namespace flash
