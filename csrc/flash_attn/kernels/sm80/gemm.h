// GEMMs on mma.sync with operands in shared memory or registers. ldmatrix loads the fragments of a k-slice during the
// MMA of the previous one.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "kernels/common/accumulator.h"
#include "kernels/sm80/operand_layouts.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace sm80 {

// Which operand of an MMA, and how its tile is stored: kPlain (rows, k), as the MMA needs it, kTransposed (k, rows).
enum class Side { kA, kB };
enum class Operand { kPlain, kTransposed };

// An operand in shared memory as the 16 x 16 squares that ldmatrix.x4 loads. A warp's squares are those of kBands bands
// of 16 rows of the operand, kWarps * 16 rows apart, and of kSlices slices of 16 k. Addresses are plain arithmetic: the
// types of CuTe's tiled copies take most of a kernel's compile time.
template <Side kSide, Operand kOperand, class Mma, class Tile>
struct OperandSquares {
  using Element = typename Tile::value_type;
  using Layout = typename Tile::layout_type;
  using Threads = typename Mma::ThrLayoutVMNK;
  static constexpr bool kPlain = kOperand == Operand::kPlain;
  static constexpr int kRows = decltype(cute::size<0>(Layout{}))::value;  // as stored
  static constexpr int kCols = decltype(cute::size<1>(Layout{}))::value;
  static constexpr int kWarpsM = decltype(cute::size<1>(Threads{}))::value;
  static constexpr int kWarps = kSide == Side::kA ? kWarpsM : decltype(cute::size<2>(Threads{}))::value;
  static constexpr int kBandStep = 16 * kWarps;
  static constexpr int kBands = (kPlain ? kRows : kCols) / kBandStep;
  static constexpr int kSlices = (kPlain ? kCols : kRows) / 16;
  static constexpr bool kSwizzled = std::is_same_v<Layout, SwizzledTile<kRows, kCols>>;
  static constexpr int kAtomCols = swizzle_atom_cols(kCols);
  static constexpr int kBytes = static_cast<int>(sizeof(Element));
  static_assert((kWarps & (kWarps - 1)) == 0, "columns of a lane and of a square have no bits in common");

  // Registers of an operand: ((2, 2, 2), MMA_M, MMA_K) or ((2, 2), MMA_N, MMA_K).
  using FragmentLayout = std::conditional_t<
      kSide == Side::kA,
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::Int<kBands>, cute::Int<kSlices>>>,
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::Int<2 * kBands>, cute::Int<kSlices>>>>;

  const char* data;
  int row, col;  // of the 16-byte vector that this lane passes to ldmatrix in band 0, slice 0
  int offset;    // of it, in bytes

  CUTE_HOST_DEVICE OperandSquares(const Tile& tile, int thread)
      : data(reinterpret_cast<const char*>(cute::raw_pointer_cast(tile.data()))) {
    const int lane = thread % 32, warp = thread / 32;
    const int band = kWarps == 1 ? 0 : kSide == Side::kA ? warp % kWarpsM : warp / kWarpsM;
    constexpr bool kRowsFirst = (kSide == Side::kA) == kPlain;  // the second 8 x 8 matrix is below the first
    row = kRowsFirst ? lane % 16 : lane / 16 * 8 + lane % 8;
    col = kRowsFirst ? lane / 16 * 8 : lane / 8 % 2 * 8;
    const int swizzle = row * kAtomCols / 64 % (kAtomCols / 8) * 8 * kBytes;
    (kPlain ? row : col) += 16 * band;
    offset = (col / kAtomCols * kRows * kAtomCols + row * kAtomCols + col % kAtomCols) * kBytes ^ swizzle;
  }

  CUTE_HOST_DEVICE const void* square(int band, int slice) const {
    const int rows = kPlain ? band * kBandStep : slice * 16, cols = kPlain ? slice * 16 : band * kBandStep;
    if constexpr (kSwizzled) {
      const int atom_row = cols / kAtomCols * kRows + rows;
      return data + (offset ^ cols % kAtomCols * kBytes) + atom_row * kAtomCols * kBytes;
    } else {
      return data + Layout{}(row + rows, col + cols) * kBytes;
    }
  }

  template <class Fragment>
  __device__ __forceinline__ void load(Fragment& fragment, int slice) const {
    static_assert(std::is_same_v<typename Fragment::layout_type, FragmentLayout>, "the registers of a square in a row");
    auto* const registers = reinterpret_cast<uint32_t (*)[4]>(cute::raw_pointer_cast(fragment.data()));
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      uint32_t (&to)[4] = registers[band + kBands * slice];
      if constexpr (kPlain) {
        load_matrices(to, square(band, slice));
      } else {
        load_matrices_transposed(to, square(band, slice));
      }
    }
  }
};

// The register fragment of an operand.
template <Side kSide, Operand kOperand, class Mma, class Tile>
using OperandFragment = decltype(cute::make_tensor<typename Tile::value_type>(
    typename OperandSquares<kSide, kOperand, Mma, Tile>::FragmentLayout{}));

// A function of k that loads k-slice k of an operand in shared memory into its fragment. `thread`: index among those
// of the MMA.
template <Side kSide, Operand kOperand, class Mma, class Fragment, class Tile>
__device__ __forceinline__ auto operand_loader(const Mma&, Fragment& fragment, const Tile& tile,
                                               int thread = threadIdx.x) {
  OperandSquares<kSide, kOperand, Mma, Tile> squares(tile, thread);
  // Otherwise the compiler computes all XORs of a loop before it, and spills.
  if constexpr (kOperand == Operand::kPlain) asm volatile("" : "+r"(squares.offset));
  return [&fragment, squares](int k) { squares.load(fragment, k); };
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

// acc (M, N) += a (M, K) b (N, K)^T, both in shared memory, stored as kA and kB say.
template <Operand kA, Operand kB, class Mma, class Acc, class A, class B>
__device__ __forceinline__ void gemm_smem(const Mma& mma, Acc& acc, const A& a, const B& b, int thread = threadIdx.x) {
  OperandFragment<Side::kA, kA, Mma, A> tCrA;
  OperandFragment<Side::kB, kB, Mma, B> tCrB;
  auto load_a = operand_loader<Side::kA, kA>(mma, tCrA, a, thread);
  auto load_b = operand_loader<Side::kB, kB>(mma, tCrB, b, thread);
  gemm_slices(mma, acc, tCrA, tCrB, [&](int k) {
    load_a(k);
    load_b(k);
  });
}

// The same with a in registers, laid out as an A operand.
template <Operand kB, class Mma, class Acc, class A, class B>
__device__ __forceinline__ void gemm_registers(const Mma& mma, Acc& acc, const A& tCrA, const B& b) {
  OperandFragment<Side::kB, kB, Mma, B> tCrB;
  gemm_slices(mma, acc, tCrA, tCrB, operand_loader<Side::kB, kB>(mma, tCrB, b));
}

// gemm_smem() where the first k-slices of b, or all of them, are in registers as well: laid out as a B operand.
template <Operand kA, Operand kB, class Mma, class Acc, class A, class Head, class B>
__device__ __forceinline__ void gemm_b_head(const Mma& mma, Acc& acc, const A& a, const Head& head, const B& b) {
  using namespace cute;
  constexpr int kHeadSlices = decltype(size<2>(head))::value;
  OperandFragment<Side::kA, kA, Mma, A> tCrA;
  OperandFragment<Side::kB, kB, Mma, B> tCrB;
#pragma unroll
  for (int k = 0; k < kHeadSlices; ++k) copy(head(_, _, k), tCrB(_, _, k));
  auto load_a = operand_loader<Side::kA, kA>(mma, tCrA, a);
  auto load_b = operand_loader<Side::kB, kB>(mma, tCrB, b);
  gemm_slices(mma, acc, tCrA, tCrB, [&](int k) {
    load_a(k);
    if (k >= kHeadSlices) load_b(k);
  });
}

// A whole B operand (N, K) from shared memory into its registers.
template <Operand kB, class Mma, class Fragment, class B>
__device__ __forceinline__ void load_b(const Mma& mma, Fragment& tCrB, const B& b) {
  auto load = operand_loader<Side::kB, kB>(mma, tCrB, b);
#pragma unroll
  for (int k = 0; k < decltype(cute::size<2>(tCrB))::value; ++k) load(k);
}

}  // namespace sm80
}  // namespace flash
