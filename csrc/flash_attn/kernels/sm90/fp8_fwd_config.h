// Compile-time configuration of a wgmma forward of e4m3 q, k and v: what FwdConfig is to 16 bits, for the storage, the
// work pipeline, the scheduler and the producer that both share.
#pragma once

#include <cute/tensor.hpp>

#include "core/e4m3.h"
#include "core/trip_count.h"
#include "kernels/common/convert.h"
#include "kernels/common/mask.h"
#include "plan/fp8_fwd_plan.h"

namespace flash {
namespace sm90 {

using plan::FwdVariant;

// kCodes_: P as e4m3 codes straight from the scores (core/e4m3.h) instead of exp2.
template <Dtype kOut, int kHeadDim_, bool kCodes_>
struct Fp8FwdConfig {
  using Element = cutlass::float_e4m3_t;
  using OutElement = ElementOf<kOut>;
  static constexpr bool kCodes = kCodes_;
  static constexpr FwdVariant kVariant = FwdVariant::kPlain;
  static constexpr plan::Sm90FwdTile kTile = plan::kSm90Fp8FwdTile;
  static constexpr int kHeadDim = kTile.head_dim, kHeadDimV = kTile.value_dim();
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kKvStages = kTile.kv_stages, kQStages = kTile.q_stages;
  static_assert(kHeadDim == kHeadDim_ && kHeadDim == 128, "a row of Q or K is one swizzle atom");
  static_assert(kBlockN == e4m3::kVtKeys, "a row of a block of V^T is one swizzle atom");
  static_assert(kQStages == 2, "S of the next tile is issued before O of this one is stored");

  static constexpr int kConsumerGroups = kTile.consumer_groups;
  static constexpr int kWarpGroups = kBlockM / 64;
  static constexpr int kConsumerWarps = 4 * kWarpGroups;
  static constexpr int kThreads = plan::sm90_fwd_threads(kTile);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kConsumerGroups == 1 && kWarpGroups == 2, "the register budget is that of two consumers");

  // Features of FwdConfig.
  static constexpr bool kHasPages = false, kHasScoreMod = false, kNoMask = false, kHasStoreWarp = false;
  static constexpr bool kAlignUnmasked = false, kPackedDropout = false, kSplitKv = false;
  static constexpr bool kFetchNextTileLate = true;
  // Downwards, so that an attention sink at the first keys meets a row max that is settled: upwards the few bits of P
  // would be spent on it.
  static constexpr bool kDescending = true;
  static constexpr bool kTransposedV = true;
  using TripCount = DescendingTripCount<typename MaskOf<Fp8FwdConfig>::Bounds>;
  template <class Mask>
  __device__ __forceinline__ static TripCount trip_count(const Mask& mask, const KvBlockOrder& order, int row_begin,
                                                         int row_end) {
    return descending_trip_count(mask, order, row_begin, row_end, kBlockN);
  }

  // A wgmma accumulator of e4m3 products keeps 13 bits: P V is added up in fp32 after so many halves of blocks.
  static constexpr int kFlushHalves = 8;
  // Keys of half a block: S of one half is computed while the other's becomes P.
  static constexpr int kHalfKeys = kBlockN / 2;

  static constexpr int kVtRows = plan::fp8_vt_rows(kTile);
  // S (64, N / 2) = Q K^T from shared memory; O (64, D) += P V with P in registers and V^T in shared memory, both
  // K-major.
  using MmaQk = decltype(cute::make_tiled_mma(cute::SM90::GMMA::MMA_64x64x32_F32E4M3E4M3_SS_TN<>{}));
  using MmaPv = decltype(cute::make_tiled_mma(cute::SM90::GMMA::MMA_64x136x32_F32E4M3E4M3_RS_TN<>{}));
  static_assert(decltype(cute::tile_size<1>(MmaQk{}))::value == kHalfKeys);
  static_assert(decltype(cute::tile_size<1>(MmaPv{}))::value == kVtRows);

  static constexpr int kAtomCols = 128, kAtoms = 1, kAtomsV = 1;
  using KMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  template <int kRows, int kBuffers>
  using Tiles = decltype(cute::tile_to_shape(
      KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kAtomCols>, cute::Int<kBuffers>>{}));
  using SmemLayoutQ = Tiles<64, kQStages * kWarpGroups>;
  using SmemLayoutK = Tiles<kHalfKeys, 2 * kKvStages>;  // the lower keys of a stage, then the upper ones
  using SmemLayoutVt = Tiles<kVtRows, kKvStages>;
  static constexpr int kSmemQ = 64 * kHeadDim;
  static constexpr int kSmemK = kBlockN * kHeadDim;
  static constexpr int kSmemV = kBlockN * kVtRows;

  static constexpr bool kSeparateOSmem = true;
  static constexpr int kOutAtomCols = 64;  // columns of O in a swizzle atom
  static constexpr int kSmemO = 64 * kTile.o_cols;
  static_assert(kTile.o_cols == kHeadDimV, "O is staged at once");
};

}  // namespace sm90
}  // namespace flash
