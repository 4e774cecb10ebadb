// Compile-time configuration of the mma.sync forward by (dtype, head dim, variant): tile, MMA, shared memory layouts,
// copies.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "kernels/common/accumulator.h"
#include "kernels/common/row_loader.h"
#include "kernels/sm80/fwd_launch_params.h"
#include "kernels/sm80/operand_layouts.h"
#include "params/flash.h"
#include "plan/tiles.h"

namespace flash {
namespace sm80 {

// Only features that measurably need a separate kernel; all others are run-time fields of Flash_fwd_params.
using plan::FwdVariant;

template <Dtype kDtype, int kHeadDim_, FwdVariant kVariant_>
struct FwdConfig {
  using Element = ElementOf<kDtype>;
  static constexpr FwdVariant kVariant = kVariant_;
  static constexpr bool kMayDrop = kVariant == FwdVariant::kDropout;  // also origins, biases and masks as data
  using Params = std::conditional_t<kMayDrop, Flash_fwd_general_params, Flash_fwd_params>;
  static constexpr plan::FwdTile kTile = plan::fwd_tile(kHeadDim_, kVariant);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps;
  static constexpr int kColWarps = kTile.col_warps;
  static constexpr int kRowWarps = kWarps / kColWarps;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kHeadDim == kHeadDim_, "HEADDIM_SWITCH and plan/tiles.h list the same head dims");
  static_assert(kBlockM % (16 * kRowWarps) == 0, "a warp owns whole 16-row MMA tiles");
  static_assert(kBlockN % (16 * kColWarps) == 0, "P V multiplies 16 keys at a time");

  using TiledMma = WarpGridMma<MmaAtomOf<kDtype>, kRowWarps, kColWarps>;
  using Coords = AccumulatorCoords<kRowWarps, kColWarps>;
  static constexpr int kAtomCols = swizzle_atom_cols(kHeadDim);
  using SmemLayoutQ = SwizzledTile<kBlockM, kHeadDim>;
  using SmemLayoutKv = SwizzledTile<kBlockN, kHeadDim>;
  using RowCopyT = RowCopy<Element, kThreads, kAtomCols, kHeadDim>;

  static constexpr int kSmemQ = kBlockM * kHeadDim;   // elements
  static constexpr int kSmemKv = kBlockN * kHeadDim;  // elements, each of K and V
  static constexpr int kExchangeAt = static_cast<int>(sizeof(Element)) * (kSmemQ + 2 * kSmemKv);  // RowExchange
  static constexpr int kSmemBytes = plan::fwd_smem_bytes(kTile, kDtype);
  static_assert(kSmemBytes == kExchangeAt + plan::fwd_exchange_bytes(kTile, kDtype), "plan and kernel agree");
};

}  // namespace sm80
}  // namespace flash
