// Dropout of probabilities in accumulators; core/dropout_mask.h defines the mask.
#pragma once

#include <cute/tensor_impl.hpp>

#include "core/dropout_mask.h"
#include "kernels/common/origin.h"
#include "params/flash.h"

namespace flash {

struct PhiloxSeed {
  uint64_t seed;
  uint64_t offset;

  __device__ __forceinline__ explicit PhiloxSeed(const PhiloxState& state)
      : seed(state.seed_ptr != nullptr ? static_cast<uint64_t>(*state.seed_ptr) : state.seed),
        offset(state.offset + (state.offset_ptr != nullptr ? static_cast<uint64_t>(*state.offset_ptr) : 0)) {}
};

// One thread of the grid stores the Philox state for the backward and for flash_attn.dropout_mask; zeros without
// dropout.
__device__ __forceinline__ void store_rng_state(const Dropout& dropout) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  const PhiloxSeed state(dropout.state);
  dropout.rng_state[0] = static_cast<int64_t>(state.seed);
  dropout.rng_state[1] = static_cast<int64_t>(state.offset);
}

// The mask of one sequence and head, whose scores begin at its origin (origin.h).
struct DropoutMask {
  DropoutStream stream;
  uint32_t threshold;
  int first_row, first_col;

  DropoutMask() = default;

  __device__ __forceinline__ DropoutMask(const Flash_fwd_params& params, int batch, int head)
      : threshold(params.dropout.threshold) {
    const PhiloxSeed state(params.dropout.state);
    const Origin origin = origin_of(params, batch);
    stream = dropout_stream(state.seed, state.offset, origin.document, origin.head + head);
    first_row = origin.row;
    first_col = origin.col;
  }

  // Bits of a row of the sequence, or of the pair of columns that begins at the even column `col`.
  __device__ __forceinline__ RandomBits row(int row) const { return dropout_row(stream, first_row + row); }
  __device__ __forceinline__ RandomBits column_pair(int col) const {
    return dropout_column_pair(stream, (first_col + col) >> 1);
  }
};

// Random bits of a tile's rows and columns, made by the thread that uses them.
template <class Coords>
struct TileBits {
  const DropoutStream& stream;
  const Coords& coords;
  int row_begin, col_begin;  // in the whole matrix

  __device__ __forceinline__ TileBits(const DropoutMask& mask, const Coords& coords_, int row_begin_, int col_begin_)
      : stream(mask.stream),
        coords(coords_),
        row_begin(mask.first_row + row_begin_),
        col_begin(mask.first_col + col_begin_) {}

  __device__ __forceinline__ RandomBits row(int mi) const { return dropout_row(stream, row_begin + coords.row(mi)); }
  __device__ __forceinline__ RandomBits column_pair(int ni) const {
    return dropout_column_pair(stream, (col_begin >> 1) + (coords.col(ni) >> 1));  // one for both columns of a pair
  }
};

// Calls visit(mi, ni, keep) for every element of a (possibly transposed) row_col_view of kRows x kCols. col_begin must
// be even.
template <int kRows, int kCols, class Bits, class Coords, class Visit>
__device__ __forceinline__ void for_each_random_bits(uint32_t threshold, const Bits& bits, const Coords& coords,
                                                     const Visit& visit) {
  const bool rare_is_kept = dropout_rare_is_kept(threshold);
  RandomBits column_pairs[kCols];
#pragma unroll
  for (int ni = 0; ni < kCols; ++ni) column_pairs[ni] = bits.column_pair(ni);
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    const RandomBits row = bits.row(mi);
    const uint32_t limit = dropout_limit(row, threshold);
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      visit(mi, ni, dropout_keeps(dropout_uniforms(row, column_pairs[ni]), coords.col(ni), limit, rare_is_kept));
    }
  }
}

// Dropped probabilities become 0.
template <class Probabilities, class Coords>
__device__ __forceinline__ void apply_dropout(const DropoutMask& mask, Probabilities& probabilities,
                                              const Coords& coords, int row_begin, int col_begin) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(probabilities))::value, kCols = decltype(size<1>(probabilities))::value;
  const TileBits<Coords> bits(mask, coords, row_begin, col_begin);
  for_each_random_bits<kRows, kCols>(mask.threshold, bits, coords, [&](int mi, int ni, bool keep_mask) {
    probabilities(mi, ni) = keep_mask ? probabilities(mi, ni) : 0.0f;
  });
}

// The same for two rows in a tenth of the code: a rolled loop decides, a bit for each element, and an unrolled one
// reads.
template <class Probabilities, class Coords>
__device__ __forceinline__ void apply_dropout_rolled(const DropoutMask& mask, Probabilities& probabilities,
                                                     const Coords& coords, int row_begin, int col_begin) {
  using namespace cute;
  constexpr int kRows = 2, kCols = decltype(size<1>(probabilities))::value;
  static_assert(decltype(size<0>(probabilities))::value == kRows && kCols <= 32, "a word holds a bit for each column");
  const TileBits<Coords> bits(mask, coords, row_begin, col_begin);
  const bool rare_is_kept = dropout_rare_is_kept(mask.threshold);
  const RandomBits rows[kRows] = {bits.row(0), bits.row(1)};
  uint32_t kept[kRows] = {};
#pragma unroll 1
  for (int ni = 0; ni < kCols; ni += 2) {
    const RandomBits column_pair = bits.column_pair(ni);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const uint32_t uniforms = dropout_uniforms(rows[mi], column_pair),
                     limit = dropout_limit(rows[mi], mask.threshold);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        kept[mi] |= static_cast<uint32_t>(dropout_keeps(uniforms, i, limit, rare_is_kept)) << (ni + i);
      }
    }
  }
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      if (!(kept[mi] >> ni & 1u)) probabilities(mi, ni) = 0.0f;
    }
  }
}

// Random bits and limits of a lane's two accumulator rows.
struct RowBits {
  RandomBits rows[2];
  uint32_t limits[2];  // repeated in both halves
  bool rare_is_kept;

  RowBits() = default;

  __device__ __forceinline__ RowBits(const DropoutMask& mask, int first_row)
      : rare_is_kept(dropout_rare_is_kept(mask.threshold)) {
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      rows[mi] = mask.row(first_row + 8 * mi);
      limits[mi] = dropout_limit(rows[mi], mask.threshold) * 0x10001u;
    }
  }

  // 0xffff in each half of the pair whose column row mi keeps. One HSET2 compares both uniforms as fp16 magnitudes,
  // which order as their bits do; a NaN compares as not below the limit.
  __device__ __forceinline__ uint32_t make_keep_mask(int mi, const RandomBits& column_pair) const {
    uint32_t keep_mask;
    asm("{\n\t"
        ".reg .b32 magnitudes;\n\t"
        ".reg .pred rare_kept;\n\t"
        "setp.ne.u32 rare_kept, %3, 0;\n\t"
        "abs.f16x2 magnitudes, %1;\n\t"
        "set.geu.xor.u32.f16x2 %0, magnitudes, %2, rare_kept;\n\t"
        "}"
        : "=r"(keep_mask)
        : "r"(dropout_uniforms(rows[mi], column_pair)), "r"(limits[mi]), "r"(static_cast<uint32_t>(rare_is_kept)));
    return keep_mask;
  }
};

}  // namespace flash
