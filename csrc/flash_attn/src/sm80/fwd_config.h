// Everything the mma.sync forward derives from (dtype, head dim, variant): tile, MMA, shared layouts, copies.
#pragma once

#include <cute/tensor.hpp>

#include "../plan/tiles.h"
#include "common/row_loader.h"
#include "flash.h"

namespace flash {

// Features that measurably need their own kernel; all others are run-time fields of Flash_fwd_params.
enum class FwdVariant { kPlain, kDropout };

template <Dtype kDtype, int kHeadDim_, FwdVariant kVariant_>
struct FwdConfig {
  using Element = std::conditional_t<kDtype == Dtype::kFp16, cutlass::half_t, cutlass::bfloat16_t>;
  static constexpr FwdVariant kVariant = kVariant_;
  static constexpr plan::FwdTile kTile = plan::fwd_tile(kHeadDim_, kVariant == FwdVariant::kDropout);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kStages = kTile.kv_stages;
  static_assert(kHeadDim == kHeadDim_, "HEADDIM_SWITCH and plan/tiles.h list the same head dims");
  static_assert(kBlockM % (16 * kWarps) == 0, "a warp owns whole 16-row bands");
  static_assert(kBlockN % 16 == 0, "P V multiplies 16 keys at a time");

  using MmaAtom = std::conditional_t<kDtype == Dtype::kFp16, cute::MMA_Atom<cute::SM80_16x8x16_F32F16F16F32_TN>,
                                     cute::MMA_Atom<cute::SM80_16x8x16_F32BF16BF16F32_TN>>;
  using TiledMma = cute::TiledMMA<MmaAtom, cute::Layout<cute::Shape<cute::Int<kWarps>, cute::_1, cute::_1>>,
                                  cute::Tile<cute::Int<16 * kWarps>, cute::_16, cute::_16>>;

  // Rows of 64 (or 32) elements are XOR-swizzled in 16-byte chunks: ldmatrix and cp.async meet no bank conflict.
  static constexpr int kAtomCols = kHeadDim % 64 == 0 ? 64 : 32;
  using SmemAtom = decltype(cute::composition(
      cute::Swizzle < kAtomCols == 64 ? 3 : 2, 3, 3 > {},
      cute::Layout<cute::Shape<cute::_8, cute::Int<kAtomCols>>, cute::Stride<cute::Int<kAtomCols>, cute::_1>>{}));
  using SmemLayoutQ = decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>>{}));
  using SmemLayoutKv = decltype(cute::tile_to_shape(
      SmemAtom{}, cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));
  using RowCopyT = RowCopy<Element, kThreads, kAtomCols, kHeadDim>;

  static constexpr int kSmemQ = kBlockM * kHeadDim;             // elements
  static constexpr int kSmemKv = kBlockN * kHeadDim * kStages;  // elements, each of K and V
  static constexpr int kSmemBytes = plan::fwd_smem_bytes(kTile);
  static_assert(kSmemBytes == static_cast<int>(sizeof(Element)) * (kSmemQ + 2 * kSmemKv), "plan and kernel agree");
};

}  // namespace flash
