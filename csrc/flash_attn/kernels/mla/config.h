// Tile of the mma.sync MLA decode kernel: few rows over many keys, bound by reading each cached row once.
#pragma once

#include "kernels/common/element.h"
#include "kernels/decode/vector_swizzle.h"
#include "params/mla.h"

namespace flash {
namespace mla {

// S by keys: a warp has 8 of the 32 keys of a step and all columns. O by columns: a warp has 128 columns and all keys.
template <Dtype kDtype_, int kRows_, int kStages_>
struct MlaConfig {
  using Element = ElementOf<kDtype_>;
  static constexpr int kRows = kRows_, kStages = kStages_;
  static constexpr int kLatent = kMlaLatentDim, kDim = kMlaLatentDim + kMlaRopeDim;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kKeys = 8 * kWarps;
  static constexpr int kRowTiles = kRows / 16;           // of m16n8k16
  static constexpr int kColsPerWarp = kLatent / kWarps;  // of O
  static constexpr int kColTiles = kColsPerWarp / 8;
  static_assert(kRows % 16 == 0 && kStages >= 2);

  using RowSwizzle = decode::VectorSwizzle<kDim>;
  using ProbsSwizzle = decode::VectorSwizzle<kKeys>;
};

template <class Config>
struct MlaStorage {
  using Element = typename Config::Element;
  alignas(128) Element kv[Config::kStages][Config::kKeys * Config::kDim];  // latent columns, then rotated ones
  alignas(128) Element q[Config::kRows * Config::kDim];
  alignas(128) Element probs[Config::kRows * Config::kKeys];
  float row_max[Config::kWarps][Config::kRows];
  float row_sum[Config::kWarps][Config::kRows];
};

}  // namespace mla
}  // namespace flash
