// Masks as data on a tile of scores: hidden ones become -inf. Runs on partial blocks only.
#pragma once

#include <cute/tensor_impl.hpp>

#include "core/mask_factors.h"
#include "core/visibility.h"
#include "kernels/common/sequence.h"
#include "params/flash.h"

namespace flash {

// The number of a work tile's list, and the factors of its mask matrix.
__device__ __forceinline__ int64_t list_index(const Flash_fwd_params& params, const MaskParams& mask,
                                              const WorkTile& tile, int block_m) {
  const int first = params.is_varlen() ? varlen_first_slot(tile.q_begin, tile.segment, block_m) : 0;
  const int matrix = mask.factors.matrix(tile.batch, tile.head);
  return static_cast<int64_t>(matrix) * mask.lists.tiles + first + tile.row_begin / block_m;
}

__device__ __forceinline__ BlockList block_list(const BlockLists& lists, int64_t index) {
  const BlockCount count = lists.counts[index];
  return {lists.entries + index * lists.capacity, count.whole, count.whole + count.partial, lists.capacity};
}

template <class Tile>
__device__ __forceinline__ MaskFactors factors_of(const Flash_fwd_params& params, const MaskFactors& factors,
                                                  const Tile& tile, int head) {
  return factors.of_matrix(factors.matrix(tile.batch, head), params.seqlen_q, params.seqlen_k, tile.q_begin,
                           tile.k_begin);
}

// The strips of keys of a work tile's sequence in the seen bits: a word for each 32 keys.
template <class Tile>
__device__ __forceinline__ const uint32_t* seen_keys(const Flash_fwd_params& params, const MaskParams& mask,
                                                     const Tile& tile, int head, int segment) {
  const int first = params.is_varlen() ? varlen_first_slot(tile.k_begin, segment, kMaskStrip) : 0;
  const int matrix = mask.factors.matrix(tile.batch, head);
  const int64_t strip = static_cast<int64_t>(matrix) * mask.seen.key_strips + first;
  return mask.seen.keys + strip * (kMaskStrip / kMaskWordKeys);
}

// For rows from row_begin and keys from key_begin on, a multiple of kMaskWordKeys. A thread's columns are whole pairs
// of one octet of lanes: shifted by its first column, its bits of a word are at constants.
template <class Scores, class Coords>
__device__ __forceinline__ void apply_factors(Scores& scores, const Coords& coords, const MaskFactors& factors,
                                              const Visibility& window, int row_begin, int key_begin) {
  using namespace cute;
  constexpr int kCols = decltype(size<1>(scores))::value, kWords = (kCols * 4 + kMaskWordKeys - 1) / kMaskWordKeys;
  const auto distance = [&](int ni) { return coords.col(ni) - coords.col(0); };
#pragma unroll
  for (int mi = 0; mi < size<0>(scores); ++mi) {
    const int row = min(row_begin + coords.row(mi), window.seqlen_q - 1);
    const int begin = window.key_begin(row), end = window.key_end(row);
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int key = key_begin + kMaskWordKeys * i;
      words[i] = (MaskFactors::interval_word(begin, end, key) & factors.row_word(row, key)) >> coords.col(0);
    }
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      if (!(words[distance(ni) / kMaskWordKeys] >> (distance(ni) % kMaskWordKeys) & 1u)) scores(mi, ni) = -INFINITY;
    }
  }
  if (factors.key_hidden == nullptr) return;
#pragma unroll
  for (int ni = 0; ni < kCols; ++ni) {
    const Intervals hidden = factors.hidden_rows_of(min(key_begin + coords.col(ni), window.seqlen_k - 1));
#pragma unroll
    for (int mi = 0; mi < size<0>(scores); ++mi) {
      if (hidden.contain(row_begin + coords.row(mi))) scores(mi, ni) = -INFINITY;
    }
  }
}

}  // namespace flash
