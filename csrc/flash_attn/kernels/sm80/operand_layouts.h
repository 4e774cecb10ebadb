// MMA atoms and shared memory layouts of the mma.sync forward and backward.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/convert.h"
#include "plan/tiles.h"

namespace flash {
namespace sm80 {

template <Dtype kDtype>
using MmaAtomOf = std::conditional_t<kDtype == Dtype::kFp16, cute::MMA_Atom<cute::SM80_16x8x16_F32F16F16F32_TN>,
                                     cute::MMA_Atom<cute::SM80_16x8x16_F32BF16BF16F32_TN>>;

using plan::swizzle_atom_cols;

// Rows of 64 (or 32) elements are XOR-swizzled in 16-byte vectors: ldmatrix and cp.async have no bank conflicts.
template <int kCols>
using SwizzleAtom =
    decltype(cute::composition(cute::Swizzle<swizzle_atom_cols(kCols) == 64 ? 3 : 2, 3, 3>{},
                               cute::Layout<cute::Shape<cute::_8, cute::Int<swizzle_atom_cols(kCols)>>,
                                            cute::Stride<cute::Int<swizzle_atom_cols(kCols)>, cute::_1>>{}));

template <int kRows, int kCols>
using SwizzledTile =
    decltype(cute::tile_to_shape(SwizzleAtom<kCols>{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));

}  // namespace sm80
}  // namespace flash
