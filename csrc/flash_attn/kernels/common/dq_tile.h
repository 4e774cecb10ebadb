// fp32 tiles of dQ in global memory, in the order of the accumulator's registers: a warp-wide reduction covers 512
// contiguous bytes (128 before sm_90), and the conversion kernel reads in the same order.
#pragma once

#include <cute/tensor_impl.hpp>

namespace flash {

// Floats of one red instruction: red.v4 exists from sm_90 on.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr int kDqVector = 4;
#else
constexpr int kDqVector = 1;
#endif

// `thread`: index among the kThreads that hold the tile.
template <int kThreads, class Accumulator>
__device__ __forceinline__ void reduce_dq(const Accumulator& acc_dq, float* tile, int thread) {
  float* const first = tile + thread * kDqVector;
#pragma unroll
  for (int i = 0; i < decltype(cute::size(acc_dq))::value; i += kDqVector) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // Not atomicAdd(float4): nvcc makes it an atom that returns the old values, not a red.
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(first + i * kThreads),
                 "f"(acc_dq(i)), "f"(acc_dq(i + 1)), "f"(acc_dq(i + 2)), "f"(acc_dq(i + 3))
                 : "memory");
#else
    atomicAdd(first + i * kThreads, acc_dq(i));
#endif
  }
}

// Stores one warp's values to shared memory, in the order of reduce_dq<32>().
template <class Accumulator>
__device__ __forceinline__ void stage_dq(const Accumulator& acc_dq, float* buffer, int lane) {
#pragma unroll
  for (int i = 0; i < decltype(cute::size(acc_dq))::value; i += 4) {
    *reinterpret_cast<float4*>(buffer + i * 32 + lane * 4) =
        make_float4(acc_dq(i), acc_dq(i + 1), acc_dq(i + 2), acc_dq(i + 3));
  }
}

// Adds what stage_dq() stored to the accumulator.
template <class Accumulator>
__device__ __forceinline__ void add_staged_dq(Accumulator& acc_dq, const float* buffer, int lane) {
#pragma unroll
  for (int i = 0; i < decltype(cute::size(acc_dq))::value; i += 4) {
    const float4 sums = *reinterpret_cast<const float4*>(buffer + i * 32 + lane * 4);
    acc_dq(i) += sums.x;
    acc_dq(i + 1) += sums.y;
    acc_dq(i + 2) += sums.z;
    acc_dq(i + 3) += sums.w;
  }
}

template <int kThreads, class Accumulator>
__device__ __forceinline__ void load_dq(Accumulator& acc_dq, const float* tile, int thread) {
  const float* const first = tile + thread * kDqVector;
#pragma unroll
  for (int i = 0; i < decltype(cute::size(acc_dq))::value; i += kDqVector) {
    if constexpr (kDqVector == 4) {
      const float4 values = *reinterpret_cast<const float4*>(first + i * kThreads);
      acc_dq(i) = values.x;
      acc_dq(i + 1) = values.y;
      acc_dq(i + 2) = values.z;
      acc_dq(i + 3) = values.w;
    } else {
      acc_dq(i) = first[i * kThreads];
    }
  }
}

}  // namespace flash
