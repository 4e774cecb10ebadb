// Accumulators of mma.sync to 16-bit tiles in shared memory.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/sm80/operand_layouts.h"

namespace flash {
namespace sm80 {

// Converts accumulators to Elements in a tile of shared memory, pairs of neighbouring columns at a time. Addresses are
// plain arithmetic, as in OperandSquares.
template <class Element, class Mma, class Accumulator, class Tile>
__device__ __forceinline__ void stage_accumulator(const Mma&, const Accumulator& accumulator, const Tile& tile) {
  using Layout = typename Tile::layout_type;
  using Threads = typename Mma::ThrLayoutVMNK;
  using Coords =
      AccumulatorCoords<decltype(cute::size<1>(Threads{}))::value, decltype(cute::size<2>(Threads{}))::value>;
  constexpr int kRows = decltype(cute::size<0>(Layout{}))::value, kCols = decltype(cute::size<1>(Layout{}))::value;
  constexpr int kAtomCols = swizzle_atom_cols(kCols);
  const Coords coords;
  const int swizzle = coords.row0 * kAtomCols / 64 % (kAtomCols / 8) * 8;
  const int offset =
      (coords.col0 / kAtomCols * kRows * kAtomCols + coords.row0 * kAtomCols + coords.col0 % kAtomCols) ^ swizzle;
  Element* const data = cute::raw_pointer_cast(tile.data());
  const auto values = row_col_view(accumulator);
  constexpr Coords kOrigin(0, 0);
#pragma unroll
  for (int ni = 0; ni < decltype(cute::size<1>(values))::value; ni += 2) {
#pragma unroll
    for (int mi = 0; mi < decltype(cute::size<0>(values))::value; ++mi) {
      const int row = kOrigin.row(mi), col = kOrigin.col(ni);
      Element* to;
      if constexpr (std::is_same_v<Layout, SwizzledTile<kRows, kCols>>) {
        to = data + (offset ^ col % kAtomCols) + (col / kAtomCols * kRows + row) * kAtomCols;
      } else {
        to = data + Layout{}(coords.row(mi), coords.col(ni));
      }
      *reinterpret_cast<uint32_t*>(to) = pack_pair(values(mi, ni), values(mi, ni + 1), Element{});
    }
  }
}

}  // namespace sm80
}  // namespace flash
