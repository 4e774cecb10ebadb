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

// A function of k that loads k-slice k of an A operand (M, K) in shared memory into its fragment.
template <Operand kA, class Mma, class Fragment, class A>
__device__ __forceinline__ auto a_loader(const Mma& mma, Fragment& tCrA, const A& a) {
  using namespace cute;
  const LdMatrix<typename A::value_type, kA> load;
  const auto copy_a = make_tiled_copy_A(load, mma).get_thread_slice(threadIdx.x);
  return [load, from = copy_a.partition_S(a), to = copy_a.retile_D(tCrA)](int k) mutable {
    copy(load, from(_, _, k), to(_, _, k));
  };
}

// The same of a B operand (N, K).
template <Operand kB, class Mma, class Fragment, class B>
__device__ __forceinline__ auto b_loader(const Mma& mma, Fragment& tCrB, const B& b) {
  using namespace cute;
  const LdMatrix<typename B::value_type, kB> load;
  const auto copy_b = make_tiled_copy_B(load, mma).get_thread_slice(threadIdx.x);
  return [load, from = copy_b.partition_S(b), to = copy_b.retile_D(tCrB)](int k) mutable {
    copy(load, from(_, _, k), to(_, _, k));
  };
}

// acc += A B^T of fragments (MMA, MMA_M, MMA_K) and (MMA, MMA_N, MMA_K); load(k): their k-slice k.
template <class Mma, class Acc, class A, class B, class Load>
__device__ __forceinline__ void gemm_slices(const Mma& mma, Acc& acc, const A& tCrA, const B& tCrB, Load load) {
  using namespace cute;
  constexpr int kSlices = decltype(size<2>(tCrA))::value;
  load(0);
#pragma unroll
  for (int k = 0; k < kSlices; ++k) {
    if (k + 1 < kSlices) load(k + 1);
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  }
}

// acc (M, N) += a (M, K) b (N, K)^T, both in shared memory.
template <Operand kA, Operand kB, class Mma, class Acc, class A, class B>
__device__ __forceinline__ void gemm_smem(const Mma& mma, Acc& acc, const A& a, const B& b) {
  auto tCrA = a_fragment(mma, a);
  auto tCrB = b_fragment(mma, b);
  auto load_a = a_loader<kA>(mma, tCrA, a);
  auto load_b = b_loader<kB>(mma, tCrB, b);
  gemm_slices(mma, acc, tCrA, tCrB, [&](int k) {
    load_a(k);
    load_b(k);
  });
}

// The same with a in registers, laid out as an A operand.
template <Operand kB, class Mma, class Acc, class A, class B>
__device__ __forceinline__ void gemm_registers(const Mma& mma, Acc& acc, const A& tCrA, const B& b) {
  auto tCrB = b_fragment(mma, b);
  gemm_slices(mma, acc, tCrA, tCrB, b_loader<kB>(mma, tCrB, b));
}

// gemm_smem() where the first k-slices of b, or all of them, are in registers as well: laid out as a B operand.
template <Operand kA, Operand kB, class Mma, class Acc, class A, class Head, class B>
__device__ __forceinline__ void gemm_b_head(const Mma& mma, Acc& acc, const A& a, const Head& head, const B& b) {
  using namespace cute;
  constexpr int kHeadSlices = decltype(size<2>(head))::value;
  auto tCrA = a_fragment(mma, a);
  auto tCrB = b_fragment(mma, b);
#pragma unroll
  for (int k = 0; k < kHeadSlices; ++k) copy(head(_, _, k), tCrB(_, _, k));
  auto load_a = a_loader<kA>(mma, tCrA, a);
  auto load_b = b_loader<kB>(mma, tCrB, b);
  gemm_slices(mma, acc, tCrA, tCrB, [&](int k) {
    load_a(k);
    if (k >= kHeadSlices) load_b(k);
  });
}

// A whole B operand (N, K) from shared memory into its registers.
template <Operand kB, class Mma, class Fragment, class B>
__device__ __forceinline__ void load_b(const Mma& mma, Fragment& tCrB, const B& b) {
  auto load = b_loader<kB>(mma, tCrB, b);
#pragma unroll
  for (int k = 0; k < decltype(cute::size<2>(tCrB))::value; ++k) load(k);
}

}  // namespace sm80
}  // namespace flash
