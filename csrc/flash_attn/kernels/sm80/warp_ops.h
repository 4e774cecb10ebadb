// Wrappers of the warp-level mma.sync, ldmatrix and cp.async instructions, for code that handles fragments by hand.

#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/numeric/numeric_types.hpp>

namespace flash {
namespace sm80 {

// ldmatrix.x4 of four 8 x 8 matrices: lane l passes the address of row l % 8 of matrix l / 8 and receives, of each,
// columns {2 t, 2 t + 1} of row g, with g = lane / 4 and t = lane % 4.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* row) {
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}

// The same with each matrix transposed (ldmatrix.trans).
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), r[0], r[1], r[2], r[3]);
}

// The same by an address in shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* shared) { return cute::cast_smem_ptr_to_uint(shared); }

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row));
}

// acc (16 x 8) += a (16 x 16) b (16 x 8)
__device__ __forceinline__ void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         cutlass::half_t) {
  cute::SM80_16x8x16_F32F16F16F32_TN::fma(acc[0], acc[1], acc[2], acc[3], a[0], a[1], a[2], a[3], b0, b1, acc[0],
                                          acc[1], acc[2], acc[3]);
}

__device__ __forceinline__ void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                         cutlass::bfloat16_t) {
  cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(acc[0], acc[1], acc[2], acc[3], a[0], a[1], a[2], a[3], b0, b1, acc[0],
                                            acc[1], acc[2], acc[3]);
}

// cp.async of 16 (or 4) bytes to shared memory; if not valid, nothing is read and zeros are written.
__device__ __forceinline__ void copy16_async(void* to, const void* from, bool valid) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(from),
                                                               *static_cast<cute::uint128_t*>(to), valid);
}

__device__ __forceinline__ void copy16_async(void* to, const void* from) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(from),
                                                         *static_cast<cute::uint128_t*>(to));
}

__device__ __forceinline__ void copy4_async(void* to, const void* from, bool valid) {
  cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint32_t>::copy(*static_cast<const uint32_t*>(from),
                                                        *static_cast<uint32_t*>(to), valid);
}

__device__ __forceinline__ void commit_copies() { cute::cp_async_fence(); }

// cp.async.wait_group: until at most `newest` of this thread's committed groups are in flight.
__device__ __forceinline__ void wait_for_copies_but(int newest) {
  // Comparisons by which nvcc makes no table of branches: that is three loads of constants one after the other.
  if (newest > 2) {
    if (newest > 4) {
      cute::cp_async_wait<5>();
    } else if (newest > 3) {
      cute::cp_async_wait<4>();
    } else {
      cute::cp_async_wait<3>();
    }
  } else if (newest > 1) {
    cute::cp_async_wait<2>();
  } else if (newest > 0) {
    cute::cp_async_wait<1>();
  } else {
    cute::cp_async_wait<0>();
  }
}

// Asks for a line of 128 bytes; nothing tells when it is in the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Named barrier `id` (1 to 15) of `threads` threads; 0 is __syncthreads().
__device__ __forceinline__ void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits there. Returns whether `value` is true in one of the threads.
__device__ __forceinline__ bool any_named(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n.reg .pred p, any;\nsetp.ne.b32 p, %3, 0;\nbar.red.or.pred any, %1, %2, p;\nselp.b32 %0, 1, 0, any;\n}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

// Arrives there without waiting.
__device__ __forceinline__ void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace sm80
}  // namespace flash
