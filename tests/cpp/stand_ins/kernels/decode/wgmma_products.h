// The emulator's wgmma of the decode kernel, and its barriers.
#pragma once

#include "emulated_wgmma.h"
#include "kernels/decode/wgmma_config.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace decode {

template <class Config>
struct KvWgmmaProducts : emulation::Wgmma {
  using Element = typename Config::Element;
  // Rows g and g + 8 of a warp's 16.
  template <int kCols_>
  struct View {
    static constexpr int kRows = 2, kCols = kCols_;
    float* values;
    float& operator()(int mi, int ni) const { return values[ni / 2 * 4 + mi * 2 + ni % 2]; }
  };
  template <int kCount>
  struct Registers {
    float values[kCount];
    float& operator()(int i) { return values[i]; }
    float operator()(int i) const { return values[i]; }
  };

  Registers<Config::kKeys / 2> acc_s;
  Registers<Config::kHeadDim / 2> acc_o;
  uint32_t query[Config::kSlices * 4];

  View<Config::kKeys / 4> scores() { return {acc_s.values}; }
  View<Config::kHeadDim / 4> out() { return {acc_o.values}; }
  void clear_out() { std::fill(acc_o.values, acc_o.values + Config::kHeadDim / 2, 0.0f); }

  void load_query(const Element* q, int warp, int lane) {
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      uint32_t matrices[4];
      sm80::load_matrices(matrices,
                          q + Config::vector_offset(Config::kRows, warp * 16 + lane % 16, slice * 2 + lane / 16));
      std::copy(matrices, matrices + 4, query + slice * 4);
    }
  }

  // Of a tile of keys in atoms of 64 columns.
  static const Element* at(const Element* tile, int key, int col) {
    return tile + col / 64 * Config::kKeys * 64 + tma::swizzle_offset(64, key, col % 64 / 8) + col % 8;
  }

  void multiply_keys(const Element* k) {
    const std::vector<float> rows = rows_of(query, Config::kSlices);
    issue([=] {
      for (int at = 0; at < Config::kKeys / 4; ++at) {
        const int key = at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2;
        for (int i = 0; i < 2; ++i) scores()(i, at) = 0.0f;
        for (int col = 0; col < Config::kHeadDim; col += 64) {
          const std::array<float, 64> values = row_of(k + col * Config::kKeys, key);
          for (int i = 0; i < 2; ++i) add_products(scores()(i, at), rows.data() + i * Config::kHeadDim + col, values);
        }
      }
    });
    wait_but(0);
  }

  void multiply_values(const Element* v) {
    uint32_t probs[Config::kKeys / 4];
    for (int i = 0; i < Config::kKeys / 4; ++i) probs[i] = pack(acc_s(2 * i), acc_s(2 * i + 1));
    const std::vector<float> rows = rows_of(probs, Config::kKeys / 16);
    issue([=] {
      for (int key = 0; key < Config::kKeys; ++key) {
        const float weights[2] = {rows[key], rows[Config::kKeys + key]};
        for (int col = 0; col < Config::kHeadDim / 4; ++col) {
          const float value = to_float(*at(v, key, col / 2 * 8 + threadIdx.x % 4 * 2 + col % 2));
          for (int i = 0; i < 2; ++i) out()(i, col) += weights[i] * value;
        }
      }
    });
    wait_but(0);
  }
};

}  // namespace decode
}  // namespace flash
