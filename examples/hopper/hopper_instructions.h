// The PTX instructions of Hopper that the kernel of this folder uses, each in a function; those of every tensor core
// GPU are in ../minimal/instructions.h. The test suite runs the kernel on a CPU and brings its own versions
// (tests/cpp/hopper_attention.cpp).
#pragma once

#include "../minimal/instructions.h"

// A tile of 128 columns is two matrices of 64, one after the other: the 128 bytes of a row are what TMA and wgmma
// permute. The 16-byte vector c of row r is where the vector c XOR (r mod 8) would be.
constexpr int kAtomCols = 64;

#ifdef __CUDACC__
#include <cuda.h>

using TensorMap = CUtensorMap;  // where a tensor is, its lengths and strides, and the box that a copy moves

// Counts arrivals, and bytes that TMA has written; a phase ends when all of both have come. Waits name the parity of
// the phase, so that one barrier can be used in every round.
struct Mbarrier {
  uint64_t state;

  __device__ uint32_t address() const { return shared_address(&state); }
  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory"); }
  __device__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  __device__ void wait(int parity) const {
    asm volatile(
        "{\n.reg .pred complete;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n"
        "@complete bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(address()),
        "r"(parity)
        : "memory");
  }
};
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// A box of 64 columns from (column, head, row, batch) on; what lies beyond the tensor is 0. By one thread.
__device__ inline void copy_box(bf16* to, const TensorMap& map, int col, int head, int row, int batch, Mbarrier& full) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(to)),
      "l"(&map), "r"(col), "r"(head), "r"(row), "r"(batch), "r"(full.address())
      : "memory");
}

// Between stores of this thread to shared memory and a wgmma that reads them.
__device__ inline void fence_before_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A named barrier: some warps wait at it, others only arrive.
__device__ inline void wait_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Registers of a thread, for all warps of a warpgroup.
template <int kCount>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Where an operand is in shared memory: its address, two distances, the swizzle of 128 bytes; distances in 16 bytes.
__device__ inline uint64_t descriptor(const bf16* matrix, uint64_t leading) {
  constexpr uint64_t kEightRows = 8 * 2 * kAtomCols / 16;
  return (shared_address(matrix) & 0x3ffff) >> 4 | leading << 16 | kEightRows << 32 | uint64_t{1} << 62;
}

#define ACCUMULATOR_4(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define ACCUMULATOR_16(d, j) \
  ACCUMULATOR_4(d, j), ACCUMULATOR_4(d, j + 1), ACCUMULATOR_4(d, j + 2), ACCUMULATOR_4(d, j + 3)
#define ACCUMULATOR(d) ACCUMULATOR_16(d, 0), ACCUMULATOR_16(d, 4), ACCUMULATOR_16(d, 8), ACCUMULATOR_16(d, 12)
#define REGISTERS_64                                                                                          \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "     \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, " \
  "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"

// Before the first product of a group: what this warpgroup wrote to registers is seen by it.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// acc (64 x 128) = or += a (64 x 16) b (128 x 16)^T, started: both in shared memory, rows of 16 columns. `rows`: of the
// tile that b begins in.
__device__ inline void start_product(float (&acc)[16][4], const bf16* a, const bf16* b, bool adds) {
  asm volatile(
      "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, "
      "0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64 ", %64, %65, adds, 1, 1, 0, 0;\n}"
      : ACCUMULATOR(acc)
      : "l"(descriptor(a, 1)), "l"(descriptor(b, 1)), "r"(static_cast<int>(adds)));
}

// acc (64 x 128) += a (64 x 16) b (16 x 128), started: a in registers, b in shared memory, `rows` of its tile apart
// from its second 64 columns.
template <int kRows>
__device__ inline void start_product_transposed(float (&acc)[16][4], const uint32_t (&a)[4], const bf16* b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " REGISTERS_64
               ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : ACCUMULATOR(acc)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor(b, kRows * 2 * kAtomCols / 16)));
}

// Until all groups but the newest are complete. Registers of products must not be touched before: `hold()` says to
// the compiler that they change here.
template <int kNewest>
__device__ inline void wait_for_products_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNewest) : "memory");
}
__device__ inline void hold(float (&acc)[16][4]) { asm volatile("" : ACCUMULATOR(acc)::"memory"); }
template <int kCount>
__device__ inline void hold(uint32_t (&operand)[kCount][4]) {
#pragma unroll
  for (auto& words : operand) {
    asm volatile("" : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])::"memory");
  }
}
#endif
