// Compile-time configuration of the one-pass wgmma backward (head dims 64 and 128) by (dtype, head dim, variant): tile,
// MMAs, shared memory layouts, registers per thread.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/row_loader.h"
#include "kernels/sm90/bwd_variant.h"
#include "params/flash.h"
#include "plan/sm90_smem.h"

namespace flash {
namespace sm90 {

template <Dtype kDtype_, int kHeadDim_, BwdVariant kVariant_, DqLocation kDqLocation>
struct BwdOnePassConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr bool kBiased = kVariant_ == BwdVariant::kBiased;
  static constexpr bool kListedPlain = kVariant_ == BwdVariant::kListedPlain;
  static constexpr bool kListed = kVariant_ == BwdVariant::kListed || kListedPlain || kBiased;
  static constexpr bool kPassesSteps = kListed;  // consumers get their steps from the statistics warp
  static constexpr bool kIsGeneral = kVariant_ == BwdVariant::kGeneral;  // P is made after dP
  static constexpr bool kMayAccumulate = kVariant_ != BwdVariant::kPlain && !kListed;
  static constexpr bool kDqInSmem = kDqLocation == DqLocation::kShared;
  static constexpr plan::Sm90BwdTile kTile = kDqInSmem ? plan::kSm90SharedDqTile
                                             : kDqLocation == DqLocation::kGlobalLong
                                                 ? plan::sm90_long_bwd_tile(kHeadDim_)
                                                 : plan::sm90_bwd_tile(kHeadDim_, kHeadDim_);
  static constexpr bool kIsTall = kTile.block_m == plan::kSm90TallBwdTile.block_m;
  static constexpr bool kMayDrop =
      kIsGeneral || (kBiased ? plan::sm90_biased_bwd_may_drop(kTile) : kListed && !kListedPlain);
  // A dedicated warpgroup computes dQ from the dS of both consumers, so that neither consumer waits for the other's dS.
  static constexpr bool kHasDqWarpgroup = plan::has_dq_warpgroup(kTile);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kWarpGroups = 2;
  static_assert(kBlockN == 64 * kWarpGroups, "a consumer owns 64 keys, the rows of a wgmma");
  static_assert(kBlockM % 64 == 0, "a row of dS^T is a whole number of 128-byte swizzle atoms");

  // Without a dQ warpgroup the consumers compute dQ of alternate steps, one step late: by then the other consumer's dS
  // is complete, and steps of unequal length keep one consumer exponentiating while the other uses the tensor cores.
  static constexpr bool kAlternateDq = !kHasDqWarpgroup;

  static constexpr int kConsumers = 128 * kWarpGroups;  // threads
  static constexpr int kThreads = plan::sm90_bwd_threads(kTile);
  // With a dQ warpgroup consumers without options leave registers to the load warp, which looks up lists.
  static constexpr bool kLeavesRegisters = kListedPlain && kHasDqWarpgroup;
  static constexpr int kProducerRegisters = kLeavesRegisters ? 40 : 24;
  static constexpr int kDqWarpgroupRegisters = kBiased ? 88 : 104;
  static constexpr int kConsumerRegisters = kLeavesRegisters ? 184 : !kHasDqWarpgroup ? 240 : kBiased ? 200 : 192;

  template <class MmaOp>
  using Mma = decltype(cute::make_tiled_mma(MmaOp{}));
  template <int kN>
  using Shape = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
  static constexpr auto kK = cute::GMMA::Major::K, kMn = cute::GMMA::Major::MN;
  // S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are A operands in registers of
  // dV += P^T dO and dK += dS^T Q.
  using MmaSdP = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kBlockM>, kK, kK>())>;
  using MmaDkv = Mma<decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kHeadDim>, kK, kMn>())>;
  // dQ = dS K, both from shared memory, by one warpgroup.
  static constexpr int kDqWarps = plan::kSm90DqWarps;
  using MmaDq = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kHeadDim>, kK, kMn>())>;

  // A tile is a sequence of swizzle atoms of 64 columns, one per TMA box.
  static constexpr int kAtomCols = 64;
  using KMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using MnMajorAtom = cute::GMMA::Layout_MN_SW128_Atom<Element>;
  template <int kRows, int kCols>
  using Tile = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  // The transposed view of the same bytes.
  template <int kRows, int kCols>
  using TransposedTile = decltype(cute::tile_to_shape(MnMajorAtom{}, cute::Shape<cute::Int<kCols>, cute::Int<kRows>>{},
                                                      cute::Step<cute::_2, cute::_1>{}));
  using SmemLayoutKv = Tile<kBlockN, kHeadDim>;
  using SmemLayoutKt = TransposedTile<kBlockN, kHeadDim>;
  using SmemLayoutQ = Tile<kBlockM, kHeadDim>;  // and dO, and dQ of the conversion
  using SmemLayoutQt = TransposedTile<kBlockM, kHeadDim>;
  using SmemLayoutDs = Tile<kBlockM, kBlockN>;
  static constexpr int kSmemQ = kBlockM * kHeadDim;  // elements; of dO too
  static constexpr int kSmemK = kBlockN * kHeadDim;  // and of V
  static constexpr int kSmemDs = kBlockM * kBlockN;
  static constexpr bool kEarlyK = plan::has_early_k(kTile, kMayDrop, kListed);
  static constexpr int kVStages = kHeadDim <= 64 && !kDqInSmem ? 2 : 1, kKStages = kEarlyK ? 2 : kVStages;  // buffers
  // The buffers of a work tile's K and V. If K alone has two, work tiles alternate between them: then K's is the phase
  // of V.
  template <class State>
  CUTE_HOST_DEVICE static constexpr int k_stage(const State& state) {
    return kKStages == 1 ? 0 : state.stage;
  }
  template <class State>
  CUTE_HOST_DEVICE static constexpr int v_stage(const State& state) {
    return kVStages == 1 ? 0 : state.stage;
  }
  template <class State>
  CUTE_HOST_DEVICE static constexpr uint32_t v_phase(const State& state) {
    return kEarlyK ? state.stage : state.phase;
  }
  struct Nothing {};
  template <class State>
  using IfBiased = std::conditional_t<kBiased, State, Nothing>;
  static constexpr int kBiasStages = kBiased ? plan::kSm90BwdBiasStages : 0;  // boxes for each consumer
  static constexpr int kKvParts =
      plan::sm90_bwd_kv_parts(kHeadDim, kBlockM);  // row ranges of a K/V tile, each with separate barriers
  static_assert(kKvParts == (kHasDqWarpgroup ? kWarpGroups : 1));
  static constexpr int kDqTile = kBlockM * kHeadDim;  // floats
  static constexpr int kWarpDq = kDqTile / kDqWarps;  // floats of one warp
  static constexpr int kDqBuffers = kHasDqWarpgroup ? 2 : 1;
  // L2 hints. Q and dO ranked above the sums of dQ would fill L2 with heads that are done, and every addition would
  // fetch its lines from memory and write them back.
  static constexpr auto kRowsHint =
      kIsTall ? cute::TMA::CacheHintSm90::EVICT_NORMAL : cute::TMA::CacheHintSm90::EVICT_LAST;
  static constexpr auto kDqHint = kRowsHint;
  // Two warps of the producer warpgroup reduce whole dQ tiles into global memory (DqReduceWarp).
  static constexpr bool kHasDqReduceWarps = !kDqInSmem;
  static constexpr bool kMayHaveBands = !kDqInSmem && (kListedPlain || kVariant_ == BwdVariant::kPlain);  // BwdBands
  static constexpr int kSmemDq = kDqInSmem ? plan::kSharedDqRows * kHeadDim : kDqBuffers * kDqTile;       // floats
  // dK and dV are staged for their TMA store in dedicated buffers or in those of dS and dQ, so that the next K and V
  // may be loaded meanwhile.
  static constexpr bool kSeparateDkvSmem = kHasDqWarpgroup && !kDqInSmem && !kBiased;
  static constexpr bool kDsHoldsDkv = kSmemDs >= kSmemK;
  static_assert(kDsHoldsDkv || (2 * kSmemDs >= kSmemK && 2 * kSmemDq >= kSmemK),
                "dV fits into both dS buffers, dK into that of dQ");
  using RowCopyT = RowCopy<Element, 32 * kDqWarps, kAtomCols, kHeadDim>;  // of the conversion

  // Offset of a warp's floats in the fp32 tile.
  CUTE_HOST_DEVICE static constexpr int dq_offset(int warp) { return warp * kWarpDq; }
};

}  // namespace sm90
}  // namespace flash
