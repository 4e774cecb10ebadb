// Compile-time configuration of the two-pass wgmma backward (above head dim 128, and many short sequences at 128):
// tiles of 64 rows or 64 keys, one kernel for dK and dV, one for dQ.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/sm90/bwd_variant.h"
#include "params/flash.h"
#include "plan/bwd_tiles.h"

namespace flash {
namespace sm90 {

template <Dtype kDtype_, int kHeadDim_, BwdVariant kVariant, int kHeadDimV_>
struct BwdTwoPassConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr bool kListed = kVariant == BwdVariant::kListed;
  static constexpr bool kPassesSteps = false;
  static constexpr bool kIsGeneral = kVariant == BwdVariant::kGeneral || kListed;
  static constexpr bool kMayDrop = kIsGeneral;
  static constexpr bool kMayAccumulate = kVariant != BwdVariant::kPlain && !kListed;
  static constexpr plan::Sm90BwdTile kTile = kHeadDim_ == plan::kSm90TwoPassTile.head_dim
                                                 ? plan::kSm90TwoPassTile
                                                 : plan::sm90_bwd_tile(kHeadDim_, kHeadDimV_, kIsGeneral);
  static_assert(plan::has_dq_pass(kTile) && kTile.block_m == 64 && kTile.block_n % 64 == 0);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kHeadDimV = kTile.value_dim();  // of V, dV and dO
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kTileRows = 64;  // of a tile in shared memory, and of a TMA box
  static constexpr int kKeyTiles = kBlockN / kTileRows;
  static constexpr bool kSplitsByRole = kKeyTiles == 1;  // otherwise each consumer has the keys of a tile
  static_assert(kSplitsByRole || (kKeyTiles == 2 && !kIsGeneral));
  static constexpr int kStages = kTile.stages;  // of Q and dO in the dK and dV kernel
  static constexpr bool kPInSmem = plan::sm90_dkv_has_p_in_smem(kTile);
  static_assert(kPInSmem || !kSplitsByRole);
  static_assert(!kPInSmem || kStages == 2,
                "the stage is the parity of the step, which is the phase of the one buffer of P");

  static constexpr int kConsumers = 256;  // threads
  static constexpr int kThreads = plan::sm90_bwd_threads(kTile);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // A tile is a sequence of swizzle atoms of 64 columns, one per TMA box.
  static constexpr int kAtomCols = 64;
  template <int kCols>
  using Tile = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                            cute::Shape<cute::_64, cute::Int<kCols>>{}));
  // The transposed view of the same bytes.
  template <int kCols>
  using TransposedTile =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kCols>, cute::_64>{}, cute::Step<cute::_2, cute::_1>{}));
  static constexpr int kSmemK = kTileRows * kHeadDim;                            // elements; of Q too
  static constexpr int kSmemV = kTileRows * kHeadDimV;                           // of dO too
  static constexpr int kSmemP = kPInSmem ? kBlockM * kTileRows : 4 / kKeyTiles;  // floats

  // The dQ kernel: a consumer for each 64 of a work tile's rows.
  static constexpr int kDqBlockM = plan::kSm90DqBlockM;
  static constexpr int kDqBlockN = plan::kSm90DqBlockN;
  static_assert(kDqBlockM == 128 && kDqBlockN == kTileRows);
  static constexpr int kDqStages = plan::sm90_dq_k_stages(kTile);  // of K
  static constexpr int kDqVStages = plan::kSm90DqVStages;          // of parts of V
  // S of the next block is issued before dQ. In general kernels P needs dP, so nothing would overlap S.
  static constexpr bool kScoresFirst = kDqStages > 2 && !kIsGeneral;
  static constexpr int kVPartCols = plan::sm90_dq_value_cols(kTile);
  static constexpr int kVParts = kHeadDimV / kVPartCols;  // of a block
  static_assert(kVPartCols % kAtomCols == 0 && kVParts * kVPartCols == kHeadDimV);
  static_assert(kVParts == 1 || kVParts == kDqVStages, "parts of a block are adjacent, as one tile");
};

}  // namespace sm90
}  // namespace flash
