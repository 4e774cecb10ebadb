// Compile-time configuration of the mma.sync backward by (dtype, head dim, variant, class of shared memory).
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/row_loader.h"
#include "kernels/sm80/bwd_launch_params.h"
#include "kernels/sm80/operand_layouts.h"
#include "params/flash.h"
#include "plan/bwd_tiles.h"

namespace flash {
namespace sm80 {

template <Dtype kDtype, int kHeadDim_, BwdVariant kVariant_, bool kSmallTile>
struct BwdConfig {
  using Element = ElementOf<kDtype>;
  static constexpr bool kMayDrop = kVariant_ != BwdVariant::kPlain;
  static constexpr bool kMayBias = kVariant_ == BwdVariant::kDropout;
  static constexpr bool kAccumulatesDkv = kVariant_ == BwdVariant::kAccumulate;
  static constexpr plan::BwdTile kTile = plan::bwd_tile(kHeadDim_, kSmallTile);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kBlockM = kTile.block_m;
  static constexpr int kBlockN = kTile.block_n;
  static constexpr int kVRegisterCols = kTile.v_register_cols;
  static constexpr bool kVInRegisters = kVRegisterCols > 0;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kBlocksPerSm = plan::bwd_blocks_per_sm(kTile, kMayDrop);
  static_assert(kHeadDim == kHeadDim_, "HEADDIM_SWITCH and plan/tiles.h list the same head dims");

  template <int kWarpsM>
  using Mma = WarpGridMma<MmaAtomOf<kDtype>, kWarpsM, kTile.warps / kWarpsM>;
  // S, dP: (M, N)
  using MmaSdP = WarpGridMma<MmaAtomOf<kDtype>, kTile.sdp_warps_m, kTile.sdp_warps() / kTile.sdp_warps_m>;
  static constexpr bool kSplitsSdP = kTile.half_warps > 0;
  static constexpr int kSdPThreads = 32 * kTile.sdp_warps();
  using MmaDkv = Mma<kTile.dkv_warps_m>;  // dK, dV: (N, D)
  using MmaDq = Mma<kTile.dq_warps_m>;    // dQ: (M, D)
  using SdPCoords = AccumulatorCoords<kTile.sdp_warps_m, kTile.sdp_warps() / kTile.sdp_warps_m>;
  using DkvCoords = AccumulatorCoords<kTile.dkv_warps_m, kTile.warps / kTile.dkv_warps_m>;

  static constexpr int kAtomCols = swizzle_atom_cols(kHeadDim);
  using SmemLayoutQ = SwizzledTile<kBlockM, kHeadDim>;   // and dO
  using SmemLayoutKv = SwizzledTile<kBlockN, kHeadDim>;  // and dK, dV
  using SmemLayoutP = SwizzledTile<kBlockM, kBlockN>;    // and dS
  using SmemLayoutDq = SmemLayoutQ;
  using RowCopyT = RowCopy<Element, kThreads, kAtomCols, kHeadDim>;
  using RowCopyDs = RowCopy<Element, kThreads, swizzle_atom_cols(kBlockN), kBlockN>;  // from shared memory
  static constexpr int kQCopyThreads =
      kBlockM < RowCopyT::kRowsPerIteration ? kBlockM * RowCopyT::kThreadsPerRow : kThreads;
  using RowCopyQ = RowCopy<Element, kQCopyThreads, kAtomCols, kHeadDim>;

  static constexpr int kSmemQ = kBlockM * kHeadDim;  // elements
  static constexpr int kSmemKv = kBlockN * kHeadDim;
  static constexpr int kSmemVHead = kBlockN * kVRegisterCols;  // columns that registers hold
  static_assert(kVRegisterCols % kAtomCols == 0 && kSmemVHead <= 2 * kSmemQ, "V is loaded by way of Q and dO");
  static constexpr int kSmemP = kBlockM * kBlockN;
  static_assert(!kSplitsSdP || 2 * sizeof(Element) == sizeof(float), "dP on its way takes the place of P and dS");
  using SmemLayoutVHead = SwizzledTile<kBlockN, kVInRegisters ? kVRegisterCols : kHeadDim>;
  static constexpr int kDqTile = kBlockM * kHeadDim;  // floats
};

}  // namespace sm80
}  // namespace flash
