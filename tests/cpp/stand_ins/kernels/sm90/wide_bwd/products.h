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
      for (int i = 0; i < 2; ++i) {
        for (int at = 0; at < 16; ++at) {
          for (int k = 0; k < 64; ++k) {
            const int unheld = 64 * (kChunk - Config::kHeldChunks) + k;
            const float left = unheld < 0 ? held(i, 64 * kChunk + k) : element(resident, row(i), unheld);
            row_col_view(acc_s)(i, at) += left * element(right, at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2, k);
          }
        }
      }
    });
  }

  // left(i, k): of row(i)
  template <class Left>
  void add(const Left& left, const Element* chunks, int first, int count) {
    for (int at = first; at < first + count; ++at) {
      for (int k = 0; k < 64; ++k) {
        const float right = element(chunks, k, at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2);
        for (int i = 0; i < 2; ++i) row_col_view(gradient)(i, at) += left(i, k) * right;
      }
    }
  }
  void start_half(const Element* chunks) {
    const std::vector<float> rows = rows_of(operand, 4);
    issue([=] { add([&](int i, int k) { return rows[i * 64 + k]; }, chunks, 0, 64); });
  }
  template <int kChunk>
  void start_chunk(const Element* left, const Element* chunks) {
    issue([=] { add([&](int i, int k) { return element(left, row(i), k); }, chunks, 16 * kChunk, 16); });
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
