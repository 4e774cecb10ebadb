// GEMMs on mma.sync with operands in shared memory or registers. ldmatrix loads fragments one k-slice ahead of the MMA.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"

namespace flash {
namespace sm80 {

// kPlain: the tile is stored (rows, k), as the MMA needs it. kTransposed: it is stored (k, rows) and passed as its
// (rows, k) view.
enum class Operand { kPlain, kTransposed };

template <class Element, Operand kOperand>
using LdMatrix = std::conditional_t<kOperand == Operand::kPlain, cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>,
                                    cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>>;

// The (cols, rows) view of a (rows, cols) tile in shared memory.
template <class Tensor>
__device__ __forceinline__ auto transposed(const Tensor& tile) {
  using namespace cute;
  constexpr auto rows = size<0>(typename Tensor::layout_type{});
  constexpr auto cols = size<1>(typename Tensor::layout_type{});
  return make_tensor(tile.data(), composition(tile.layout(), make_layout(make_shape(cols, rows), GenRowMajor{})));
}

// The register fragment of an operand, from an unswizzled layout of the same shape: swizzles do not apply to registers.
template <class Mma, class Smem>
__device__ __forceinline__ auto a_fragment(const Mma& mma, const Smem& smem) {
  using namespace cute;
  return mma.get_thread_slice(threadIdx.x).partition_fragment_A(make_tensor(smem.data(), make_layout(shape(smem))));
}

template <class Mma, class Smem>
__device__ __forceinline__ auto b_fragment(const Mma& mma, const Smem& smem) {
  using namespace cute;
  return mma.get_thread_slice(threadIdx.x).partition_fragment_B(make_tensor(smem.data(), make_layout(shape(smem))));
}

// acc (M, N) += a (M, K) b (N, K)^T, both in shared memory.
template <Operand kA, Operand kB, class Mma, class Acc, class A, class B>
__device__ __forceinline__ void gemm_smem(const Mma& mma, Acc& acc, const A& a, const B& b) {
  using namespace cute;
  using Element = typename A::value_type;
  const LdMatrix<Element, kA> load_a;
  const LdMatrix<Element, kB> load_b;
  auto tCrA = a_fragment(mma, a);  // (MMA, MMA_M, MMA_K)
  auto tCrB = b_fragment(mma, b);  // (MMA, MMA_N, MMA_K)
  const auto copy_a = make_tiled_copy_A(load_a, mma).get_thread_slice(threadIdx.x);
  const auto copy_b = make_tiled_copy_B(load_b, mma).get_thread_slice(threadIdx.x);
  auto tCsA = copy_a.partition_S(a);
  auto tCsB = copy_b.partition_S(b);
  auto tA = copy_a.retile_D(tCrA);
  auto tB = copy_b.retile_D(tCrB);
  constexpr int kSlices = decltype(size<2>(tCrA))::value;
  copy(load_a, tCsA(_, _, 0), tA(_, _, 0));
  copy(load_b, tCsB(_, _, 0), tB(_, _, 0));
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    if (k + 1 < kSlices) {
      copy(load_a, tCsA(_, _, k + 1), tA(_, _, k + 1));
      copy(load_b, tCsB(_, _, k + 1), tB(_, _, k + 1));
    }
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

// acc (M, N) += a (M, K) b (N, K)^T with a in registers, laid out as an A operand.
template <Operand kB, class Mma, class Acc, class A, class B>
__device__ __forceinline__ void gemm_registers(const Mma& mma, Acc& acc, const A& tCrA, const B& b) {
  using namespace cute;
  const LdMatrix<typename B::value_type, kB> load_b;
  auto tCrB = b_fragment(mma, b);  // (MMA, MMA_N, MMA_K)
  const auto copy_b = make_tiled_copy_B(load_b, mma).get_thread_slice(threadIdx.x);
  auto tCsB = copy_b.partition_S(b);
  auto tB = copy_b.retile_D(tCrB);
  constexpr int kSlices = decltype(size<2>(tCrA))::value;
  copy(load_b, tCsB(_, _, 0), tB(_, _, 0));
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    if (k + 1 < kSlices) copy(load_b, tCsB(_, _, k + 1), tB(_, _, k + 1));
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

// A B operand (N, K) from shared memory into its registers.
template <Operand kB, class Mma, class Fragment, class B>
__device__ __forceinline__ void load_b(const Mma& mma, Fragment& tCrB, const B& b) {
  using namespace cute;
  const LdMatrix<typename B::value_type, kB> load;
  const auto copy_b = make_tiled_copy_B(load, mma).get_thread_slice(threadIdx.x);
  auto tB = copy_b.retile_D(tCrB);
  copy(load, copy_b.partition_S(b), tB);
}

// acc (M, N) += a (M, K) b (N, K)^T with b in registers, laid out as a B operand.
template <Operand kA, class Mma, class Acc, class A, class B>
__device__ __forceinline__ void gemm_b_registers(const Mma& mma, Acc& acc, const A& a, const B& tCrB) {
  using namespace cute;
  const LdMatrix<typename A::value_type, kA> load_a;
  auto tCrA = a_fragment(mma, a);  // (MMA, MMA_M, MMA_K)
  const auto copy_a = make_tiled_copy_A(load_a, mma).get_thread_slice(threadIdx.x);
  auto tCsA = copy_a.partition_S(a);
  auto tA = copy_a.retile_D(tCrA);
  constexpr int kSlices = decltype(size<2>(tCrA))::value;
  copy(load_a, tCsA(_, _, 0), tA(_, _, 0));
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    if (k + 1 < kSlices) copy(load_a, tCsA(_, _, k + 1), tA(_, _, k + 1));
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

}  // namespace sm80
}  // namespace flash
