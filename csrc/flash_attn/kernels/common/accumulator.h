// The only file that knows the layout of accumulators in a warp's threads, for mma.sync m16n8k16 and wgmma m64nNk16
// alike. Lane 4 g + t holds rows {g, g + 8} and columns {2 t, 2 t + 1} of every 16 x 8 tile; warp w owns the 16-row
// bands w, w + warps, ...
#pragma once

#include <cute/tensor.hpp>

namespace flash {

// ((2, 2), MMA_M, MMA_N) -> ((2, MMA_M), (2, MMA_N)): rows first. wgmma: ((2, 2, N / 8), 1, 1) -> (2, (2, N / 8)).
template <class Layout>
CUTE_HOST_DEVICE constexpr auto row_col_layout(Layout layout) {
  using namespace cute;
  if constexpr (decltype(rank<0>(layout))::value == 3) {
    return make_layout(get<0, 1>(layout), make_layout(get<0, 0>(layout), get<0, 2>(layout)));
  } else {
    static_assert(decltype(size<0>(layout))::value == 4, "an m16n8 accumulator holds four values per thread");
    return make_layout(make_layout(get<0, 1>(layout), get<1>(layout)), make_layout(get<0, 0>(layout), get<2>(layout)));
  }
}

template <class Tensor>
CUTE_HOST_DEVICE auto row_col_view(Tensor& accumulator) {
  return cute::make_tensor(accumulator.data(), row_col_layout(accumulator.layout()));
}

// The same for an accumulator of the transposed matrix (its columns are the rows). wgmma: ((2, N / 8), 2).
template <class Layout>
CUTE_HOST_DEVICE constexpr auto transposed_row_col_layout(Layout layout) {
  const auto plain = row_col_layout(layout);
  return cute::make_layout(cute::get<1>(plain), cute::get<0>(plain));
}

template <class Tensor>
CUTE_HOST_DEVICE auto transposed_row_col_view(Tensor& accumulator) {
  return cute::make_tensor(accumulator.data(), transposed_row_col_layout(accumulator.layout()));
}

// ((2, 2), MMA_M, MMA_N) -> ((2, 2, 2), MMA_M, MMA_N / 2): two adjacent accumulators form one A operand.
template <class Layout>
CUTE_HOST_DEVICE constexpr auto a_operand_layout(Layout layout) {
  using namespace cute;
  auto pairs = logical_divide(layout, Shape<Underscore, Underscore, _2>{});  // ((2, 2), MMA_M, (2, MMA_N / 2))
  return make_layout(make_layout(get<0>(pairs), get<2, 0>(pairs)), get<1>(pairs), get<2, 1>(pairs));
}

// Row and column of element (mi, ni) of a row_col_view within the tile, for a grid of kWarpsM x kWarpsN warps. A warp
// owns the 16-column bands wn, wn + kWarpsN, ...
template <int kWarpsM, int kWarpsN = 1>
struct AccumulatorCoords {
  static constexpr int kRowsApart8 = 1;  // distance, in indices, of rows that are 8 apart within a 16 x 16 square
  static constexpr int kColsApart8 = 2;  // the same for columns

  int row0;
  int col0;

  __device__ __forceinline__ AccumulatorCoords() : AccumulatorCoords(threadIdx.x) {}

  CUTE_HOST_DEVICE constexpr AccumulatorCoords(int row, int col) : row0(row), col0(col) {}

  // `thread`: index among the threads that share the tile.
  __device__ __forceinline__ explicit AccumulatorCoords(unsigned thread)
      : row0((thread / 32) % kWarpsM * 16 + (thread % 32) / 4), col0((thread / 32) / kWarpsM * 16 + (thread % 4) * 2) {}

  CUTE_HOST_DEVICE constexpr int row(int mi) const { return row0 + (mi % 2) * 8 + (mi / 2) * 16 * kWarpsM; }
  CUTE_HOST_DEVICE constexpr int col(int ni) const {
    return col0 + (ni % 2) + (ni / 2 % 2) * 8 + (ni / 4) * 16 * kWarpsN;
  }
};

// Coordinates of a transposed_row_col_view.
template <class Coords>
struct TransposedCoords {
  static constexpr int kRowsApart8 = Coords::kColsApart8;
  static constexpr int kColsApart8 = Coords::kRowsApart8;

  Coords coords;

  __device__ __forceinline__ int row(int mi) const { return coords.col(mi); }
  __device__ __forceinline__ int col(int ni) const { return coords.row(ni); }
};

// kWarpsM x kWarpsN warps, warps first along the rows, as AccumulatorCoords expects.
template <class Atom, int kWarpsM, int kWarpsN>
using WarpGridMma = cute::TiledMMA<Atom, cute::Layout<cute::Shape<cute::Int<kWarpsM>, cute::Int<kWarpsN>, cute::_1>>,
                                   cute::Tile<cute::Int<16 * kWarpsM>,
                                              cute::Layout<cute::Shape<cute::_8, cute::Int<kWarpsN>, cute::_2>,
                                                           cute::Stride<cute::_1, cute::_16, cute::_8>>,
                                              cute::_16>>;

// The four lanes of a quad hold the columns of one row between them.
__device__ __forceinline__ float quad_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 2));
  return fmaxf(value, __shfl_xor_sync(0xffffffffu, value, 1));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 2);
  return value + __shfl_xor_sync(0xffffffffu, value, 1);
}

}  // namespace flash
