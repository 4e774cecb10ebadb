// TMA copies of tiles between global and shared memory, one box per swizzle atom of columns.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/tma/mbarrier.h"
#include "kernels/tma/tensor_map.h"

namespace flash {
namespace tma {

// Loads kAtoms atoms of kAtomCols columns, from row `row` of the sequence and column `first_col` on. An atom has
// kTileRows rows in shared memory, of which the box may cover fewer. By one thread, after full.arrive_and_expect() of
// all bytes.
template <int kAtoms, int kAtomCols, int kTileRows, class Element>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, Barrier& full, Element* smem, const TmaRows& rows,
                                          int row, int head, cute::TMA::CacheHintSm90 hint, int first_col = 0) {
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    cute::SM90_TMA_LOAD_5D::copy(&map, &full.state, static_cast<uint64_t>(hint), smem + atom * kTileRows * kAtomCols,
                                 first_col + atom * kAtomCols, row + rows.shift, head, rows.outer, rows.origin);
  }
}

// Stores kAtoms atoms, from column `first_col` on. By one thread, after a fence of the threads that wrote to `smem`;
// ends a bulk group, so that cute::tma_store_wait() covers it.
template <int kAtoms, int kAtomCols, int kTileRows, class Element>
__device__ __forceinline__ void store_tile(const CUtensorMap& map, const Element* smem, const TmaRows& rows, int row,
                                           int head, int first_col = 0) {
#pragma unroll
  for (int i = 0; i < kAtoms; ++i) {
    cute::SM90_TMA_STORE_5D::copy(&map, smem + i * kTileRows * kAtomCols, first_col + i * kAtomCols, row + rows.shift,
                                  head, rows.outer, rows.origin);
  }
  cute::tma_store_arrive();
}

}  // namespace tma
}  // namespace flash
