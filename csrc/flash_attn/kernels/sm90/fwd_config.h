// Compile-time configuration of a wgmma forward kernel, from (dtype, head dims, variant): tile, policy row, MMA, shared
// memory layouts, registers.
#pragma once

#include <cute/tensor.hpp>

#include "core/block_list.h"
#include "core/trip_count.h"
#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/mask.h"
#include "kernels/common/score_mod.h"
#include "kernels/sm90/wgmma_shapes.h"
#include "params/flash.h"
#include "plan/fwd_policy_sm90.h"
#include "plan/tiles.h"

namespace flash {
namespace sm90 {

using plan::FwdVariant;

// S (64, kKeys) = Q K^T from shared memory.
template <class Element, int kKeys>
struct QkOp {
  using Type =
      decltype(cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kKeys>, cute::_16>,
                                          cute::GMMA::Major::K, cute::GMMA::Major::K>());
};
template <class Element>
struct QkOp<Element, 80> {
  using Type = Wgmma64x80x16<Element>;
};

template <class Config>
struct FwdRoles;  // kernels/sm90/fwd_roles.h

template <Dtype kDtype_, int kHeadDim_, FwdVariant kVariant_, int kHeadDimV_>
struct FwdConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  using Roles = FwdRoles<FwdConfig>;
  using OutElement = Element;
  static constexpr FwdVariant kVariant = kVariant_;
  static constexpr bool kIsDirect = kVariant == FwdVariant::kDirect;
  static constexpr bool kHasValueDim = kHeadDimV_ != kHeadDim_;
  static constexpr plan::Sm90FwdTile kTile =
      kHasValueDim ? plan::kSm90ValueDimTile : plan::sm90_fwd_tile(kHeadDim_, kVariant);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kHeadDimV = kTile.value_dim();  // of V and O
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kKvStages = kTile.kv_stages;
  static constexpr int kQStages = kTile.q_stages;
  static_assert(kHeadDim == kHeadDim_ && kHeadDimV == kHeadDimV_,
                "HEADDIM_SWITCH and plan/tiles.h list the same head dims");
  static_assert(kHeadDimV <= kHeadDim, "O is staged over Q");
  static_assert(!kTile.overlaps || kQStages == 2, "the next Q has to land while this one is in use");
  static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0, "wgmma multiplies 64 rows by 16 keys");

  // Warpgroup 0 produces, the others consume 64 rows each. setmaxnreg moves registers from the first to the others.
  // With kIsDirect the consumers come first and a load warp last: registers are enough for all.
  static constexpr int kConsumerGroups = kTile.consumer_groups;
  static constexpr int kWarpGroups = kBlockM / 64;  // of a consumer group
  static constexpr int kConsumerWarps = 4 * kWarpGroups;
  static constexpr int kThreads = plan::sm90_fwd_threads(kTile, kVariant);
  static constexpr int kProducerRegisters = kConsumerGroups * kWarpGroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumerGroups * kWarpGroups == 2 ? 232 : kWarpGroups == 3 ? 160 : 112;
  static_assert(kConsumerGroups == 1 ? kWarpGroups == 2 || kWarpGroups == 3 : kConsumerGroups == 2 && kWarpGroups == 2,
                "register budgets exist for two, three or twice two consumers");

  // KV blocks in ascending order, unmasked ones first.
  static constexpr bool kDescending = false;
  static constexpr int kRawVStages = 0, kTransposeWarps = 0;
  static constexpr int kCluster = 1;  // thread blocks that load K and V for each other
  static constexpr bool kScaledTiles = false;
  static constexpr bool kListed = plan::visits_by_list(kVariant);  // blocks in the order of a list
  static constexpr bool kBiased = kVariant == FwdVariant::kBiased;
  struct NoTripCount {
    static constexpr int kNoBlock = -1;
  };
  using Order = std::conditional_t<kBiased, BiasedBlockList, std::conditional_t<kListed, BlockList, KvBlockOrder>>;
  using TripCount = std::conditional_t<kListed, NoTripCount, WarpgroupTripCount<typename MaskOf<FwdConfig>::Bounds>>;
  template <class Mask>
  __device__ __forceinline__ static TripCount trip_count(const Mask& mask, const Order& order, int row_begin,
                                                         int row_end) {
    if constexpr (kListed) {
      return {};
    } else {
      return warpgroup_trip_count(mask, order, row_begin, row_end, kBlockN);
    }
  }

  // What follows from the variant.
  static constexpr bool kHasPages = plan::sm90_reads_pages(kTile, kVariant);
  static constexpr bool kHasScoreMod = plan::modifies_scores(kVariant);
  // Softcap and ALiBi have a kernel each: with both, a kernel is twice as large as an SM's instruction cache
  // (docs/tuning/findings.md, 14).
  static constexpr Modifiers kModifiers = kVariant == FwdVariant::kSoftcap ? Modifiers::kSoftcap
                                          : kVariant == FwdVariant::kAlibi ? Modifiers::kAlibi
                                                                           : Modifiers::kAny;

  // The measured features: a policy row. plan/fwd_policy_sm90.h says what each does and why.
  static constexpr plan::FwdPolicy kPolicy = plan::sm90_fwd_policy(kHeadDim_, kHeadDimV_, kVariant);
  static_assert(plan::fwd_policy_conflict(kTile, kPolicy, kVariant) == nullptr, "the policy row does not fit the tile");
  static constexpr bool kNoMask = kPolicy.has(plan::fwd_feature::kNoMask);
  static constexpr bool kIssueNextQkEarly = kPolicy.has(plan::fwd_feature::kIssueNextQkEarly);
  static constexpr bool kHasStoreWarp = kPolicy.has(plan::fwd_feature::kHasStoreWarp);
  static constexpr bool kFetchNextTileLate = kPolicy.has(plan::fwd_feature::kFetchNextTileLate);
  static constexpr bool kAlignUnmasked = kPolicy.has(plan::fwd_feature::kAlignUnmasked);
  static constexpr bool kMaskBoundsInRegs = kPolicy.has(plan::fwd_feature::kMaskBoundsInRegs);
  static constexpr bool kExpBeforePvWait = kPolicy.has(plan::fwd_feature::kExpBeforePvWait);
  static constexpr bool kSpeculativeExp = kPolicy.has(plan::fwd_feature::kSpeculativeExp);
  static constexpr bool kSpeculativeOnMasked = kPolicy.has(plan::fwd_feature::kSpeculativeOnMasked);
  static constexpr bool kExpAfterPvWait = kPolicy.has(plan::fwd_feature::kExpAfterPvWait);
  static constexpr bool kCheckBoundByNorm = kPolicy.has(plan::fwd_feature::kCheckBoundByNorm);
  static constexpr bool kPingPong = kPolicy.has(plan::fwd_feature::kPingPong);
  static constexpr bool kPackedDropout = kPolicy.has(plan::fwd_feature::kPackedDropout);
  static constexpr bool kRandomBitsInPv = kPolicy.has(plan::fwd_feature::kRandomBitsInPv);
  static constexpr bool kSplitKv = kPolicy.has(plan::fwd_feature::kSplitKv);
  static constexpr int kMostListedSkips = plan::sm90_most_listed_skips(kTile, kPolicy);
  static constexpr int kSums = kPolicy.row_sums;
  using Flag = std::conditional_t<kPolicy.has(plan::fwd_feature::kIntFlags), int, bool>;

  template <int kN, class MmaOp>
  struct Checked {
    using Mma = decltype(cute::make_tiled_mma(MmaOp{}));
    static_assert(decltype(cute::tile_size<1>(Mma{}))::value == kN, "there is a wgmma of this width");
  };
  template <int kN>
  using Shape = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
  // O (64, D) += P V with P in registers.
  using MmaQk = typename Checked<kBlockN, typename QkOp<Element, kBlockN>::Type>::Mma;
  using MmaPv =
      typename Checked<kHeadDimV,
                       decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kHeadDimV>,
                                                           cute::GMMA::Major::K, cute::GMMA::Major::MN>())>::Mma;

  // A tile is a sequence of swizzle atoms of kAtomCols columns, as a TMA box writes them: rows of 128 (or 64) bytes.
  static constexpr int kAtomCols = plan::swizzle_atom_cols(kHeadDim);
  static constexpr int kAtoms = kHeadDim / kAtomCols, kAtomsV = kHeadDimV / kAtomCols;
  static_assert(kHeadDimV % kAtomCols == 0, "Q, K, V and O have swizzle atoms of one width");
  using KMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MnMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  template <int kRows, int kCols>
  using Tile = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  // All stages of a ring in one layout: their descriptors differ by multiples of one number.
  template <int kRows, int kBuffers>
  using Tiles = decltype(cute::tile_to_shape(
      KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kHeadDim>, cute::Int<kBuffers>>{}));
  using SmemLayoutQ = Tiles<64, kQStages * kWarpGroups>;
  using SmemLayoutK = Tiles<kBlockN, kKvStages>;
  // The same bytes of V as (D, N), which P V reads.
  using SmemLayoutVt = decltype(cute::tile_to_shape(
      MnMajorAtom{}, cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>, cute::Int<kKvStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  static constexpr int kSmemQ = 64 * kHeadDim;  // elements
  static constexpr int kSmemK = kBlockN * kHeadDim;
  static constexpr int kSmemV = kBlockN * kHeadDimV;
  // O is staged over Q, or kStoredCols columns at a time in a dedicated buffer, so that the next Q may land before O
  // has left (docs/tuning/findings.md, 4).
  static constexpr bool kSeparateOSmem = kTile.o_cols > 0;
  static_assert(kSeparateOSmem || kQStages == 2 || kIsDirect, "the next Q has to land before O has left");
  static constexpr int kStoredCols = kSeparateOSmem ? kTile.o_cols : kHeadDimV;
  static constexpr int kStoredAtoms = kStoredCols / kAtomCols;
  static constexpr int kSmemO = 64 * kTile.o_cols;
  static_assert(kHeadDimV % kStoredCols == 0 && kStoredCols % kAtomCols == 0, "whole swizzle atoms");
  using SmemLayoutO = Tile<64, kStoredCols>;
  using MmaStored =
      typename Checked<kStoredCols,
                       decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kStoredCols>,
                                                           cute::GMMA::Major::K, cute::GMMA::Major::MN>())>::Mma;
};

// Two thread blocks of a cluster with m_blocks of one head (plan::pairs_thread_blocks()): each loads half of the
// columns of K and V into both. No block needs a mask, so there is no code for one. P V runs during the exponentials:
// two consumers are too few to keep the tensor cores busy otherwise.
template <class Base>
struct PairedConfig : Base {
  static constexpr int kCluster = 2;
  static constexpr bool kExpAfterPvWait = false;
  static_assert(Base::kAtoms == kCluster && Base::kAtomsV == kCluster, "a swizzle atom for each");
};

}  // namespace sm90
}  // namespace flash
