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

// One thread of the grid leaves the state for the backward and for flash_attn.dropout_mask.
__device__ __forceinline__ void store_rng_state(const Dropout& dropout) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const PhiloxSeed state(dropout.state);
  dropout.rng_state[0] = static_cast<int64_t>(state.seed);
  dropout.rng_state[1] = static_cast<int64_t>(state.offset);
}

struct DropoutMask {
  DropoutStream stream;
  uint32_t threshold;

  __device__ __forceinline__ DropoutMask(const Dropout& dropout, int batch, int head) : threshold(dropout.threshold) {
    const PhiloxSeed state(dropout.state);
    stream = dropout_stream(state.seed, state.offset, batch, head);
  }

  // probabilities: row_col_view; row_begin and col_begin are multiples of 16. One draw serves rows {mi, mi + 1} and
  // columns {ni, ni + 2} of the view, which are 8 apart in the matrix.
  template <class Probabilities, class Coords>
  __device__ __forceinline__ void apply(Probabilities& probabilities, const Coords& coords, int row_begin,
                                        int col_begin) const {
    using namespace cute;
    static_assert(decltype(size<1>(probabilities))::value % 4 == 0, "columns come in 16-wide squares");
#pragma unroll
    for (int mi = 0; mi < size<0>(probabilities); mi += 2) {
      const uint32_t row_counter = dropout_group(row_begin + coords.row(mi)) ^ stream.row_xor;
#pragma unroll
      for (int square = 0; square < size<1>(probabilities); square += 4) {
#pragma unroll
        for (int ni = square; ni < square + 2; ++ni) {
          const uint32_t col_counter = dropout_group(col_begin + coords.col(ni)) ^ stream.col_xor;
          const Word2 draw = philox2x32_7(row_counter, col_counter, stream.key);
#pragma unroll
          for (int half = 0; half < 4; ++half) {
            const bool keep = dropout_uniform(draw, half / 2, half % 2) >= threshold;
            auto& value = probabilities(mi + half / 2, ni + 2 * (half % 2));
            value = keep ? value : 0.0f;
          }
        }
      }
    }
  }
};

}  // namespace flash
