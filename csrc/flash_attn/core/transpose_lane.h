// Which bytes a lane moves when a warp transposes a block of e4m3 V in shared memory. Plain C++17.
#pragma once

#include <cstdint>

#include "core/e4m3.h"
#include "core/host_device.h"

namespace flash {

// Offsets of 16-byte vectors, for 32 keys by 16 columns at a time. A row of V, kRowBytes, holds the columns of a key; a
// row of V^T holds the keys of a column, in the order of core/e4m3.h. Both have the swizzle of TMA boxes and wgmma.
// ldmatrix.trans gives lane 4 j + t columns 2 j and 2 j + 1 of keys 2 t and 2 t + 1 of 8 keys: kEven and kOdd of
// __byte_perm make of two such words four keys of one column, as stmatrix stores them.
template <int kRowBytes>
struct TransposeLane {
  static constexpr int kKeys = 32, kCols = 16;
  static constexpr uint32_t kEven = 0x6420, kOdd = 0x7531;
  static_assert(kRowBytes == 64 || kRowBytes == 128, "a row of V is one row of a swizzle atom");

  uint32_t from, to;

  FLASH_HOST_DEVICE explicit constexpr TransposeLane(int lane) : from(0), to(0) {
    const int matrix = lane / 8, row = lane % 8;
    const int key = 8 * matrix + row, column = 2 * row + matrix % 2;
    from = key * kRowBytes + key * kRowBytes / 128 % (kRowBytes / 16) * 16;
    to = column * e4m3::kVtKeys + (matrix / 2 ^ column % 8) * 16;
  }

  // Of keys 32 i and columns 16 j on.
  FLASH_HOST_DEVICE constexpr uint32_t source(int i, int j) const { return (from ^ j * 16) + i * kKeys * kRowBytes; }
  FLASH_HOST_DEVICE constexpr uint32_t target(int i, int j) const { return (to ^ i * 32) + j * kCols * e4m3::kVtKeys; }
};

}  // namespace flash
