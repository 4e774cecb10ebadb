// The emulator's wgmma of the backward of head dims above 256.
#pragma once

#include "emulated_wgmma.h"
#include "kernels/common/accumulator.h"
#include "kernels/sm90/wide_bwd/config.h"

namespace flash {

template <int kCount>
struct Registers {
  static constexpr int kSize = kCount;
  float values[kCount];
  float& operator()(int i) { return values[i]; }
};

// Rows g and g + 8 of a warp's 16, or the transposed matrix.
template <int kCols_, bool kTransposed>
struct RegisterView {
  static constexpr int kRows = kTransposed ? kCols_ : 2, kCols = kTransposed ? 2 : kCols_, kSize = 2 * kCols_;
  float* values;
  float& operator()(int mi, int ni) const {
    const int row = kTransposed ? ni : mi, col = kTransposed ? mi : ni;
    return values[col / 2 * 4 + row * 2 + col % 2];
  }
};

template <int kCount>
RegisterView<kCount / 2, false> row_col_view(Registers<kCount>& registers) {
  return {registers.values};
}
template <int kCount>
RegisterView<kCount / 2, true> transposed_row_col_view(Registers<kCount>& registers) {
  return {registers.values};
}

namespace sm90 {

template <class Config>
struct WideBwdProducts : emulation::Wgmma {
  using Element = typename Config::Element;
  Registers<32> acc_s;
  Registers<128> gradient;
  uint32_t operand[16];
  emulation::HeldRows<Config::kHeldSlices> held;

  void clear_gradient() { std::fill(gradient.values, gradient.values + 128, 0.0f); }
  void hold(int chunk, const Element* from) { held.load(chunk, from); }

  template <int kChunk, int kSlots>
  void start_scores(const Element* resident, const Element* ring, int slot) {
    held.read();
    issue([=] {
      if (kChunk == 0) std::fill(acc_s.values, acc_s.values + 32, 0.0f);
      const Element* const right = ring + slot * Config::kChunkElements;
      const int unheld = 64 * (kChunk - Config::kHeldChunks);
      std::array<float, 64> left[2];
      for (int i = 0; i < 2 && unheld >= 0; ++i) left[i] = row_of(resident, row(i), unheld);
      for (int at = 0; at < 16; ++at) {
        const std::array<float, 64> right_row = row_of(right, at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2);
        for (int i = 0; i < 2; ++i)
          add_products(row_col_view(acc_s)(i, at), unheld < 0 ? held.row(i, 64 * kChunk) : left[i].data(), right_row);
      }
    });
  }

  // left: 64 columns of row(0) and row(1)
  void add(const float* const (&left)[2], const Element* chunks, int first, int count) {
    for (int k = 0; k < 64; ++k) {
      for (int col = first; col < first + count; col += 2) {
        const Element* const right = at(chunks, k, col / 2 * 8 + threadIdx.x % 4 * 2);
        for (int i = 0; i < 2; ++i) {
          row_col_view(gradient)(i, col) += left[i][k] * to_float(right[0]);
          row_col_view(gradient)(i, col + 1) += left[i][k] * to_float(right[1]);
        }
      }
    }
  }
  void start_half(const Element* chunks) {
    const std::vector<float> rows = rows_of(operand, 4);
    issue([=] { add({rows.data(), rows.data() + 64}, chunks, 0, 64); });
  }
  template <int kChunk>
  void start_chunk(const Element* left, const Element* chunks) {
    issue([=] {
      const std::array<float, 64> rows[2] = {row_of(left, row(0)), row_of(left, row(1))};
      add({rows[0].data(), rows[1].data()}, chunks, 16 * kChunk, 16);
    });
  }

  template <int kPending>
  void wait() {
    wait_but(kPending);
  }
  void wait_for_scores() { wait_but(0); }
  void wait_for_gradient() { wait_but(0); }

  void pack_operand() {
    for (int i = 0; i < 16; ++i) operand[i] = pack(acc_s(2 * i), acc_s(2 * i + 1));
  }
  void store_operand(Element* chunk) const {
    for (int pair = 0; pair < 16; ++pair) store_pair(chunk, pair, operand[pair]);
  }
  void write_scores(float* buffer) {
    for (int i = 0; i < 32; ++i) buffer[i * 128 + threadIdx.x % 128] = acc_s(i);
  }
  void multiply_scores(const float* buffer) {
    for (int i = 0; i < 32; ++i) acc_s(i) *= buffer[i * 128 + threadIdx.x % 128];
  }
};

}  // namespace sm90
}  // namespace flash
