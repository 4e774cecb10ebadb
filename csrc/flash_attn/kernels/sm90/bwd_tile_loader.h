// TMA loads of tiles whose first rows may be fully masked, by one warp.
#pragma once

#include <type_traits>

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/tma/clear_rows.h"
#include "kernels/tma/tensor_map.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

using namespace tma;

template <class Config>
struct BwdTileLoader {
  using Element = typename Config::Element;

  Barrier& pre_clear_full;
  const bool is_elected;  // this lane issues the copies
  uint32_t pre_clear_phase = 0;

  __device__ __forceinline__ explicit BwdTileLoader(Barrier& pre_clear_full_)
      : pre_clear_full(pre_clear_full_), is_elected(threadIdx.x % 32 == 0) {}

  // Loads rows [row, row + kRows) of kCols columns into a tile of kTileRows rows, one TMA box per swizzle atom. Fully
  // masked rows, those before `masked` or those it marks, become zeros: 0 * NaN from them would be NaN in the MMA.
  template <int kRows, int kCols, int kTileRows = kRows, class Masked>
  __device__ __forceinline__ void load(const CUtensorMap& map, Barrier& full, Element* smem, const TmaRows& rows,
                                       int row, Masked masked, int head, cute::TMA::CacheHintSm90 hint,
                                       int first_col = 0) {
    constexpr int kAtoms = kCols / Config::kAtomCols;
    bool has_masked_rows;
    if constexpr (std::is_same_v<Masked, MarkedRows>) {  // not overloads: they change how ptxas orders the load warp
      has_masked_rows = masked.any();
    } else {
      has_masked_rows = masked > row;
    }
    Barrier& tma_full = has_masked_rows ? pre_clear_full : full;
    if (is_elected) {
      tma_full.arrive_and_expect(kRows * kCols * static_cast<int>(sizeof(Element)));
      load_tile<kAtoms, Config::kAtomCols, kTileRows>(map, tma_full, smem, rows, row, head, hint, first_col);
    }
    if (!has_masked_rows) return;
    tma_full.wait(pre_clear_phase);
    pre_clear_phase ^= 1;
    if constexpr (std::is_same_v<Masked, MarkedRows>) {
      clear_rows<kTileRows, kAtoms, Config::kAtomCols>(smem, masked);
    } else {
      clear_rows<kTileRows, kAtoms, Config::kAtomCols>(smem, min(masked - row, kRows));
    }
    if (is_elected) full.arrive();
  }
};

}  // namespace sm90
}  // namespace flash
