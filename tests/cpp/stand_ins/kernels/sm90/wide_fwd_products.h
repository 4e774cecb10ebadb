// The emulator's wgmma of the forward of head dims above 256: a thread computes its own results, when it issues a
// product or not before it waits for it.
#pragma once

#include "emulated_wgmma.h"
#include "kernels/common/accumulator.h"
#include "kernels/sm90/wide_fwd_config.h"

namespace flash {
namespace sm90 {

template <class Config>
struct WideFwdProducts : emulation::Wgmma {
  using Element = typename Config::Element;
  float acc_s[32], acc_o[128];
  uint32_t probs[16];
  emulation::HeldRows<Config::kHeldSlices> held;

  // Rows g and g + 8 of a warp's 16.
  template <int kCols_>
  struct View {
    static constexpr int kRows = 2, kCols = kCols_;
    float* values;
    float& operator()(int mi, int ni) const { return values[ni / 2 * 4 + mi * 2 + ni % 2]; }
  };

  View<16> scores() { return {acc_s}; }
  View<64> out() { return {acc_o}; }
  void clear_out() { std::fill(acc_o, acc_o + 128, 0.0f); }
  void pack_probs() {
    for (int i = 0; i < 16; ++i) probs[i] = pack(acc_s[2 * i], acc_s[2 * i + 1]);
  }
  void store_probs(Element* shared_probs) const {
    for (int pair = 0; pair < 16; ++pair) store_pair(shared_probs, pair, probs[pair]);
  }
  void stage_out(Element* chunks, const float (&o_scale)[2]) const {
    for (int pair = 0; pair < 64; ++pair) {
      const float scale = o_scale[pair % 2];
      store_pair(chunks, pair, pack(acc_o[2 * pair] * scale, acc_o[2 * pair + 1] * scale));
    }
  }

  void hold_query(int chunk, const Element* q) { held.load(chunk, q); }

  template <int kChunk>
  void start_scores(const Element* q, const Element* k) {
    held.read();
    issue([=] {
      if (kChunk == 0) std::fill(acc_s, acc_s + 32, 0.0f);
      const int unheld = 64 * (kChunk - Config::kHeldChunks);
      std::array<float, 64> query[2];
      for (int i = 0; i < 2 && unheld >= 0; ++i) query[i] = row_of(q, row(i), unheld);
      for (int at = 0; at < 16; ++at) {
        const std::array<float, 64> key = row_of(k, at / 2 * 8 + threadIdx.x % 4 * 2 + at % 2, 64 * kChunk);
        for (int i = 0; i < 2; ++i)
          add_products(scores()(i, at), unheld < 0 ? held.row(i, 64 * kChunk) : query[i].data(), key);
      }
    });
  }

  // prob(i, key): of row(i), among the 16 keys of a part
  template <class Prob>
  void add_values(const Prob& prob, const Element* part) {
    for (int key = 0; key < 16; ++key) {
      const float probs_of_key[2] = {prob(0, key), prob(1, key)};
      for (int at = 0; at < 64; at += 2) {
        const int col = at / 2 * 8 + threadIdx.x % 4 * 2;
        const Element* const value = part + col / 64 * 16 * 64 + tma::swizzle_offset(64, key, col % 64 / 8) + col % 8;
        for (int i = 0; i < 2; ++i) {
          out()(i, at) += probs_of_key[i] * to_float(value[0]);
          out()(i, at + 1) += probs_of_key[i] * to_float(value[1]);
        }
      }
    }
  }

  template <int kPart>
  void start_own_values(const Element* ring, int slot) {
    const std::vector<float> rows = rows_of(probs, 4);
    issue([=] {
      add_values([&](int i, int key) { return rows[i * 64 + kPart * 16 + key]; }, ring + slot * Config::kChunkElements);
    });
  }
  template <int kPart>
  void start_other_values(const Element* shared_probs, const Element* ring, int slot) {
    issue([=] {
      add_values([&](int i, int key) { return element(shared_probs, row(i), kPart * 16 + key); },
                 ring + slot * Config::kChunkElements);
    });
  }

  template <int kPending>
  void wait() {
    wait_but(kPending);
  }
  void wait_for_scores() { wait_but(0); }
  void wait_for_out() { wait_but(0); }
};

}  // namespace sm90
}  // namespace flash
