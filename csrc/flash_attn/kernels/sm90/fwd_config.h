// Everything the wgmma forward derives from (dtype, head dims, variant): tile, MMA, shared layouts, registers.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/score_mod.h"
#include "params/flash.h"
#include "plan/tiles.h"

namespace flash {
namespace sm90 {

using plan::FwdVariant;

template <Dtype kDtype, int kHeadDim_, FwdVariant kVariant_, int kHeadDimV_ = kHeadDim_>
struct FwdConfig {
  using Element = ElementOf<kDtype>;
  static constexpr FwdVariant kVariant = kVariant_;
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
  static_assert(kHeadDimV <= kHeadDim, "O is staged in the place of Q");
  static_assert(!kTile.overlaps || kQStages == 2, "the next Q is there while this one is in use");
  static constexpr bool kNoMask = !kHasValueDim && plan::sm90_needs_no_mask(kHeadDim_, kVariant);
  // S of the next tile's first block is started right behind the last P V of this one, before its output is stored.
  static constexpr bool kIssueNextQkEarly =
      kVariant == FwdVariant::kMasked ||
      (plan::sm90_splits_masked(kHeadDim_) &&
       (kVariant == FwdVariant::kShort || kVariant == FwdVariant::kOneWave || plan::modifies_scores(kVariant)));
  static_assert(!kIssueNextQkEarly || (kQStages == 2 && !kTile.overlaps), "the next Q is there before O has left");
  static constexpr bool kFetchNextTileLate = plan::sm90_fetches_late(kHeadDim_, kVariant);
  // Row blocks that follow each other behind a window load the same keys first (KvBlockOrder::align_unmasked()).
  static constexpr bool kAlignUnmasked = kFetchNextTileLate;
  static_assert(kBlockM % 64 == 0 && kBlockN % 16 == 0, "wgmma multiplies 64 rows by 16 keys");

  // Warpgroup 0 loads, the others compute 64 rows each. Registers move from the first to the others.
  static constexpr int kConsumerGroups = kTile.consumer_groups;
  static constexpr int kWarpGroups = kBlockM / 64;  // of a team
  static constexpr int kConsumerWarps = 4 * kWarpGroups;
  static constexpr int kThreads = plan::sm90_fwd_threads(kTile);
  static constexpr int kProducerRegisters = kConsumerGroups * kWarpGroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumerGroups * kWarpGroups == 2 ? 232 : kWarpGroups == 3 ? 160 : 112;
  static_assert(kConsumerGroups == 1 ? kWarpGroups == 2 || kWarpGroups == 3 : kConsumerGroups == 2 && kWarpGroups == 2,
                "registers are shared out for two, three or twice two consumers");
  // Dropout of packed probabilities, by words of the columns that a warp makes for all consumers.
  static constexpr bool kPackedDropout = kVariant == FwdVariant::kDropout;
  // Three consumers draw between the wgmmas of P V (docs/tuning/fwd_sm90.md).
  static constexpr bool kRandomBitsInPv = kPackedDropout && kWarpGroups == 3;
  // They start their products by turns. So do two of 128 keys alone on their multiprocessor: without turns it is left
  // to chance whether one multiplies while the other takes exponentials.
  static constexpr bool kPingPong = kRandomBitsInPv || (kVariant == FwdVariant::kOneWave && kBlockN == 128);
  static constexpr bool kHasPages = plan::sm90_reads_pages(kTile, kVariant);
  static constexpr bool kHasScoreMod = plan::modifies_scores(kVariant);
  // Softcap alone and ALiBi alone have kernels of their own: one for everything takes twice what multiprocessors keep
  // of the instructions (docs/tuning/fwd_sm90.md).
  static constexpr Modifiers kModifiers = kVariant == FwdVariant::kSoftcap ? Modifiers::kSoftcap
                                          : kVariant == FwdVariant::kAlibi ? Modifiers::kAlibi
                                                                           : Modifiers::kAny;
  // Under a softcap a bound of all scores comes before their maxima. Narrower heads lose by it
  // (docs/tuning/fwd_sm90.md).
  static constexpr bool kCheckBoundByNorm = kModifiers == Modifiers::kSoftcap && kHeadDim > 96;
  static constexpr bool kSplitKv = plan::sm90_splits_kv(kVariant);
  // Edges find the limits of their rows in registers, and their blocks one from the other. Elsewhere ptxas spills for
  // it, or has other interior loops, which are slower (docs/tuning/fwd_sm90.md).
  static constexpr bool kMaskBoundsInRegs = !kHasScoreMod && !kHasValueDim && kHeadDim <= 128;
  // Exponentials run beside the product of P V, not behind it (docs/tuning/fwd_sm90.md): a long one hides them.
  static constexpr bool kExpBeforePvWait = kHeadDimV > 128;
  // Interior blocks are exponentiated before anybody has looked for their maxima. Not where two consumers of 128 keys,
  // or three by turns, wait for each other: looking afterwards makes the way from S to P longer
  // (docs/tuning/fwd_sm90.md). With score modifiers ALiBi alone does.
  static constexpr bool kSpeculativeExp =
      kHasScoreMod ? kModifiers == Modifiers::kAlibi
                   : !kPackedDropout && !(kWarpGroups == 2 && kConsumerGroups == 1 && kBlockN == 128);
  // Whether they were right to go is looked at behind the wait for P V, where ptxas then has most of the exponentials
  // too. Three consumers of 64 keys have them before it.
  static constexpr bool kCheckSumsAfterPv =
      kSpeculativeExp && !kExpBeforePvWait && !kHasScoreMod && kVariant != FwdVariant::kMasked;

  // And edges, behind their masks: three consumers of 64 keys have nothing else to do while one of them looks for
  // maxima.
  static constexpr bool kSpeculativeOnMasked = kVariant == FwdVariant::kMasked && kSpeculativeExp;

  // What holds conditions of a warp (Softmax). For all score modifiers but ALiBi alone ptxas has the better loops with
  // a bool (docs/tuning/fwd_sm90.md).
  using Flag = std::conditional_t<kHasScoreMod && kModifiers != Modifiers::kAlibi, bool, int>;
  // Sums of a row, so that a step of the softcap does not end with adding up; wide heads have no registers for four.
  static constexpr int kSums = kModifiers != Modifiers::kSoftcap ? 1 : kHeadDim <= 128 ? 4 : 2;

  template <int kN, class MmaOp>
  struct Checked {
    using Mma = decltype(cute::make_tiled_mma(MmaOp{}));
    static_assert(decltype(cute::tile_size<1>(Mma{}))::value == kN, "there is a wgmma of this width");
  };
  template <int kN>
  using Shape = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
  // S (64, N) = Q K^T from shared memory; O (64, D) += P V with P in registers.
  using MmaQk =
      typename Checked<kBlockN,
                       decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kBlockN>,
                                                           cute::GMMA::Major::K, cute::GMMA::Major::K>())>::Mma;
  using MmaPv =
      typename Checked<kHeadDimV,
                       decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kHeadDimV>,
                                                           cute::GMMA::Major::K, cute::GMMA::Major::MN>())>::Mma;

  // A tile is a row of chunks of kAtomCols columns, as a TMA box writes them: rows of 128 (or 64) bytes, swizzled.
  static constexpr int kAtomCols = kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kAtoms = kHeadDim / kAtomCols, kAtomsV = kHeadDimV / kAtomCols;
  static_assert(kHeadDimV % kAtomCols == 0, "Q, K, V and O have chunks of one width");
  using KMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MnMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  template <int kRows, int kCols>
  using Tile = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  // All buffers of a ring in one layout: the descriptors of a tile differ by a multiple of one number.
  template <int kRows, int kBuffers>
  using Tiles = decltype(cute::tile_to_shape(
      KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kHeadDim>, cute::Int<kBuffers>>{}));
  using SmemLayoutQ = Tiles<64, kQStages * kWarpGroups>;
  using SmemLayoutK = Tiles<kBlockN, kKvStages>;
  // V of the same bytes as (D, N), which the second product reads.
  using SmemLayoutVt = decltype(cute::tile_to_shape(
      MnMajorAtom{}, cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>, cute::Int<kKvStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  static constexpr int kSmemQ = 64 * kHeadDim;  // elements
  static constexpr int kSmemK = kBlockN * kHeadDim;
  static constexpr int kSmemV = kBlockN * kHeadDimV;
  // O is staged in the place of Q, or kStoredCols columns at a time in a place of its own, so that the next Q may land.
  static constexpr bool kSeparateOSmem = kTile.o_cols > 0;
  static_assert(kSeparateOSmem || kQStages == 2, "the next Q is there before O has left");
  static constexpr int kStoredCols = kSeparateOSmem ? kTile.o_cols : kHeadDimV;
  static constexpr int kStoredAtoms = kStoredCols / kAtomCols;
  static constexpr int kSmemO = 64 * kTile.o_cols;
  // A warp of its own stores O of all consumers. Not where their loops become slower by it (docs/tuning/fwd_sm90.md).
  static constexpr bool kHasStoreWarp = kIssueNextQkEarly && !kHasScoreMod && !kSeparateOSmem;
  static_assert(!kHasStoreWarp || (kConsumerGroups == 1 && !kPackedDropout && !kTile.overlaps),
                "a warp is idle, and O is staged before S of the next row block is started");
  static_assert(kHeadDimV % kStoredCols == 0 && kStoredCols % kAtomCols == 0, "whole chunks");
  using SmemLayoutO = Tile<64, kStoredCols>;
  using MmaStored =
      typename Checked<kStoredCols,
                       decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kStoredCols>,
                                                           cute::GMMA::Major::K, cute::GMMA::Major::MN>())>::Mma;
};

}  // namespace sm90
}  // namespace flash
