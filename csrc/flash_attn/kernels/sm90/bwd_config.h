// Everything the wgmma backward derives from (dtype, head dims, variant): tile, MMAs, shared layouts, registers.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/row_loader.h"
#include "params/flash.h"
#include "plan/tiles.h"

namespace flash {
namespace sm90 {

// kGeneral: dropout, softcap, ALiBi and scales that are not positive, at run time.
enum class BwdVariant { kPlain, kGeneral };

// Where dQ is summed up. kGlobal: in fp32 tiles in global memory, to which each block of keys adds. kShared: in shared
// memory, by a thread block that walks all blocks of keys of a head.
enum class DqLocation { kGlobal, kShared };

template <Dtype kDtype_, int kHeadDim_, BwdVariant kVariant_, DqLocation kDqLocation = DqLocation::kGlobal,
          int kHeadDimV_ = kHeadDim_>
struct BwdConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr BwdVariant kVariant = kVariant_;
  static constexpr bool kDqInSmem = kDqLocation == DqLocation::kShared;
  static constexpr plan::Sm90BwdTile kTile =
      kDqInSmem ? plan::kSm90SharedDqTile : plan::sm90_bwd_tile(kHeadDim_, kHeadDimV_);
  // A warpgroup of its own computes dQ from the dS of both consumers, which do not wait for each other's then.
  static constexpr bool kHasDqWarpgroup = plan::has_dq_warpgroup(kTile);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kHeadDimV = kTile.value_dim();  // of V, dV and dO
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static constexpr int kWarpGroups = 2;
  // Each consumer has 64 keys of its own, or the same 64 as the other one and half of the columns of dK, dV and dQ.
  // Then both compute all scores: two fifths more products, but neither waits for the other.
  static constexpr bool kSplitsKeys = kBlockN == 128;
  static_assert(kBlockN == 64 || kBlockN == 128, "a consumer has the 64 keys of a wgmma");
  static_assert(kBlockM == 64, "a row of dS^T is a whole number of 128-byte chunks");

  // Without one, consumers with keys of their own take turns with dQ, a step each, and one step late: nobody waits for
  // the other one's dS, and they fall out of step by themselves.
  static constexpr bool kAlternateDq = kSplitsKeys && !kHasDqWarpgroup;
  static constexpr bool kHasWholeDq = kHasDqWarpgroup || kAlternateDq;  // a warpgroup has all columns of a step's dQ

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
  // Keys are the rows of S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are A operands in registers:
  // dV += P^T dO, dK += dS^T Q.
  using MmaSdP = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kBlockM>, kK, kK>())>;
  static constexpr int kDkCols = kSplitsKeys ? kHeadDim : kHeadDim / 2;
  static constexpr int kDvCols = kSplitsKeys ? kHeadDimV : kHeadDimV / 2;
  template <int kCols>
  using MmaDkv = Mma<decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kCols>, kK, kMn>())>;
  // dQ = dS K, from shared memory: by one warpgroup, or each consumer has half of the columns, a slice at a time.
  static constexpr int kDqSlices = !kSplitsKeys && kHeadDim % 256 == 0 ? 2 : 1;
  static constexpr int kDqCols = (kHasWholeDq ? kHeadDim : kHeadDim / 2) / kDqSlices;  // of a slice
  static constexpr int kDqWarps = plan::sm90_dq_warps(kTile);
  using MmaDq = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kDqCols>, kK, kMn>())>;

  // A tile is a row of chunks of columns, as a TMA box writes them: rows of 128 (or 64) bytes, swizzled. A consumer's
  // share of the columns is a whole number of chunks.
  static constexpr int kAtomCols = kDkCols % 64 == 0 && kDvCols % 64 == 0 ? 64 : 32;
  using KMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  using MnMajorAtom = std::conditional_t<kAtomCols == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  template <int kRows, int kCols>
  using Tile = decltype(cute::tile_to_shape(KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  // The transpose of the same bytes.
  template <int kRows, int kCols>
  using TransposedTile = decltype(cute::tile_to_shape(MnMajorAtom{}, cute::Shape<cute::Int<kCols>, cute::Int<kRows>>{},
                                                      cute::Step<cute::_2, cute::_1>{}));
  // V and dO have the first columns of the layouts of K and Q.
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
  static constexpr int kKvStages = kHasDqWarpgroup && !kDqInSmem ? 2 : 1;  // buffers of K and V
  static constexpr int kKeyParts =
      kHasDqWarpgroup ? kWarpGroups : 1;              // of K and V, which arrive and are free on their own
  static constexpr int kDqTile = kBlockM * kHeadDim;  // floats
  static constexpr int kDqOfSlice = kDqTile / kDqWarps / kDqSlices;  // of one warp
  // How many of them wait in shared memory to be added by the bulk copy engine. 0: the threads add from registers;
  // while they wait for the L2 cache the other consumer computes.
  static constexpr int kDqStaged = kDqSlices == 1 && !kDqInSmem ? kDqOfSlice : 0;
  static constexpr int kDqBuffers = kHasDqWarpgroup ? 2 : 1;
  // Two warps beside the loading ones have whole tiles added (DqReduceWarp).
  static constexpr bool kHasDqReduceWarps = kSplitsKeys && !kDqInSmem;
  static constexpr int kDqInShared =  // floats
      kDqInSmem ? plan::kSharedDqRows * kHeadDim : kDqBuffers * kDqWarps * kDqStaged;
  // dK and dV leave through buffers of their own, or those of dS and dQ, so that the next K and V may arrive meanwhile;
  // where these have no room, through those of K and V.
  static constexpr bool kFreesKeysEarly = kSplitsKeys;
  static constexpr bool kStagesGradients = kHasDqWarpgroup && !kDqInSmem;
  static constexpr bool kDkBesideDv = kSmemDs >= kSmemK;
  static_assert(!kFreesKeysEarly || kDkBesideDv || (2 * kSmemDs >= kSmemV && 2 * kDqInShared >= kSmemK),
                "dV has the room of both dS, dK that of dQ");
  using RowCopyT = RowCopy<Element, 32 * kDqWarps, kAtomCols, kHeadDim>;  // of the conversion

  // Of the kDqCols-column pieces of a dQ tile, the one that is this warpgroup's slice; and where a warp's floats of it
  // stand in the fp32 tile.
  CUTE_HOST_DEVICE static constexpr int dq_column_slice(int group, int slice) { return group * kDqSlices + slice; }
  CUTE_HOST_DEVICE static constexpr int dq_offset(int warp, int slice) {
    return (warp * kDqSlices + slice) * kDqOfSlice;
  }
};

}  // namespace sm90
}  // namespace flash
