// The Hopper ladder: each rung is the one before and one technique more; from 6 on they are the last one with one
// technique less. -DRUNG=4 leaves one of them. Also their launch.
#pragma once

#include "../minimal/reference.h"
#include "hopper_attention.cu"

#ifndef RUNG
#define RUNG 0  // all
#endif

template <int kNumber, class T, class Visit>
void visit_rung(const char* name, const Visit& visit) {
  if constexpr (RUNG == 0 || RUNG == kNumber) visit(name, T());
}

// Calls visit(name, T()) with the types that describe the kernels.
template <class Visit>
void for_each_rung(const Visit& visit) {
  visit_rung<1, Rung<false, false, false, false>>("wgmma_alone", visit);
  visit_rung<2, Rung<true, false, false, false>>("tma", visit);
  visit_rung<3, Rung<true, true, false, false>>("producer", visit);
  visit_rung<4, Rung<true, true, true, false>>("overlap", visit);
  visit_rung<5, Rung<true, true, true, true>>("ping_pong", visit);
  visit_rung<6, Rung<true, true, false, true>>("no_overlap", visit);
  visit_rung<7, Rung<true, false, true, false>>("no_producer", visit);
  visit_rung<8, Rung<false, false, true, false>>("no_tma", visit);
}

#ifdef __CUDACC__
constexpr int kDynamicBytes = sizeof(Shared);

template <class T>
constexpr auto kernel_of() {
  return hopper_kernel<T>;
}

// cuTensorMapEncodeTiled, found at run time: nothing links against the driver.
inline auto tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// Boxes of 64 columns and 128 rows of one head.
inline TensorMap map_of(const void* tensor, const Shape& shape) {
  const auto length = [](int value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t row = length(shape.heads) * shape.head_dim * 2;
  const cuuint64_t lengths[] = {length(shape.head_dim), length(shape.heads), length(shape.seqlen), length(shape.batch)};
  const cuuint64_t strides[] = {length(shape.head_dim) * 2, row, row * shape.seqlen};  // bytes, but for the columns'
  const cuuint32_t box[] = {kAtomCols, 1, 128, 1}, steps[] = {1, 1, 1, 1};
  TensorMap map;
  static const auto encode = tensor_map_encoder();
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<void*>(tensor), lengths, strides,
                                 box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) std::fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", status);
  return map;
}

template <class T>
void launch_rung(dim3 grid, const Problem& problem, const Shape& shape) {
  static const cudaError_t allowed =
      cudaFuncSetAttribute(kernel_of<T>(), cudaFuncAttributeMaxDynamicSharedMemorySize, kDynamicBytes);
  if (allowed != cudaSuccess) std::fprintf(stderr, "shared memory: %s\n", cudaGetErrorString(allowed));
  const Maps maps{map_of(problem.q, shape), map_of(problem.k, shape), map_of(problem.v, shape)};
  kernel_of<T>()<<<grid, T::kThreads, kDynamicBytes>>>(problem, maps);
}
#endif
