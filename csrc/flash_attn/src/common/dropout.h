// Dropout of probabilities held in accumulators; the mask itself is defined in philox.h.
#pragma once

#include <cute/tensor.hpp>

#include "common/philox.h"
#include "flash.h"

namespace flash {

struct PhiloxSeed {
  uint64_t seed;
  uint64_t offset;

  __device__ __forceinline__ explicit PhiloxSeed(const PhiloxState& state)
      : seed(state.seed_ptr != nullptr ? static_cast<uint64_t>(*state.seed_ptr) : state.seed),
        offset(state.offset + (state.offset_ptr != nullptr ? static_cast<uint64_t>(*state.offset_ptr) : 0)) {}
};

// One thread of the grid leaves the state for the backward and for flash_attn.dropout_mask; zeros without dropout.
__device__ __forceinline__ void store_rng_state(const Dropout& dropout) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const PhiloxSeed state(dropout.state);
  dropout.rng_state[0] = static_cast<int64_t>(state.seed);
  dropout.rng_state[1] = static_cast<int64_t>(state.offset);
}

struct DropoutMask {
  DropoutStream stream;
  uint32_t threshold;

  DropoutMask() = default;

  __device__ __forceinline__ DropoutMask(const Dropout& dropout, int batch, int head) : threshold(dropout.threshold) {
    const PhiloxSeed state(dropout.state);
    stream = dropout_stream(state.seed, state.offset, batch, head);
  }

  // Calls visit(mi, ni, kept) for every element of a row_col_view of `rows` x `cols`, or of a transposed one; row_begin
  // and col_begin are multiples of 16. One draw serves two rows and two columns, which are 8 apart in the matrix.
  template <int kRows, int kCols, class Coords, class Visit>
  __device__ __forceinline__ void for_each(const Coords& coords, int row_begin, int col_begin,
                                           const Visit& visit) const {
    constexpr int kRowStep = Coords::kRowsApart8, kColStep = Coords::kColsApart8;
    static_assert(kRows % (2 * kRowStep) == 0 && kCols % (2 * kColStep) == 0, "elements come in 16 x 16 squares");
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      if (mi / kRowStep % 2 != 0) continue;
      const uint32_t row_counter = dropout_group(row_begin + coords.row(mi)) ^ stream.row_xor;
#pragma unroll
      for (int ni = 0; ni < kCols; ++ni) {
        if (ni / kColStep % 2 != 0) continue;
        const uint32_t col_counter = dropout_group(col_begin + coords.col(ni)) ^ stream.col_xor;
        const Word2 draw = philox2x32_7(row_counter, col_counter, stream.key);
#pragma unroll
        for (int half = 0; half < 4; ++half) {
          visit(mi + half / 2 * kRowStep, ni + half % 2 * kColStep,
                dropout_uniform(draw, half / 2, half % 2) >= threshold);
        }
      }
    }
  }

  template <class Probabilities, class Coords>
  __device__ __forceinline__ void apply(Probabilities& probabilities, const Coords& coords, int row_begin,
                                        int col_begin) const {
    using namespace cute;
    constexpr int kRows = decltype(size<0>(probabilities))::value, kCols = decltype(size<1>(probabilities))::value;
    for_each<kRows, kCols>(coords, row_begin, col_begin, [&](int mi, int ni, bool kept) {
      probabilities(mi, ni) = kept ? probabilities(mi, ni) : 0.0f;
    });
  }
};

// The draws of a row_col_view's elements, made before the elements are there.
template <int kRows, int kCols>
struct DropoutDraws {
  static constexpr int kDraws = kRows * kCols / 4;
  Word2 draws[kDraws + (kDraws == 0)];
  uint32_t threshold;

  // As DropoutMask::for_each(), by a whole warp.
  template <class Coords>
  __device__ __forceinline__ void draw(const DropoutMask& mask, const Coords& coords, int row_begin, int col_begin) {
    static_assert(Coords::kRowsApart8 == 1 && Coords::kColsApart8 == 2 && kRows == 2 && kCols % 4 == 0,
                  "a draw serves both rows, and columns 2 indices apart");
    const uint32_t row_counter = dropout_group(row_begin + coords.row(0)) ^ mask.stream.row_xor;
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kDraws; ++i) {
      const uint32_t col_counter = dropout_group(col_begin + coords.col(i / 2 * 4 + i % 2)) ^ mask.stream.col_xor;
      draws[i] = philox2x32_7(row_counter, col_counter, mask.stream.key);
      all ^= draws[i].word[0] ^ draws[i].word[1];
    }
    // Left alone, ptxas moves the draws to where they are used, behind the products that should hide them. It moves no
    // shuffle over a branch, and cannot know that this one leaves the threshold as it is.
    threshold = mask.threshold + (all ^ __shfl_sync(0xffffffffu, all, threadIdx.x % 32));
  }

  template <class Probabilities>
  __device__ __forceinline__ void apply(Probabilities& probabilities) const {
    using namespace cute;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < kCols; ++ni) {
        const bool kept = dropout_uniform(draws[ni / 4 * 2 + ni % 2], mi, ni / 2 % 2) >= threshold;
        probabilities(mi, ni) = kept ? probabilities(mi, ni) : 0.0f;
      }
    }
  }
};

}  // namespace flash
