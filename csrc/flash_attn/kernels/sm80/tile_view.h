// Accumulators of multiply() as the matrix that code for accumulators takes.
#pragma once

#include <cute/tensor_impl.hpp>

namespace flash {
namespace sm80 {

// 16 x 8 tiles by rows and columns, as a row_col_view.
template <int kRowTiles, int kColTiles>
__device__ __forceinline__ auto tile_view(float (&tiles)[kRowTiles][kColTiles][4]) {
  using namespace cute;
  using View = Layout<Shape<Shape<_2, Int<kRowTiles>>, Shape<_2, Int<kColTiles>>>,
                      Stride<Stride<_2, Int<4 * kColTiles>>, Stride<_1, _4>>>;
  return make_tensor(&tiles[0][0][0], View{});
}

}  // namespace sm80
}  // namespace flash
