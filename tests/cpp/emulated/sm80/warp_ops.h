// The twin of src/sm80/warp_ops.h.
#pragma once

#include <cutlass/numeric_types.h>

namespace flash {

struct MatrixRow {
  const uint16_t* row;
};

inline void load_matrices(uint32_t (&r)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) emulation::fail("unaligned matrix row");
  const MatrixRow own{static_cast<const uint16_t*>(row)};
  const int operation = transposed ? emulation::kMatricesTransposed : emulation::kMatrices;
  const int parity = emulation::meet_warp(operation, &own, sizeof own);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    auto row_of = [&](int j) { return static_cast<const MatrixRow*>(emulation::lane_value(8 * i + j, parity))->row; };
    const uint16_t low = transposed ? row_of(2 * t)[g] : row_of(g)[2 * t];
    const uint16_t high = transposed ? row_of(2 * t + 1)[g] : row_of(g)[2 * t + 1];
    r[i] = low | static_cast<uint32_t>(high) << 16;
  }
  // A lane must not go on and overwrite what another one has not read yet.
  __syncwarp();
}

inline void load_matrices(uint32_t (&r)[4], const void* row) { load_matrices(r, row, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) { load_matrices(r, row, true); }

struct MultiplySlot {
  uint32_t a[4], b[2];
};

template <class Element>
float half_of(uint32_t pair, int index) {
  return static_cast<float>(Element::bitcast(static_cast<uint16_t>(pair >> 16 * index)));
}

template <class Element>
void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Element) {
  const MultiplySlot own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const int parity = emulation::meet_warp(emulation::kMultiply, &own, sizeof own);
  const int lane = threadIdx.x % 32;
  auto slot = [&](int of) { return static_cast<const MultiplySlot*>(emulation::lane_value(of, parity)); };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const float x = half_of<Element>(slot(row % 8 * 4 + k % 8 / 2)->a[row / 8 + k / 8 * 2], k % 2);
      const float y = half_of<Element>(slot(col * 4 + k % 8 / 2)->b[k / 8], k % 2);
      acc[i] += x * y;
    }
  }
}

inline void copy16_async(void* to, const void* from, bool valid = true) { emulation::copy_async(to, from, 16, valid); }
inline void copy4_async(void* to, const void* from, bool valid) { emulation::copy_async(to, from, 4, valid); }
inline void commit_copies() { emulation::commit_copies(); }
inline void wait_for_copies_but(int newest) { emulation::wait_for_copies(newest); }
inline void sync_named(int id, int threads) { emulation::meet_block(emulation::kNamed, id, threads); }

}  // namespace flash
