// Compile-time configuration of a wgmma forward with tangents: the counterpart of FwdConfig, for the storage, work
// pipeline, scheduler and producer that both share.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "core/trip_count.h"
#include "kernels/common/convert.h"
#include "kernels/common/mask.h"
#include "plan/jvp_fwd_plan.h"

namespace flash {
namespace sm90 {

using plan::FwdVariant;

template <Dtype kDtype_, int kHeadDim_>
struct JvpFwdConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  using OutElement = Element;
  static constexpr FwdVariant kVariant = FwdVariant::kPlain;
  static constexpr plan::Sm90FwdTile kTile = plan::sm90_jvp_fwd_tile(kHeadDim_);
  static constexpr int kHeadDim = kTile.head_dim, kHeadDimV = kTile.value_dim();
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kKvStages = kTile.kv_stages, kQStages = kTile.q_stages;
  static_assert(kHeadDim == kHeadDim_ && kHeadDim == kHeadDimV, "a tile for this head dim");
  static_assert(kKvStages >= 2, "consumers wait for K of a block before V of the previous one is released");

  static constexpr int kConsumerGroups = kTile.consumer_groups;
  static constexpr int kWarpGroups = kBlockM / 64;
  static constexpr int kConsumerWarps = 4 * kWarpGroups;
  static constexpr int kThreads = plan::sm90_fwd_threads(kTile, kVariant);
  // With 232 registers a step of head dim 128 reads spilled words.
  static constexpr int kProducerRegisters = kHeadDim == 64 ? 40 : 24, kConsumerRegisters = kHeadDim == 64 ? 232 : 240;
  static_assert(kConsumerGroups == 1 && kWarpGroups == 2, "register budgets");
  // Both warpgroups pack P and H at the same time otherwise, with idle tensor cores.
  static constexpr bool kPingPong = kHeadDim == 64;
  // exp2 while O and O' of the previous block, or a tile's first S', are computed. ptxas would sink it below the wait
  // for them, and issue S' at its pace.
  static constexpr bool kExpBeforeWait = kHeadDim == 64;

  // Features of FwdConfig.
  static constexpr bool kHasPages = false, kHasScoreMod = false, kNoMask = false, kHasStoreWarp = false;
  static constexpr bool kAlignUnmasked = false, kPackedDropout = false, kSplitKv = false;
  static constexpr bool kFetchNextTileLate = true;
  static constexpr int kCluster = 1;
  // One loop for blocks with and without a mask. The first block of a warpgroup has a visible key for some row.
  static constexpr bool kDescending = true;
  static constexpr int kRawVStages = 0, kTransposeWarps = 0;
  static constexpr bool kListed = false, kScaledTiles = false;
  using Order = KvBlockOrder;
  using TripCount = DescendingTripCount<typename MaskOf<JvpFwdConfig>::Bounds>;
  template <class Mask>
  __device__ __forceinline__ static TripCount trip_count(const Mask& mask, const KvBlockOrder& order, int row_begin,
                                                         int row_end) {
    return descending_trip_count(mask, order, row_begin, row_end, kBlockN);
  }

  template <int kN>
  using Shape = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
  using MmaQk =
      decltype(cute::make_tiled_mma(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kBlockN>,
                                                               cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  using MmaPv =
      decltype(cute::make_tiled_mma(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kHeadDimV>,
                                                               cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
  static_assert(decltype(cute::tile_size<1>(MmaQk{}))::value == kBlockN);
  static_assert(decltype(cute::tile_size<1>(MmaPv{}))::value == kHeadDimV);

  static constexpr int kAtomCols = plan::swizzle_atom_cols(kHeadDim);
  static constexpr int kAtoms = kHeadDim / kAtomCols, kAtomsV = kAtoms;
  // A buffer of Q, K or V is two tiles, the second that of the tangent: (rows, columns, 2 * buffer + is_tangent).
  template <int kRows, int kTiles>
  using Tiles = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                             cute::Shape<cute::Int<kRows>, cute::Int<kHeadDim>, cute::Int<kTiles>>{}));
  static_assert(kAtomCols == 64, "of rows of 128 bytes");
  using SmemLayoutQ = Tiles<64, 2 * kQStages * kWarpGroups>;
  using SmemLayoutK = Tiles<kBlockN, 2 * kKvStages>;
  // The same bytes of V as (D, N).
  using SmemLayoutVt =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>, cute::Int<2 * kKvStages>>{},
                                   cute::Step<cute::_2, cute::_1, cute::_3>{}));
  static constexpr int kTileQ = 64 * kHeadDim, kTileKv = kBlockN * kHeadDim;  // elements
  static constexpr int kSmemQ = 2 * kTileQ, kSmemK = 2 * kTileKv, kSmemV = 2 * kTileKv;

  static constexpr bool kSeparateOSmem = true;
  static constexpr int kSmemO = 64 * kTile.o_cols;
  static constexpr bool kStagesBoth = kTile.o_cols >= 2 * kHeadDim;  // O and its tangent at once
  static_assert(kTile.o_cols >= kHeadDim);
};

}  // namespace sm90
}  // namespace flash
