// Where the pieces of a tile stand in shared memory, as a TMA box with swizzle writes them.
#pragma once

#include "core/host_device.h"

namespace flash {
namespace tma {

constexpr int kVectorCols = 8;  // 16 bytes of 16-bit elements

// Element offset of 8 columns of a chunk, a matrix of rows of `atom_cols` (64 or 32) columns. 128 bytes of shared
// memory hold 8 pieces; swizzling permutes the pieces of a row by the number of its 128 bytes, modulo the pieces of a
// row.
FLASH_HOST_DEVICE constexpr int swizzle_offset(int atom_cols, int row, int vector) {
  const int vectors = atom_cols / kVectorCols;
  const int line = row * vectors / 8;
  return row * atom_cols + (vector ^ line % vectors) * kVectorCols;
}

}  // namespace tma
}  // namespace flash
