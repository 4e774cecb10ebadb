// Named barriers of the one-pass wgmma backward.
#pragma once

#include <cstdint>

#include <cutlass/arch/barrier.h>

namespace flash {
namespace sm90 {

// Numbers of hardware barriers; 0 is __syncthreads(). CUTLASS adds those that it reserves, 8 of 16.
enum BwdNamedBarrier : uint32_t {
  kPreparingBarrier = 1,  // + group of 128 threads: BandPreparation, before the others are in use
  kConsumersBarrier = 1,  // all consumers
  kWarpgroupBarrier = 2,  // + group: one consumer
  kBwdOrderBarrier = 4,   // + group: ping-pong of the two consumers
};

// All threads of both consumers arrive and wait.
template <class Config>
__device__ __forceinline__ void wait_for_consumers() {
  cutlass::arch::NamedBarrier::sync(Config::kConsumers, kConsumersBarrier);
}

// The 128 threads of consumer `group` arrive and wait.
__device__ __forceinline__ void wait_for_warpgroup(int group) {
  cutlass::arch::NamedBarrier::sync(128, kWarpgroupBarrier + group);
}

// Ping-pong: consumer `group` exponentiates only after the other one has arrived. Both, started together with equal
// work, would otherwise exponentiate at the same time in every step and leave the tensor cores idle.
template <class Config>
__device__ __forceinline__ void wait_for_order_barrier(int group) {
  cutlass::arch::NamedBarrier::sync(Config::kConsumers, kBwdOrderBarrier + group);
}
template <class Config>
__device__ __forceinline__ void arrive_at_order_barrier(int group) {
  cutlass::arch::NamedBarrier::arrive(Config::kConsumers, kBwdOrderBarrier + 1 - group);
}

}  // namespace sm90
}  // namespace flash
