// Compile-time configuration of the mma.sync forward with tangents by (dtype, head dim), and its shared memory.
#pragma once

#include "kernels/common/element.h"
#include "params/jvp.h"
#include "plan/jvp_fwd_plan.h"

namespace flash {
namespace sm80 {

template <Dtype kDtype_, int kHeadDim_, bool kSmallTile>
struct JvpFwdConfig {
  static constexpr Dtype kDtype = kDtype_;
  using Element = ElementOf<kDtype>;
  static constexpr plan::FwdTile kTile = plan::jvp_fwd_tile(kHeadDim_, kSmallTile);
  static constexpr int kHeadDim = kTile.head_dim, kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kWarps = kTile.warps, kThreads = 32 * kWarps;
  static_assert(kHeadDim == kHeadDim_ && kTile.col_warps == 1, "a tile for this head dim");
  static_assert(kBlockM % (16 * kWarps) == 0 && kBlockN % 16 == 0, "whole squares of 16 x 16");

  static constexpr int kAtomCols = 64, kAtoms = kHeadDim / kAtomCols;
  static_assert(plan::swizzle_atom_cols(kHeadDim) == kAtomCols, "of rows of 128 bytes");

  // Element offset of a 16-byte vector in a tile of kRows rows: atoms one after the other, swizzled as SwizzledTile is.
  static constexpr int kVectorCols = 8;
  template <int kRows>
  __device__ __forceinline__ static constexpr int offset(int row, int vector) {
    return (vector / 8 * kRows + row) * kAtomCols + (vector ^ row) % 8 * kVectorCols;
  }
};

// Of each tensor a tile, and one of its tangent. O and its tangent are staged in Q's.
template <class Config>
struct JvpFwdStorage {
  using Element = typename Config::Element;
  alignas(128) Element q[2][Config::kBlockM * Config::kHeadDim];
  alignas(128) Element k[2][Config::kBlockN * Config::kHeadDim];
  alignas(128) Element v[2][Config::kBlockN * Config::kHeadDim];
};

}  // namespace sm80
}  // namespace flash
