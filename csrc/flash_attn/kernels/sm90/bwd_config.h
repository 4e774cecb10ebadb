// Compile-time configuration of the wgmma backward by (dtype, head dims, variant): tile, MMAs, shared memory layouts,
// registers per thread.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/row_loader.h"
#include "params/flash.h"
#include "plan/tiles.h"

namespace flash {
namespace sm90 {

// kPlain: no dropout, no score modifier, softmax scale > 0, dK and dV of the inputs' dtype. kGeneral: all of these as
// run-time flags. kAccumulate: kPlain, but dK and dV are added to fp32 matrices; as a flag of kPlain it would change
// how ptxas schedules the loop.
enum class BwdVariant { kPlain, kGeneral, kAccumulate };

// Where dQ is accumulated. kGlobal: in fp32 tiles in global memory, into which every n_block reduces. kShared: in
// shared memory, by a thread block that computes all n_blocks of a head.
enum class DqLocation { kGlobal, kShared };

template <Dtype kDtype_, int kHeadDim_, BwdVariant kVariant_, DqLocation kDqLocation = DqLocation::kGlobal,
          int kHeadDimV_ = kHeadDim_>
struct BwdConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr bool kIsGeneral = kVariant_ == BwdVariant::kGeneral;
  static constexpr bool kMayAccumulate = kVariant_ != BwdVariant::kPlain;
  static constexpr bool kDqInSmem = kDqLocation == DqLocation::kShared;
  static constexpr plan::Sm90BwdTile kTile =
      kDqInSmem ? plan::kSm90SharedDqTile : plan::sm90_bwd_tile(kHeadDim_, kHeadDimV_);
  // A dedicated warpgroup computes dQ from the dS of both consumers, so that neither consumer waits for the other's dS.
  static constexpr bool kHasDqWarpgroup = plan::has_dq_warpgroup(kTile);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kHeadDimV = kTile.value_dim();  // of V, dV and dO
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kWarpGroups = 2;
  // True: each consumer owns 64 of the 128 keys. False: both have the same 64 keys, and each half of the columns of dQ.
  static constexpr bool kSplitsKeys = kBlockN == 128;
  // Of the same 64 keys. True: consumer 0 computes S, P and dV, consumer 1 takes P from it and computes dP, dS and dK.
  // False: each owns half of the columns of dK and dV; both compute all of S and dP, two fifths more FLOPs, but neither
  // waits for the other.
  static constexpr bool kSplitsRoles = kTile.splits_roles;
  static constexpr bool kSplitsColumns = !kSplitsKeys && !kSplitsRoles;  // of dK and dV
  static_assert(!kSplitsRoles || (!kSplitsKeys && kStages == 2), "rings of Q, dO and dS advance together");
  static_assert(kBlockN == 64 || kBlockN == 128, "a consumer owns the 64 rows of a wgmma");
  static_assert(kBlockM == 64, "a row of dS^T is a whole number of 128-byte swizzle atoms");

  // Without a dQ warpgroup the consumers that own keys compute dQ of alternate steps, one step late: the other's dS is
  // there by then, and their steps of unequal length keep one exponentiating while the other uses the tensor cores.
  static constexpr bool kAlternateDq = kSplitsKeys && !kHasDqWarpgroup;
  static constexpr bool kHasWholeDq = kHasDqWarpgroup || kAlternateDq;  // one warpgroup computes all columns of dQ

  static constexpr int kConsumers = 128 * kWarpGroups;  // threads
  static constexpr int kConsumerWarps = 4 * kWarpGroups;
  static constexpr int kThreads = plan::sm90_bwd_threads(kTile);
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = kHasDqWarpgroup ? 192 : 240;
  static constexpr int kDqWarpgroupRegisters = 104;

  template <class MmaOp>
  using Mma = decltype(cute::make_tiled_mma(MmaOp{}));
  template <int kN>
  using Shape = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
  static constexpr auto kK = cute::GMMA::Major::K, kMn = cute::GMMA::Major::MN;
  // S^T = K Q^T and dP^T = V dO^T have keys as rows, so that P^T and dS^T are A operands in registers of
  // dV += P^T dO and dK += dS^T Q.
  using MmaSdP = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kBlockM>, kK, kK>())>;
  static constexpr int kDkCols = kSplitsColumns ? kHeadDim / 2 : kHeadDim;
  static constexpr int kDvCols = kSplitsColumns ? kHeadDimV / 2 : kHeadDimV;
  template <int kCols>
  using MmaDkv = Mma<decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kCols>, kK, kMn>())>;
  // dQ = dS K, both from shared memory: all columns by one warpgroup, or half of them by each consumer in kDqSlices.
  static constexpr int kDqSlices = !kSplitsKeys && kHeadDim % 256 == 0 ? 2 : 1;
  static constexpr int kDqCols = (kHasWholeDq ? kHeadDim : kHeadDim / 2) / kDqSlices;  // of a slice
  static constexpr int kDqWarps = plan::sm90_dq_warps(kTile);
  using MmaDq = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kDqCols>, kK, kMn>())>;

  // A tile is a sequence of swizzle atoms of 64 (or 32) columns, one per TMA box. The columns of dK, dV and dQ that a
  // consumer owns are whole atoms.
  static constexpr int kAtomCols = kDkCols % 64 == 0 && kDvCols % 64 == 0 && kDqCols % 64 == 0 ? 64 : 32;
  using KMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MnMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  template <int kRows, int kCols>
  using Tile = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  // The transposed view of the same bytes.
  template <int kRows, int kCols>
  using TransposedTile = decltype(cute::tile_to_shape(MnMajorAtom{}, cute::Shape<cute::Int<kCols>, cute::Int<kRows>>{},
                                                      cute::Step<cute::_2, cute::_1>{}));
  // V and dO use the first kHeadDimV columns of the layouts of K and Q.
  static_assert(kHeadDimV <= kHeadDim);
  using SmemLayoutKv = Tile<kBlockN, kHeadDim>;
  using SmemLayoutKt = TransposedTile<kBlockN, kHeadDim>;
  using SmemLayoutQ = Tile<kBlockM, kHeadDim>;  // and dO, and dQ of the conversion
  using SmemLayoutQt = TransposedTile<kBlockM, kHeadDim>;
  using SmemLayoutDs = Tile<kBlockM, kBlockN>;
  static constexpr int kSmemQ = kBlockM * kHeadDim;  // elements
  static constexpr int kSmemDo = kBlockM * kHeadDimV;
  static constexpr int kSmemK = kBlockN * kHeadDim;
  static constexpr int kSmemV = kBlockN * kHeadDimV;
  static constexpr int kSmemDs = kBlockM * kBlockN;
  static constexpr int kSmemP = kSplitsRoles ? kBlockM * kBlockN : 0;      // floats
  static constexpr int kKvStages = kHasDqWarpgroup && !kDqInSmem ? 2 : 1;  // buffers of K and V
  static constexpr int kKvParts =
      kHasDqWarpgroup ? kWarpGroups : 1;              // row ranges of a K/V tile with barriers of their own
  static constexpr int kDqTile = kBlockM * kHeadDim;  // floats
  static constexpr int kWarpDqSlice = kDqTile / kDqWarps / kDqSlices;  // floats of one warp
  // Floats of a warp that are staged in shared memory for a bulk reduction. 0: threads reduce from registers; while
  // they wait for the L2 cache the other consumer computes.
  static constexpr int kWarpDqStaged = kDqSlices == 1 && !kDqInSmem ? kWarpDqSlice : 0;
  static constexpr int kDqBuffers = kHasDqWarpgroup ? 2 : 1;
  // Two warps of the producer warpgroup reduce whole dQ tiles into global memory (DqReduceWarp).
  static constexpr bool kHasDqReduceWarps = kSplitsKeys && !kDqInSmem;
  static constexpr int kSmemDq =  // floats
      kDqInSmem ? plan::kSharedDqRows * kHeadDim : kDqBuffers * kDqWarps * kWarpDqStaged;
  // dK and dV are staged for their TMA store in buffers of their own or in those of dS and dQ, so that the next K and V
  // may be loaded meanwhile; where neither fits, in those of K and V.
  static constexpr bool kReleaseKvEarly = kSplitsKeys;
  static constexpr bool kSeparateDkvSmem = kHasDqWarpgroup && !kDqInSmem;
  static constexpr bool kDsHoldsDkv = kSmemDs >= kSmemK;
  static_assert(!kReleaseKvEarly || kDsHoldsDkv || (2 * kSmemDs >= kSmemV && 2 * kSmemDq >= kSmemK),
                "dV fits into both dS buffers, dK into that of dQ");
  using RowCopyT = RowCopy<Element, 32 * kDqWarps, kAtomCols, kHeadDim>;  // of the conversion

  // dq_column_slice(): index of a consumer's slice among the kDqCols-wide column blocks of a dQ tile. dq_offset():
  // offset of a warp's floats of a slice in the fp32 tile.
  CUTE_HOST_DEVICE static constexpr int dq_column_slice(int group, int slice) { return group * kDqSlices + slice; }
  CUTE_HOST_DEVICE static constexpr int dq_offset(int warp, int slice) {
    return (warp * kDqSlices + slice) * kWarpDqSlice;
  }
};

}  // namespace sm90
}  // namespace flash
