// Dropout of probabilities held in accumulators; the mask itself is defined in dropout_mask.h.
#pragma once

#include <cute/tensor.hpp>

#include "common/dropout_mask.h"
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
};

// The words of the rows and columns of a tile, made by the thread that wants them.
template <class Coords>
struct DropoutWords {
  const DropoutStream& stream;
  const Coords& coords;
  int row_begin, col_begin;

  __device__ __forceinline__ uint64_t row(int mi) const { return dropout_row(stream, row_begin + coords.row(mi)); }
  __device__ __forceinline__ uint32_t column_pair(int ni) const {
    return dropout_column_pair(stream, (col_begin + coords.col(ni)) / 2);
  }
};

// Calls visit(mi, ni, kept) for every element of a row_col_view of `rows` x `cols`, or of a transposed one. Columns are
// counted from an even one.
template <int kRows, int kCols, class Words, class Coords, class Visit>
__device__ __forceinline__ void for_each_draw(uint32_t threshold, const Words& words, const Coords& coords,
                                              const Visit& visit) {
  uint32_t column_pairs[kCols];
#pragma unroll
  for (int ni = 0; ni < kCols; ++ni) column_pairs[ni] = words.column_pair(ni);
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    const uint64_t row = words.row(mi);
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      const int shift = coords.col(ni) % 2 * 16;
      const uint32_t uniform = dropout_uniforms(row, column_pairs[ni], 0x7FFFu << shift);
      visit(mi, ni, uniform >= dropout_limit(row, threshold) << shift);
    }
  }
}

// Dropped probabilities become 0.
template <class Probabilities, class Coords>
__device__ __forceinline__ void apply_dropout(const DropoutMask& mask, Probabilities& probabilities,
                                              const Coords& coords, int row_begin, int col_begin) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(probabilities))::value, kCols = decltype(size<1>(probabilities))::value;
  const DropoutWords<Coords> words{mask.stream, coords, row_begin, col_begin};
  for_each_draw<kRows, kCols>(mask.threshold, words, coords, [&](int mi, int ni, bool kept) {
    probabilities(mi, ni) = kept ? probabilities(mi, ni) : 0.0f;
  });
}

// All ones in the halves of `uniforms` that are not below a limit, of which `complements` has 2^15 less the limit.
__device__ __forceinline__ uint32_t kept_halves(uint32_t uniforms, uint32_t complements) {
  uint32_t kept;  // copies of the highest bits, which __byte_perm() does not make
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(kept) : "r"(uniforms + complements));
  return kept;
}

// What a lane's two rows draw.
struct LaneRows {
  uint64_t rows[2];
  uint32_t complements[2];  // of the limits, in both halves

  LaneRows() = default;

  __device__ __forceinline__ LaneRows(const DropoutMask& mask, int first_row) {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      rows[mi] = dropout_row(mask.stream, first_row + 8 * mi);
      complements[mi] = (0x8000u - dropout_limit(rows[mi], mask.threshold)) * 0x10001u;
    }
  }

  // All ones in the halves of a pair of columns that row mi keeps.
  __device__ __forceinline__ uint32_t draw(int mi, uint32_t column_pair) const {
    return kept_halves(dropout_uniforms(rows[mi], column_pair), complements[mi]);
  }
};

}  // namespace flash
