// Everything the decode kernel derives from (dtype, head dim, tile size).
#pragma once

#include "kernels/decode/variant.h"
#include "kernels/decode/vector_swizzle.h"
#include "kernels/sm80/operand_layouts.h"
#include "params/kvcache.h"
#include "plan/kv_head_pairs.h"
#include "plan/kv_tiles.h"

namespace flash {
namespace decode {

using namespace sm80;  // the warp-level instructions

// kDtype: of the cache. 8-bit values are converted to fp16 in registers; Q, of either 16-bit type, in shared memory.
template <Dtype kDtype_, int kHeadDim_, int kSize, KvVariant kVariant>
struct KvConfig {
  static constexpr Dtype kDtype = kDtype_;
  static constexpr bool kEightBit = is_eight_bit(kDtype);
  using Element = ElementOf<kEightBit ? Dtype::kFp16 : kDtype>;    // of the MMAs
  using Stored = std::conditional_t<kEightBit, uint8_t, Element>;  // of K and V
  static constexpr plan::KvTile kTile = plan::kv_tile(kHeadDim_, kSize, kDtype);
  static constexpr bool kSwapAb = kVariant == KvVariant::kSwapAb;
  static constexpr bool kPlain = kVariant == KvVariant::kPlain || kSwapAb;
  static constexpr bool kMaskBits = kVariant == KvVariant::kMaskBits;
  static constexpr bool kMayCluster = plan::kv_may_cluster(kPlain, kSize);
  static constexpr bool kMayPairHeads = plan::kv_may_pair_heads(kTile);
  static constexpr int kHeadDim = kTile.head_dim;
  static constexpr int kStep = kTile.step;
  static constexpr int kRowTiles = kTile.row_tiles;
  static constexpr int kRowWarps = kTile.row_warps;
  static constexpr int kRows = kTile.rows();
  static constexpr int kColWarps = kTile.col_warps;
  static constexpr int kCols = kHeadDim / kColWarps;  // of O, of a warp
  static constexpr int kGroups = kTile.groups;
  static constexpr int kGroupWarps = kRowWarps * kColWarps;
  static constexpr int kGroupThreads = 32 * kGroupWarps;
  static constexpr int kThreads = plan::kv_threads(kTile);
  static constexpr int kBlockN = plan::kv_block_n(kTile);
  static_assert(kHeadDim == kHeadDim_, "HEADDIM_SWITCH and plan/tiles.h list the same head dims");
  static_assert(kStep == 16 || kStep == 32, "a lane looks up the page of one key");
  static_assert(!kEightBit || kStep == 32, "32 keys are one ldmatrix of K, and a lane copies the descales of one key");
  static_assert(!kSwapAb || plan::kv_may_swap_ab(kTile), "one row tile over 8-bit values");
  static_assert(kColWarps == 1 || !kEightBit, "8-bit values have one warp to a row");
  static_assert(kTile.kv_bytes == sizeof(Stored) && (kTile.has_plain || !kPlain), "plan and kernel agree");

  using Swizzle = VectorSwizzle<kHeadDim>;  // of Q and of results
  using KvSwizzle = VectorSwizzle<kHeadDim * kTile.kv_bytes / 2>;
  static constexpr int kVectorCols = 16 / kTile.kv_bytes;  // of K and V
  // Loads of K and V: kLanesPerRow lanes to a row, a 16-byte vector each.
  static constexpr int kLanesPerRow = KvSwizzle::kWide ? (KvSwizzle::kVectors == 24  ? 8
                                                          : KvSwizzle::kVectors > 32 ? 32
                                                                                     : KvSwizzle::kVectors)
                                                       : 4;
  static constexpr int kRowsPerIteration = 32 / kLanesPerRow;
  static constexpr int kWarpRows = kStep / kGroupWarps;  // rows of a step that one warp loads
  static constexpr int kRowIterations = kWarpRows / kRowsPerIteration;
  static constexpr int kColIterations = KvSwizzle::kVectors / kLanesPerRow;
  // kPlain: pages of a step, and steps whose pages a warp looks up at once.
  static constexpr int kStepPages = kStep / plan::kv_page_rows(kTile);
  static constexpr int kPageSteps = 32 / kStepPages;
  static_assert(kWarpRows % kRowsPerIteration == 0 && kWarpRows % 8 == 0, "a warp loads in whole iterations");

  // Shared memory: Q, row statistics, scratch of the schedule, work parts and the K/V stages of each warp group.
  // Offsets in bytes.
  static constexpr int kStatsAt = kRows * kHeadDim * static_cast<int>(sizeof(Element));
  static constexpr int kScratchAt = kStatsAt + plan::kKvStatBytes;
  static constexpr int kPartsAt = kScratchAt + plan::kKvScratchBytes;
  static constexpr int kStagesAt = plan::kv_smem_bytes(kTile, 0);
  static_assert(kStagesAt == kPartsAt + plan::kKvPartBytes && kStagesAt % 128 == 0, "plan and kernel agree");
  static constexpr int kStageElements = kStep * plan::kv_key_bytes(kTile) / kTile.kv_bytes;  // of one warp group
  static constexpr int kValuesAt = kStep * kHeadDim;  // elements of a stage: K, then V,
  static constexpr int kDescalesAt = 2 * kValuesAt;   // then fp32 descales of the keys of K, and of V
  static_assert(kStageElements * sizeof(Stored) >= 16 * kHeadDim * sizeof(float), "a stage holds 16 rows of results");
  static_assert(kStageElements * sizeof(Stored) % 128 == 0, "stages are aligned as shared memory is");
};

}  // namespace decode
}  // namespace flash
