// The emulator's TMA: copies land at any time, in any order, and what lies beyond a matrix is 0.
#pragma once

#include <cuda.h>

#include "kernels/tma/mbarrier.h"
#include "kernels/tma/swizzle.h"

namespace cute {
namespace TMA {
enum class CacheHintSm90 { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
}
template <int kPending>
void tma_store_wait() {}
}  // namespace cute

namespace flash {
namespace tma {

struct TmaRows {
  bool is_packed;
  int batch, begin, length;

  TmaRows(bool is_packed_, int batch_, int begin_, int length_)
      : is_packed(is_packed_), batch(batch_), begin(begin_), length(length_) {}

  // Of element 0 of a row.
  bf16* at(const CUtensorMap& map, int row, int head) const {
    if (row < 0 || row >= (is_packed ? length : map.rows)) return nullptr;
    const int64_t first = is_packed ? begin * map.row_stride : batch * map.batch_stride;
    return map.data + first + row * map.row_stride + head * map.head_stride;
  }
};

template <int kAtoms, int kAtomCols, int kTileRows>
void load_tile(const CUtensorMap& map, Barrier& full, bf16* smem, const TmaRows& rows, int row, int head,
               cute::TMA::CacheHintSm90, int first_col = 0) {
  for (int atom = 0; atom < kAtoms; ++atom) {
    emulation::start_copy([=, &map, &full] {
      bf16* const to = smem + atom * kTileRows * kAtomCols;
      const int box_rows = map.box_rows > 0 ? map.box_rows : kTileRows;
      for (int i = 0; i < box_rows; ++i) {
        const bf16* const from = rows.at(map, row + i, head);
        for (int j = 0; j < kAtomCols; ++j) {
          const int col = first_col + atom * kAtomCols + j;
          to[swizzle_offset(kAtomCols, i, j / 8) + j % 8] = from != nullptr && col < map.cols ? from[col] : bf16{0};
        }
      }
      full.complete(2 * box_rows * kAtomCols);
    });
  }
}

template <int kAtoms, int kAtomCols, int kTileRows>
void store_tile(const CUtensorMap& map, const bf16* smem, const TmaRows& rows, int row, int head, int first_col = 0) {
  for (int i = 0; i < 16; ++i) {
    bf16* const to = rows.at(map, row + i, head);
    for (int j = 0; to != nullptr && j < kAtoms * kAtomCols; ++j) {
      const bf16* const atom = smem + j / kAtomCols * kTileRows * kAtomCols;
      const int col = first_col + j;
      if (col < map.cols) to[col] = atom[swizzle_offset(kAtomCols, i, j % kAtomCols / 8) + j % 8];
    }
  }
}

}  // namespace tma
}  // namespace flash
