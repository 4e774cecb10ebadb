// Compile-time configuration of a wgmma forward of e4m3 q, k and v: the counterpart of FwdConfig, for the storage, work
// pipeline, scheduler and producer that both share.
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "core/e4m3.h"
#include "core/trip_count.h"
#include "kernels/common/convert.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/wgmma_shapes.h"
#include "plan/fp8_fwd_plan.h"

namespace flash {
namespace sm90 {

using plan::FwdVariant;

// P V of kCols columns: P in registers, V^T in shared memory.
template <int kCols>
struct Fp8PvOf;
template <>
struct Fp8PvOf<8> {
  using Atom = cute::SM90::GMMA::MMA_64x8x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct Fp8PvOf<64> {
  using Atom = cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_RS_TN<>;
};
template <>
struct Fp8PvOf<72> {
  using Atom = WgmmaE4m3Of64x72x32;
};
template <int kCols>
using Fp8PvAtom = typename Fp8PvOf<kCols>::Atom;

// kExpBits_: P as e4m3 bit patterns straight from the scores (core/e4m3.h) instead of exp2. kTransposesV: V^T is made
// of V in shared memory, not loaded.
template <Dtype kOut, int kHeadDim_, bool kExpBits_, bool kTransposesV>
struct Fp8FwdConfig {
  using Element = cutlass::float_e4m3_t;
  using OutElement = ElementOf<kOut>;
  static constexpr bool kExpBits = kExpBits_;
  static constexpr FwdVariant kVariant = FwdVariant::kPlain;
  static constexpr plan::Sm90FwdTile kTile = plan::sm90_fp8_fwd_tile(kHeadDim_, kTransposesV);
  static constexpr int kHeadDim = kTile.head_dim, kHeadDimV = kTile.value_dim();
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kKvStages = kTile.kv_stages, kQStages = kTile.q_stages;
  static_assert(kHeadDim == kHeadDim_ && kHeadDim == kHeadDimV, "a tile for this head dim");
  static_assert(e4m3::kVtKeys % kBlockN == 0, "a block of V^T holds whole blocks of keys");
  static_assert(kKvStages >= 2, "consumers wait for K of a block before V of the previous one is released");
  static_assert(kQStages == 2, "S of the next tile is issued before O of this one is stored");

  static constexpr int kConsumerGroups = kTile.consumer_groups;
  static constexpr int kWarpGroups = kBlockM / 64;
  static constexpr int kConsumerWarps = 4 * kWarpGroups;
  static constexpr int kThreads = plan::sm90_fwd_threads(kTile, kVariant);
  static constexpr int kProducerRegisters = kWarpGroups == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kWarpGroups == 3 ? 160 : 240;
  static_assert(kConsumerGroups == 1 && (kWarpGroups == 2 || kWarpGroups == 3), "register budgets");

  // Features of FwdConfig.
  static constexpr bool kHasPages = false, kHasScoreMod = false, kNoMask = false, kHasStoreWarp = false;
  static constexpr bool kAlignUnmasked = false, kPackedDropout = false, kSplitKv = false;
  static constexpr bool kFetchNextTileLate = true;
  static constexpr int kCluster = 1;
  // Descending, so that an attention sink at the first keys meets a settled row max; in ascending order it would take
  // up the few bits of P.
  static constexpr bool kDescending = true;
  static constexpr int kRawVStages = kTransposesV ? plan::kFp8RawVStages : 0, kTransposeWarps = kTransposesV ? 2 : 0;
  static constexpr bool kListed = false;
  using Order = KvBlockOrder;
  using TripCount = DescendingTripCount<typename MaskOf<Fp8FwdConfig>::Bounds>;
  template <class Mask>
  __device__ __forceinline__ static TripCount trip_count(const Mask& mask, const KvBlockOrder& order, int row_begin,
                                                         int row_end) {
    return descending_trip_count(mask, order, row_begin, row_end, kBlockN);
  }

  // Keys of one step of S: half a block.
  static constexpr int kStepKeys = 64;
  static_assert(kBlockN == 2 * kStepKeys);
  // P V of this many columns at a time goes to a separate accumulator, which is added to O in fp32 after each block: a
  // wgmma accumulator of e4m3 products keeps 13 bits.
  static constexpr int kSliceCols = 64;
  // The lower keys of a block first: a causal mask may leave a row none or few of the upper ones, and a row max of
  // those would have to be taken again. With kExpBits ptxas would serialise the products of head dim 128.
  static constexpr bool kLowerKeysFirst = !kExpBits || kHeadDim < 128;
  // Accumulators of S: one for each step of a block if there are registers for them.
  static constexpr int kScoreBuffers = kHeadDim == 128 ? 1 : 2;
  // Two consumers issue their products in turn: one computes exponentials during the products of the other.
  static constexpr bool kTakesTurns = kHeadDim == 256;
  static_assert(!kTakesTurns || kWarpGroups == 2);
  // The scheduler multiplies descales (ScaledTile), O is not rescaled while it is zero, and consumers start while the
  // pass that transposes V ends. At head dim 128 ptxas would serialise the products of some kernels.
  static constexpr bool kScaledTiles = kHeadDim != 128, kKnowsZeroO = kScaledTiles, kStartsEarly = kScaledTiles;
  // A separate loop for blocks without a mask: a gain of 8 % with exp2, a loss of 4 % with kExpBits.
  static constexpr bool kHasUnmaskedLoop = !kExpBits;

  static constexpr int kVtRows = plan::fp8_vt_rows(kTile);
  // S (64, 64) = Q K^T from shared memory; O (64, D) += P V with P in registers and V^T in shared memory, both K-major.
  using MmaQk = decltype(cute::make_tiled_mma(cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>{}));
  static_assert(decltype(cute::tile_size<1>(MmaQk{}))::value == kStepKeys);

  // A row of a swizzle atom is a row of Q or K, or half of it; or a row of a block of V^T.
  static constexpr int kAtomCols = plan::fp8_atom_cols(kHeadDim), kAtoms = kHeadDim / kAtomCols, kAtomsV = 1;
  template <int kRowBytes>
  using KMajorAtom = std::conditional_t<kRowBytes == 128, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  template <int kAtomBytes, int kRows, int kCols, int kBuffers>
  using Tiles = decltype(cute::tile_to_shape(KMajorAtom<kAtomBytes>{},
                                             cute::Shape<cute::Int<kRows>, cute::Int<kCols>, cute::Int<kBuffers>>{}));
  using SmemLayoutQ = Tiles<kAtomCols, 64, kHeadDim, kQStages * kWarpGroups>;
  using SmemLayoutK = Tiles<kAtomCols, kBlockN, kHeadDim, kKvStages>;
  template <int kRows>
  using SmemLayoutVt = Tiles<kBlockN, kRows, kBlockN, 1>;  // of rows of a stage
  static constexpr int kSmemQ = 64 * kHeadDim;
  static constexpr int kSmemK = kBlockN * kHeadDim;
  static constexpr int kSmemV = kBlockN * kVtRows;

  static constexpr bool kSeparateOSmem = true;
  static constexpr int kOutAtomCols = plan::swizzle_atom_cols(kHeadDim);  // columns of O in a swizzle atom
  static constexpr int kStagedCols = kTile.o_cols;                        // columns of O staged at a time
  static constexpr int kSmemO = 64 * kStagedCols;
  // Half of the columns of O take as much as Q: the second half is staged over Q, so that no warp waits for a store.
  // With kExpBits ptxas would serialise the products.
  static constexpr bool kStagesOverQ = kHeadDim > 64 && !kExpBits;
  static_assert(!kStagesOverQ || (2 * kStagedCols == kHeadDim && 2 * kSmemO == kSmemQ));
};

}  // namespace sm90
}  // namespace flash
