// The ladder: what is built, checked and timed. Knobs of the compiler's command line: -DRUNG=4 leaves one of them,
// -DHEAD_DIM, -DBLOCK_N (keys of a tile), -DBANDS (16-row bands a warp) change them all. Also the table of their shared
// memory.
#pragma once

#include <cstdio>

#include "minimal_attention.cu"
#include "plain_loops.cu"
#include "reference.h"

#ifndef RUNG
#define RUNG 0  // all
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 64
#endif
#ifndef BLOCK_N
#define BLOCK_N 64
#endif
#ifndef BANDS
#define BANDS 1
#endif

template <int kNumber, class T, class Visit>
void visit_rung(const char* name, const Visit& visit) {
  if constexpr (RUNG == 0 || RUNG == kNumber) visit(name, T());
}

// Calls visit(name, T()) with the types that describe the kernels: each rung is the one before and one technique more;
// 7 to 9 are side steps from rung 3, 10 is one from rung 5.
template <class Visit>
void for_each_rung(const Visit& visit) {
  visit_rung<1, PlainLoops<HEAD_DIM, BLOCK_N>>("plain_loops", visit);
  visit_rung<2, Tile<HEAD_DIM, BLOCK_N, BANDS, 1, RowMajor>>("tensor_cores", visit);
  visit_rung<3, Tile<HEAD_DIM, BLOCK_N, BANDS, 1, Padded>>("padding", visit);
  visit_rung<4, Tile<HEAD_DIM, BLOCK_N, BANDS, 1, Swizzled>>("swizzle", visit);
  visit_rung<5, Tile<HEAD_DIM, BLOCK_N, BANDS, 2, Swizzled>>("double_buffer", visit);
  visit_rung<6, Tile<HEAD_DIM, BLOCK_N, BANDS, 2, Swizzled, true>>("lagging_max", visit);
  visit_rung<7, Tile<HEAD_DIM, BLOCK_N, BANDS, 2>>("two_stages", visit);
  visit_rung<8, Tile<HEAD_DIM, BLOCK_N, 2 * BANDS>>("two_bands", visit);
  visit_rung<9, Tile<HEAD_DIM, 2 * BLOCK_N, BANDS>>("wide_tile", visit);
  visit_rung<10, Tile<HEAD_DIM, BLOCK_N, 2 * BANDS, 2, Swizzled>>("buffered_bands", visit);
}

template <class T>
constexpr auto kernel_of() {
  if constexpr (T::kTensorCores) {
    return attention_kernel<T>;
  } else {
    return plain_loops_kernel<T>;
  }
}

constexpr int kDynamicBytes = 0;
#ifdef __CUDACC__
template <class T>
void launch_rung(dim3 grid, const Problem& problem, const Shape&) {
  kernel_of<T>()<<<grid, T::kThreads>>>(problem);
}
#endif

// How many blocks fit on an SM with so many KB of shared memory, 1 KB of which each block takes for itself.
constexpr int blocks_that_fit(int kilobytes, int bytes, int threads) {
  const int by_memory = kilobytes * 1024 / (bytes + 1024), by_threads = 2048 / threads;
  return by_memory < by_threads ? by_memory : by_threads;
}

// The README's table of shared memory.
inline void print_budget() {
  std::printf("Bytes of a block at d %d, and how many blocks fit by shared memory and threads:\n\n", HEAD_DIM);
  std::printf("| kernel | K and V | S and P | in all | A100, 164 KB an SM | RTX 30 and 40, 100 KB | H200, 228 KB |\n");
  std::printf("|---|---|---|---|---|---|---|\n");
  for_each_rung([](const char* name, auto tile) {
    using T = decltype(tile);
    constexpr int kBytes = T::kKvBytes + T::kScoreBytes;
    std::printf("| `%s` | %d | %d | %d | %d | %d | %d |\n", name, T::kKvBytes, T::kScoreBytes, kBytes,
                blocks_that_fit(164, kBytes, T::kThreads), blocks_that_fit(100, kBytes, T::kThreads),
                blocks_that_fit(228, kBytes, T::kThreads));
  });
}
