// The emulator's wgmma: a thread computes its own results, when it issues a product or not before it waits for it.
#pragma once

#include "emulated_wgmma.h"
#include "kernels/mla/wgmma_config.h"

namespace flash {
namespace mla {

template <class Config>
struct MlaProducts : emulation::Wgmma {
  using Element = typename Config::Element;
  float scores[32], acc_o[128];
  uint32_t probs[16], held_query[Config::kHeldSlices * 4];
  std::vector<float> held_rows;

  float& score(int eight, int i, int col) { return scores[eight * 4 + i * 2 + col]; }
  float& out(int eight, int i, int col) { return acc_o[eight * 4 + i * 2 + col]; }
  void clear_out() { std::fill(acc_o, acc_o + 128, 0.0f); }
  void pack_probs() {
    for (int i = 0; i < 16; ++i) probs[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }
  uint32_t prob_pair(int sixteen, int i) const { return probs[sixteen * 4 + i]; }

  // An atom of columns of both rows' queries.
  void add_atom(const float* const (&queries)[2], const Element* keys, int atom) {
    for (int eight = 0; eight < 8; ++eight) {
      for (int col = 0; col < 2; ++col) {
        const auto key = row_of(keys, eight * 8 + threadIdx.x % 4 * 2 + col, atom * Config::kAtomCols);
        for (int i = 0; i < 2; ++i) add_products(score(eight, i, col), queries[i], key);
      }
    }
  }

  void add_scores(const Element* q, const Element* keys, int atom) {
    const auto first = row_of(q, row(0), atom * Config::kAtomCols),
               second = row_of(q, row(1), atom * Config::kAtomCols);
    add_atom({first.data(), second.data()}, keys, atom);
  }

  void hold_query(int slice, const uint32_t (&registers)[4]) {
    std::copy(registers, registers + 4, held_query + slice * 4);
    if (slice == Config::kHeldSlices - 1) held_rows = rows_of(held_query, Config::kHeldSlices);
  }

  // place: of the atom among those that are held
  void add_held(const Element* keys, int place, int atom) {
    const float* const first = held_rows.data() + place * Config::kAtomCols;
    add_atom({first, first + 16 * Config::kHeldSlices}, keys, atom);
  }

  template <int kFirst, class Landed>
  void start_scores(const Element* q, const Element* keys, const Landed& landed) {
    issue([=] { std::fill(scores, scores + 32, 0.0f); });
    for (int i = 0; i < Config::kAtoms; ++i) {
      const int atom = Config::scored_atom(kFirst, i), place = Config::held_place(kFirst, atom);
      landed.wait(atom);
      landed.fence(atom);
      issue([=] {
        if (place >= 0) add_held(keys, place, atom);
        if (place < 0) add_scores(q, keys, atom);
      });
    }
  }

  // prob(i, key): of row(i)
  template <class Prob>
  void add_values(const Prob& prob, const Element* half) {
    for (int key = 0; key < 64; ++key) {
      const float weights[2] = {prob(0, key), prob(1, key)};
      for (int eight = 0; eight < 32; ++eight) {
        const Element* const values = at(half, key, eight * 8 + threadIdx.x % 4 * 2);
        for (int col = 0; col < 2; ++col) {
          for (int i = 0; i < 2; ++i) out(eight, i, col) += weights[i] * to_float(values[col]);
        }
      }
    }
  }

  void start_own_values(const Element* half) {
    const std::vector<float> rows = rows_of(probs, 4);
    issue([=] { add_values([&](int i, int key) { return rows[i * 64 + key]; }, half); });
  }

  void start_other_values(const Element* shared_probs, const Element* half) {
    issue([=] { add_values([&](int i, int key) { return element(shared_probs, row(i), key); }, half); });
  }

  void wait_for_scores() { wait_but(0); }
  void wait_for_out() { wait_but(0); }
};

inline void store_matrices(bf16* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  emulation::store_matrices(row, r0, r1, r2, r3);
}

}  // namespace mla
}  // namespace flash
