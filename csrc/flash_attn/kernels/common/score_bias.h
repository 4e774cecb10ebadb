// Biases as data on a tile of scores in units of log2(e). Their elements are read straight from global memory.
#pragma once

#include <cute/tensor_impl.hpp>
#include <type_traits>

#include "core/score_bias.h"
#include "core/visibility.h"

namespace flash {

// A tile of scores of one sequence and head, where biases are added.
struct BiasTile {
  int row_begin, key_begin;
  int seqlen_q, seqlen_k;
  int diagonal;  // position of row_begin on the axis of the keys
};

// The mask of a call with biases that are not null.
template <class Element>
struct BiasedVisibility : Visibility {
  using BiasElement = Element;
  ScoreBias bias;  // of the sequence and head
};

template <class Mask, class = void>
struct HasScoreBias : std::false_type {};
template <class Mask>
struct HasScoreBias<Mask, std::void_t<typename Mask::BiasElement>> : std::true_type {};

constexpr float kBiasUnit = 1.4426950408889634f;  // log2(e)

template <class Element>
__device__ __forceinline__ float bias_element(const ScoreBias& bias, int64_t offset) {
  if (bias.is_float) return __ldg(static_cast<const float*>(bias.data) + offset);
  const uint16_t bits = __ldg(static_cast<const uint16_t*>(bias.data) + offset);
  return static_cast<float>(Element::bitcast(bits));
}

// Both biases of one score in units of log2(e). row < seqlen_q
template <class Element>
__device__ __forceinline__ float bias_at(const ScoreBias& bias, const BiasTile& tile, int row, int col) {
  float sum = 0.0f;
  if (bias.data != nullptr) {
    const int key = max(min(tile.key_begin + col, bias.last_col(tile.seqlen_k)), 0);
    sum = bias_element<Element>(bias, bias.offset(min(tile.row_begin + row, tile.seqlen_q - 1), key));
  }
  if (bias.table != nullptr) sum += __ldg(bias.table + bias.table_col(tile.key_begin + col - tile.diagonal - row));
  return kBiasUnit * sum;
}

// A pair of 16-bit numbers as floats.
template <class Element>
__device__ __forceinline__ float2 unpack_pair(uint32_t pair) {
  return {static_cast<float>(Element::bitcast(static_cast<uint16_t>(pair & 0xffffu))),
          static_cast<float>(Element::bitcast(static_cast<uint16_t>(pair >> 16)))};
}

// One of them as a float.
template <class Element>
__device__ __forceinline__ float half_of_pair(uint32_t pair, int half) {
  const float2 both = unpack_pair<Element>(pair);
  return half == 0 ? both.x : both.y;
}

// Explicit, so that all ways of reading a bias round alike: but for boxes of 16 bits, which the wgmma kernels add in
// the exponents, the forward those of whole blocks.
__device__ __forceinline__ void add_bias(float& score, float bias) { score = __fmaf_rn(kBiasUnit, bias, score); }

__device__ __forceinline__ void add_bias_pair(float& first, float& second, float2 pair) {
  add_bias(first, pair.x);
  add_bias(second, pair.y);
}
template <class Element>
__device__ __forceinline__ void add_bias_pair(float& first, float& second, uint32_t pair) {
  add_bias_pair(first, second, unpack_pair<Element>(pair));
}

// Lane 4 g + t gives columns {2 t, 2 t + 1} of row g of an 8 x 8 matrix and gets rows {2 t, 2 t + 1} of column g.
__device__ __forceinline__ uint32_t transpose_pairs(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// Whether all keys of a warp's scores exist, and pairs of them are single loads.
template <class Scores, class Coords>
__device__ __forceinline__ bool loads_pairs(const ScoreBias& bias, const BiasTile& tile, const Scores& scores,
                                            const Coords& coords) {
  constexpr int kCols = decltype(cute::size<1>(scores))::value;
  const int first = tile.key_begin + coords.col(0), last = tile.key_begin + coords.col(kCols - 1);
  const bool all_exist = first >= 0 && last <= bias.last_col(tile.seqlen_k);
  return __all_sync(0xffffffffu, bias.loads_pairs && all_exist && tile.key_begin % 2 == 0);
}

// attn_bias where a thread's columns are pairs of neighbours.
template <class Element, class Scores, class Coords>
__device__ __forceinline__ void add_pairs(Scores& scores, const Coords& coords, const ScoreBias& bias,
                                          const BiasTile& tile) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value, kCols = decltype(size<1>(scores))::value;
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    const int row = min(tile.row_begin + coords.row(mi), tile.seqlen_q - 1);
    const int64_t first = (row * bias.row_stride + tile.key_begin + coords.col(0)) >> 1;
#pragma unroll
    for (int ni = 0; ni < kCols; ni += 2) {
      const int64_t at = first + (coords.col(ni) - coords.col(0)) / 2;
      const float2 pair = bias.is_float ? __ldg(static_cast<const float2*>(bias.data) + at)
                                        : unpack_pair<Element>(__ldg(static_cast<const uint32_t*>(bias.data) + at));
      add_bias_pair(scores(mi, ni), scores(mi, ni + 1), pair);
    }
  }
}

// attn_bias of 16 bits where a thread's rows are pairs of neighbours, and its columns are 8 apart: S^T.
template <class Element, class Scores, class Coords>
__device__ __forceinline__ void add_transposed_pairs(Scores& scores, const Coords& coords, const ScoreBias& bias,
                                                     const BiasTile& tile) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value, kCols = decltype(size<1>(scores))::value;
  const int lane = threadIdx.x % 32, row_of_lane = lane / 4 - 2 * (lane % 4);
#pragma unroll
  for (int mi = 0; mi < kRows; mi += 2) {
    const int row = min(tile.row_begin + coords.row(mi) + row_of_lane, tile.seqlen_q - 1);
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      const int64_t at = (row * bias.row_stride + tile.key_begin + coords.col(ni) - row_of_lane) >> 1;
      const float2 pair = unpack_pair<Element>(transpose_pairs(__ldg(static_cast<const uint32_t*>(bias.data) + at)));
      add_bias_pair(scores(mi, ni), scores(mi + 1, ni), pair);
    }
  }
}

// Any strides and ends. The inner loop is the short one: offsets of the others need no registers then.
template <class Element, class Scores, class Coords>
__device__ __forceinline__ void add_elements(Scores& scores, const Coords& coords, const ScoreBias& bias,
                                             const BiasTile& tile) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value, kCols = decltype(size<1>(scores))::value;
  constexpr bool kRowsInside = kRows < kCols;
  constexpr int kInside = kRowsInside ? kRows : kCols, kOutside = kRowsInside ? kCols : kRows;
  const int last = bias.last_col(tile.seqlen_k);
  const auto row_offset = [&](int mi) {
    return min(tile.row_begin + coords.row(mi), tile.seqlen_q - 1) * bias.row_stride;
  };
  const auto col_offset = [&](int ni) { return max(min(tile.key_begin + coords.col(ni), last), 0) * bias.col_stride; };
  int64_t inside[kInside];
#pragma unroll
  for (int i = 0; i < kInside; ++i) inside[i] = kRowsInside ? row_offset(i) : col_offset(i);
#pragma unroll
  for (int j = 0; j < kOutside; ++j) {
    const int64_t outside = kRowsInside ? col_offset(j) : row_offset(j);
#pragma unroll
    for (int i = 0; i < kInside; ++i) {
      const int mi = kRowsInside ? i : j, ni = kRowsInside ? j : i;
      add_bias(scores(mi, ni), bias_element<Element>(bias, inside[i] + outside));
    }
  }
}

// rel_bias. A warp whose scores are all beyond the table's reach adds one number.
template <class Scores, class Coords>
__device__ __forceinline__ void add_table(Scores& scores, const Coords& coords, const ScoreBias& bias,
                                          const BiasTile& tile) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value, kCols = decltype(size<1>(scores))::value;
  const int first = tile.key_begin - tile.diagonal;
  const int nearest = first + coords.col(0) - coords.row(kRows - 1);
  const int farthest = first + coords.col(kCols - 1) - coords.row(0);
  if (__all_sync(0xffffffffu, nearest >= bias.reach) || __all_sync(0xffffffffu, farthest <= -bias.reach)) {
    const float value = kBiasUnit * __ldg(bias.table + bias.table_col(nearest));
#pragma unroll
    for (int i = 0; i < size(scores); ++i) scores(i) += value;
    return;
  }
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      scores(mi, ni) += kBiasUnit * __ldg(bias.table + bias.table_col(first + coords.col(ni) - coords.row(mi)));
    }
  }
}

// attn_bias, if there is one, of one sequence and head to scores: a row_col_view, or a transposed one. By all lanes of
// a warp.
template <class Element, class Scores, class Coords>
__device__ __forceinline__ void add_data(Scores& scores, const Coords& coords, const ScoreBias& bias,
                                         const BiasTile& tile) {
  constexpr bool kTransposed = Coords::kColsApart8 == 1;
  if (bias.data == nullptr) return;
  if (!loads_pairs(bias, tile, scores, coords) || (kTransposed && bias.is_float)) {
    add_elements<Element>(scores, coords, bias, tile);
  } else if constexpr (kTransposed) {
    add_transposed_pairs<Element>(scores, coords, bias, tile);
  } else {
    add_pairs<Element>(scores, coords, bias, tile);
  }
}

// Both biases.
template <class Element, class Scores, class Coords>
__device__ __forceinline__ void add_biases(Scores& scores, const Coords& coords, const ScoreBias& bias,
                                           const BiasTile& tile) {
  add_data<Element>(scores, coords, bias, tile);
  if (bias.table != nullptr) add_table(scores, coords, bias, tile);
}

}  // namespace flash
