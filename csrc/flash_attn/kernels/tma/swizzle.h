// Offsets of 16-byte vectors in a tile of shared memory, as a TMA box with swizzle writes them.
#pragma once

#include "core/host_device.h"

namespace flash {
namespace tma {

constexpr int kVectorCols = 8;  // 16 bytes of 16-bit elements

// Element offset of a 16-byte vector in a swizzle atom, a matrix of rows of `atom_cols` (64 or 32) columns. The vector
// index of a row is XORed with the index of its 128-byte line, modulo the vectors of a row.
FLASH_HOST_DEVICE constexpr int swizzle_offset(int atom_cols, int row, int vector) {
  const int vectors = atom_cols / kVectorCols;
  const int line = row * vectors / 8;
  return row * atom_cols + (vector ^ line % vectors) * kVectorCols;
}

}  // namespace tma
}  // namespace flash
