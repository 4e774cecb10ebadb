// Everything the wgmma backward derives from (dtype, head dim, variant): tile, MMAs, shared layouts, registers.
#pragma once

#include <cute/tensor.hpp>

#include "../plan/tiles.h"
#include "common/accumulator.h"
#include "common/convert.h"
#include "common/row_loader.h"
#include "flash.h"

namespace flash {
namespace sm90 {

// kGeneral: dropout, softcap, ALiBi and scales that are not positive, at run time.
enum class BwdVariant { kPlain, kGeneral };

template <Dtype kDtype, int kHeadDim_, BwdVariant kVariant_>
struct BwdConfig {
  using Element = ElementOf<kDtype>;
  static constexpr BwdVariant kVariant = kVariant_;
  static constexpr plan::Sm90BwdTile kTile = plan::sm90_bwd_tile(kHeadDim_);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages;
  static_assert(kBlockN == 128, "two consumer warpgroups, 64 keys each");
  static_assert(kBlockM == 64 || kBlockM == 128, "a row of dS is a whole number of 128-byte chunks");

  static constexpr int kWarpGroups = 2;
  static constexpr int kConsumers = 128 * kWarpGroups;  // threads
  static constexpr int kConsumerWarps = 4 * kWarpGroups;
  static constexpr int kThreads = kConsumers + 128;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  template <class MmaOp>
  using Mma = decltype(cute::make_tiled_mma(MmaOp{}));
  template <int kN>
  using Shape = cute::Shape<cute::_64, cute::Int<kN>, cute::_16>;
  static constexpr auto kK = cute::GMMA::Major::K, kMn = cute::GMMA::Major::MN;
  // Keys are the rows of S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T are A operands in registers:
  // dV += P^T dO, dK += dS^T Q.
  using MmaSdP = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kBlockM>, kK, kK>())>;
  using MmaDkv = Mma<decltype(cute::GMMA::rs_op_selector<Element, Element, float, Shape<kHeadDim>, kK, kMn>())>;
  // dQ = dS K, from shared memory: each consumer has half of the rows, or half of the columns.
  static constexpr bool kSplitsDqRows = kBlockM == 128;
  static constexpr int kDqCols = kSplitsDqRows ? kHeadDim : kHeadDim / 2;
  using MmaDq = Mma<decltype(cute::GMMA::ss_op_selector<Element, Element, float, Shape<kDqCols>, kK, kMn>())>;

  // A tile is a row of chunks of 64 columns, as a TMA box writes them: rows of 128 bytes, swizzled.
  static constexpr int kChunkCols = 64;
  static constexpr int kChunks = kHeadDim / kChunkCols;
  template <int kRows, int kCols>
  using Tile = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                            cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  // The transpose of the same bytes.
  template <int kRows, int kCols>
  using TransposedTile = decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{},
                                                      cute::Shape<cute::Int<kCols>, cute::Int<kRows>>{},
                                                      cute::Step<cute::_2, cute::_1>{}));
  using SmemLayoutKv = Tile<kBlockN, kHeadDim>;
  using SmemLayoutKt = TransposedTile<kBlockN, kHeadDim>;
  using SmemLayoutQ = Tile<kBlockM, kHeadDim>;  // and dO, and dQ of the conversion
  using SmemLayoutQt = TransposedTile<kBlockM, kHeadDim>;
  using SmemLayoutDs = Tile<kBlockM, kBlockN>;
  using SmemLayoutDst = TransposedTile<kBlockM, kBlockN>;  // dS^T
  static constexpr int kSmemQ = kBlockM * kHeadDim;        // elements
  static constexpr int kSmemKv = kBlockN * kHeadDim;
  static constexpr int kSmemDs = kBlockM * kBlockN;
  static constexpr int kDqTile = kBlockM * kHeadDim;  // floats
  using RowCopyT = RowCopy<Element, kConsumers, kChunkCols, kHeadDim>;
};

}  // namespace sm90
}  // namespace flash
