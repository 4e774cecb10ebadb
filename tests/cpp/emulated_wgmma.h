// What stand-ins for wgmma have in common: a thread computes its own results, when it issues a product or not before
// it waits for it.
#pragma once

#include <array>

#include "kernels/tma/swizzle.h"

namespace emulation {

static bool computes_late = false;

struct Wgmma {
  std::vector<std::function<void()>> pending;

  void issue(const std::function<void()>& product) {
    pending.push_back(product);
    if (!computes_late) compute_but(0);
  }
  void compute_but(size_t newest) {
    while (pending.size() > newest) {
      pending.front()();
      pending.erase(pending.begin());
    }
  }
  // For all but the newest, by all lanes of a warp together.
  void wait_but(size_t newest) {
    compute_but(newest);
    __syncwarp();
  }

  // A matrix of 64 rows in atoms of 64 columns.
  static const bf16* at(const bf16* atoms, int row, int col) {
    return atoms + col / 64 * 64 * 64 + flash::tma::swizzle_offset(64, row, col % 64 / 8) + col % 8;
  }
  static float element(const bf16* atoms, int row, int col) { return to_float(*at(atoms, row, col)); }
  // 64 columns from a multiple of 64 on
  static std::array<float, 64> row_of(const bf16* atoms, int row, int first_col = 0) {
    std::array<float, 64> values;
    for (int vector = 0; vector < 8; ++vector) {
      const bf16* const from = at(atoms, row, first_col + vector * 8);
      for (int i = 0; i < 8; ++i) values[vector * 8 + i] = to_float(from[i]);
    }
    return values;
  }
  static void add_products(float& sum, const float* left, const std::array<float, 64>& right) {
    float sums[8] = {};  // as many sums at once as a vector of floats has
    for (int k = 0; k < 64; ++k) sums[k % 8] += left[k] * right[k];
    for (const float part : sums) sum += part;
  }
  static int row(int i) { return threadIdx.x % 128 / 32 * 16 + i * 8 + threadIdx.x % 32 / 4; }

  // Of an A operand: the two columns of a register.
  static bf16* pair_of(bf16* atoms, int pair) {
    return const_cast<bf16*>(at(atoms, row(pair % 2), pair / 2 * 8 + threadIdx.x % 4 * 2));
  }
  static void store_pair(bf16* atoms, int pair, uint32_t bits) { std::memcpy(pair_of(atoms, pair), &bits, 4); }

  // Of slices of 16 columns a thread has its rows' values of two columns in eight: the others are in its quad.
  // -> row i at i * 16 * slices
  static std::vector<float> rows_of(const uint32_t* registers, int slices) {
    std::vector<float> rows(2 * 16 * slices);
    for (int slice = 0; slice < slices; ++slice) {
      Slot slot;
      slot.operation = 12;
      std::copy(registers + 4 * slice, registers + 4 * slice + 4, slot.a);
      const int parity = meet(slot), quad = threadIdx.x % 32 / 4 * 4;
      for (int lane = 0; lane < 4; ++lane) {
        for (int i = 0; i < 8; ++i) {
          const uint32_t pair = lane_slot(quad + lane, parity).a[i / 2];
          rows[(i / 2 % 2 * slices + slice) * 16 + i / 4 * 8 + lane * 2 + i % 2] = half_of(pair, i % 2);
        }
      }
    }
    return rows;
  }
};

// The chunks of an operand that a warp holds in registers, kSlices slices of 16 columns.
template <int kSlices>
struct HeldRows {
  uint32_t registers[kSlices * 4];
  std::vector<float> rows;

  void load(int chunk, const bf16* from) {
    start_load([=] {
      for (int pair = 0; pair < 16; ++pair)
        std::memcpy(&registers[chunk * 16 + pair], Wgmma::pair_of(const_cast<bf16*>(from), pair), 4);
    });
  }
  // Before the first product, by all lanes.
  void read() {
    finish_loads();
    if (rows.empty()) rows = Wgmma::rows_of(registers, kSlices);
  }
  const float* row(int i, int col) const { return rows.data() + i * 16 * kSlices + col; }
};

}  // namespace emulation
