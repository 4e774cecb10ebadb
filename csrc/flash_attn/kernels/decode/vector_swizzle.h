// Where the 16-byte vectors of Q, K and V lie in shared memory. Plain C++17.
#pragma once

#include <cstdint>

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

  // The same for the address of a vector, in bytes, where rows are aligned to their swizzled vectors.
  FLASH_HOST_DEVICE static constexpr uint32_t next_address(uint32_t address, int distance) {
    return (address ^ (distance & kMask) * 16) + (distance & ~kMask) * 16;
  }
};

}  // namespace decode
}  // namespace flash
