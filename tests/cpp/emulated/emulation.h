// Enough of CUDA on a CPU to run kernels that were written against sm80/warp_ops.h, common/launch.h and common/pdl.h,
// which have their twins in this folder. The threads of a block are fibers. They run in random order between
// synchronisations, and asynchronous copies land at random times before they are waited for, so that a missing barrier
// shows as a wrong result. Included before everything else.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#ifndef __grid_constant__
#define __grid_constant__
#endif

using std::isinf;
using std::max;
using std::min;

namespace emulation {

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};

// Waits for `threads` threads of the block (warp: of the warp) to come to operation `operation`.
void meet_block(int operation, int barrier, int threads);
int meet_warp(int operation, const void* value, int bytes);  // returns the parity of the slots
const void* lane_value(int lane, int parity);

int block_or(int value);
void copy_async(void* to, const void* from, int bytes, bool valid);
void commit_copies();
void wait_for_copies(int newest);
[[noreturn]] void fail(const char* what);
int random_below(int bound);

// Runs `blocks` blocks of `threads` threads one after the other, in random order.
void run_grid(int64_t blocks, int threads, int smem_bytes, void (*call)(const void*), const void* arguments);
char* shared_memory();

enum Operation { kSync = 1, kShuffle, kVote, kMatrices, kMatricesTransposed, kMultiply, kNamed, kWarpSync };

template <class T>
T shuffle(T value, int source) {
  const int parity = meet_warp(kShuffle, &value, sizeof(T));
  T result;
  std::memcpy(&result, lane_value(source, parity), sizeof(T));
  return result;
}

}  // namespace emulation

extern emulation::Index3 threadIdx, blockIdx, blockDim, gridDim;

inline void __syncthreads() { emulation::meet_block(emulation::kSync, 0, static_cast<int>(blockDim.x)); }
inline int __syncthreads_or(int value) { return emulation::block_or(value); }
inline void __syncwarp() {
  int none = 0;
  emulation::meet_warp(emulation::kWarpSync, &none, sizeof none);
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::shuffle(value, lane % 32);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulation::shuffle(value, static_cast<int>(threadIdx.x % 32) ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return emulation::shuffle(value, lane >= distance ? lane - distance : lane);
}
inline bool __any_sync(unsigned, bool value) {
  const int parity = emulation::meet_warp(emulation::kVote, &value, sizeof value);
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any |= *static_cast<const bool*>(emulation::lane_value(lane, parity));
  return any;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
