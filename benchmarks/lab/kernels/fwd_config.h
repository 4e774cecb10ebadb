// The laboratory's design as types: MMA, layouts, copies. One design for each compilation: LAB_DESIGN, its fields in
// braces.
#pragma once

#include <cute/tensor.hpp>

#include "fwd_design.h"
#include "kernels/common/accumulator.h"
#include "kernels/common/row_loader.h"
#include "kernels/sm80/operand_layouts.h"

namespace flash {
namespace lab {

constexpr FwdDesign kDesign LAB_DESIGN;

template <Layout kLayout, int kRows, int kCols>
using SmemTile = std::conditional_t<kLayout == Layout::kSwizzled, sm80::SwizzledTile<kRows, kCols>,
                                    cute::Layout<cute::Shape<cute::Int<kRows>, cute::Int<kCols>>,
                                                 cute::Stride<cute::Int<row_pitch(kLayout, kCols)>, cute::_1>>>;

struct FwdConfig {
  using Element = ElementOf<kDesign.dtype>;
  static constexpr int kHeadDim = kDesign.head_dim;
  static constexpr int kBlockM = kDesign.block_m;
  static constexpr int kBlockN = kDesign.block_n;
  static constexpr int kWarps = kDesign.warps;
  static constexpr int kThreads = 32 * kWarps;

  using TiledMma = WarpGridMma<sm80::MmaAtomOf<kDesign.dtype>, kWarps, 1>;
  using SmemLayoutQ = SmemTile<kDesign.layout, kBlockM, kHeadDim>;
  using SmemLayoutKv = SmemTile<kDesign.layout, kBlockN, kHeadDim>;
  using RowCopyT = RowCopy<Element, kThreads, kAtomCols, kHeadDim>;
  static_assert(kBlockM % RowCopyT::kRowsPerIteration == 0 && kBlockN % RowCopyT::kRowsPerIteration == 0,
                "whole iterations of a copy");

  static constexpr int kSmemQ = tile_elements(kDesign.layout, kBlockM, kHeadDim);   // elements
  static constexpr int kSmemKv = tile_elements(kDesign.layout, kBlockN, kHeadDim);  // elements, each of K and V
  static constexpr int kSmemBytes = smem_bytes(kDesign);
  static_assert(kSmemBytes == static_cast<int>(sizeof(Element)) * (kSmemQ + 2 * kSmemKv));
};

}  // namespace lab
}  // namespace flash
