// The PTX instructions that the kernels of this folder use, each in a function. The test suite runs the kernels on
// a CPU and brings its own versions (tests/cpp/emulated_cuda.h).
//
// Notation: lane = 4 g + t. A warp's 16 x 8 accumulator lies in its lanes so that lane (g, t) holds rows g and g + 8,
// columns 2 t and 2 t + 1: the four floats {(g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)}.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
using bf16 = __nv_bfloat16;

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// acc (16 x 8) += a (16 x 16) b (16 x 8) on the tensor cores.
__device__ inline void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices; lane l names row l % 8 of matrix l / 8. Register i gets elements (g, 2 t), (g, 2 t + 1) of
// matrix i, or (2 t, g), (2 t + 1, g) when transposed.
__device__ inline void load_matrices(uint32_t (&r)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const bf16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// 16 bytes from global to shared memory in the background; zeros, and nothing read, when not valid.
__device__ inline void copy_async(bf16* to, const bf16* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kNewest>
__device__ inline void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
}

__device__ inline uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ inline float to_float(bf16 value) { return __bfloat162float(value); }
#endif

struct Problem {
  const bf16 *q, *k, *v;  // (batch, seqlen, heads, d)
  bf16* out;
  int seqlen, heads;
  float scale_log2;  // log2(e) / sqrt(d): exp(x) is computed as exp2(x log2(e))
  bool causal;

  __device__ int visible_keys(int row) const { return causal ? min(row + 1, seqlen) : seqlen; }
};
