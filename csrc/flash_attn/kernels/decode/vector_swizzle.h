// Where the 16-byte vectors of Q, K and V lie in shared memory. Plain C++17.
#pragma once

#include "core/host_device.h"

namespace flash {
namespace decode {

// Rows of kHeadDim elements of 16 bits in shared memory, their 16-byte vectors swizzled so that neither ldmatrix nor
// cp.async has bank conflicts. `swizzled`: the swizzled number of a vector, vector ^ key(row); that of another vector
// at a constant distance is next().
template <int kHeadDim>
struct VectorSwizzle {
  static constexpr int kVectors = kHeadDim / 8;
  static constexpr bool kWide = kVectors % 8 == 0;  // rows of whole 128-byte lines; else two rows share a line
  static constexpr int kMask = kWide ? 7 : 3;

  FLASH_HOST_DEVICE static constexpr int key(int row) { return kWide ? row & 7 : (row >> 1) & 3; }

  // Swizzled number of vector `vector + distance`, given that of `vector`; vector and distance have no bits in common.
  FLASH_HOST_DEVICE static constexpr int next(int swizzled, int distance) {
    return (swizzled ^ (distance & kMask)) + (distance & ~kMask);
  }
};

// Rows as a TMA box of kCols columns (128 bytes) and kRows rows writes them: blocks of columns follow each other, and
// the hardware swizzles vectors by bits 7 to 9 of their address as VectorSwizzle does by the row.
template <int kRows, int kCols>
struct BoxLayout {
  static constexpr int kVectors = kCols / 8;
  static_assert(kVectors == 8 && kRows % 8 == 0, "a row of a block is a line of 128 bytes");

  // Offset, in elements, of the vector at a constant distance from one of the first block, whose swizzled number is
  // given.
  FLASH_HOST_DEVICE static constexpr int offset(int row, int swizzled, int distance) {
    return (distance / kVectors * kRows + row) * kCols + (swizzled ^ (distance % kVectors)) * 8;
  }
};

}  // namespace decode
}  // namespace flash
