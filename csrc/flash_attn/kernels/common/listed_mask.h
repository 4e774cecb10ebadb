// Masks as data on a tile of scores: hidden ones become -inf. Runs on partial blocks only.
#pragma once

#include <cute/tensor_impl.hpp>

#include "core/bwd_schedule.h"
#include "core/mask_factors.h"
#include "core/visibility.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/score_bias.h"
#include "kernels/common/seen_bits.h"
#include "kernels/common/sequence.h"
#include "params/flash.h"

namespace flash {

// The number of a work tile's list.
__device__ __forceinline__ int64_t list_index(const Flash_fwd_params& params, const MaskParams& mask,
                                              const WorkTile& tile, int block_m) {
  const int first = params.is_varlen() ? varlen_first_slot(tile.q_begin, tile.segment, block_m) : 0;
  const int matrix = mask.matrices.index(tile.batch, tile.head);
  return static_cast<int64_t>(matrix) * mask.lists.tiles + first + tile.row_begin / block_m;
}

__device__ __forceinline__ BlockList block_list(const BlockLists& lists, int64_t index) {
  const BlockCount count = lists.counts[index];
  return {lists.entries + index * lists.capacity, count.whole, count.whole + count.partial, lists.capacity};
}

// The list of the tile with number `slot` among those of a mask matrix.
__device__ __forceinline__ BlockList block_list(const MaskParams& mask, int batch, int head, int slot) {
  return block_list(mask.lists, static_cast<int64_t>(mask.matrices.index(batch, head)) * mask.lists.tiles + slot);
}

template <class Tile>
__device__ __forceinline__ MaskFactors factors_of(const Flash_fwd_params& params, const MaskFactors& factors,
                                                  const Tile& tile, int head) {
  return factors.of(tile.batch, head, params.seqlen_q, params.seqlen_k, tile.q_begin, tile.k_begin);
}

// A mask of the backward: the window and the factors, on a tile that hides something, and biases.
template <class Element>
struct FactorMask : BiasedVisibility<Element> {
  MaskFactors factors;
  bool hides;
};

template <class Element, class Tile>
__device__ __forceinline__ FactorMask<Element> factor_mask(const Flash_fwd_params& params, const MaskParams& mask,
                                                           const Visibility& window, const Tile& tile, int head,
                                                           bool hides) {
  return {{window, mask.bias.of(tile.batch, head, tile.q_begin)}, factors_of(params, mask.factors, tile, head), hides};
}

// The seen bits of a work tile's sequence.
template <class Tile>
__device__ __forceinline__ const uint32_t* seen_keys_of(const Flash_fwd_params& params, const MaskParams& mask,
                                                        const Tile& tile, int head, int segment) {
  return seen_keys(params, mask, tile.batch, head, tile.k_begin, segment);
}
__device__ __forceinline__ const uint32_t* seen_rows_of(const Flash_fwd_params& params, const MaskParams& mask,
                                                        const BwdWorkTile& tile, int head) {
  return seen_rows(params, mask, tile.batch, head, tile.q_begin, tile.q_segment);
}

// Rows of a tile of kRows rows from `begin` on that no bit of `seen` has, as MarkedRows::of_lane.
template <int kRows>
__device__ __forceinline__ uint32_t unseen_of_lane(const uint32_t* seen, int begin, int length) {
  const int lane = threadIdx.x % 32, first = begin + kMaskWordKeys * lane;
  const bool valid = lane < kRows / kMaskWordKeys && first < length;
  return valid ? ~seen[first / kMaskWordKeys] & MaskFactors::interval_word(0, length, first) : 0u;
}

// A step of a work tile of the backward by list: of each query head its list of m_blocks, head after head.
struct ListedQStep : QStep {
  int index = -1;
  BlockList list;
  BlockEntry entry;
};

// By all lanes of a warp together.
struct ListedQOrder {
  const MaskParams& mask;
  int batch, first_head, heads;
  int slot;  // number of the work tile among those of a mask matrix
  int total = 0;

  __device__ __forceinline__ ListedQOrder(const Flash_bwd_params& params, const MaskParams& mask_,
                                          const BwdWorkTile& tile, int block_n)
      : mask(mask_),
        batch(tile.batch),
        first_head(tile.head_k * params.h_h_k_ratio),
        heads(params.h_h_k_ratio),
        slot((params.is_varlen() ? varlen_first_slot(tile.k_begin, tile.q_segment, block_n) : 0) + tile.n_block) {
    for (int head = first_head; tile.seqlen_q > 0 && head < first_head + heads; ++head) total += list_of(head).count();
  }

  __device__ __forceinline__ BlockList list_of(int head) const { return block_list(mask, batch, head, slot); }
  __device__ __forceinline__ int count() const { return total; }

  __device__ __forceinline__ ListedQStep start() const {
    ListedQStep at{{first_head - 1, 0}};
    if (total > 0) advance(at);
    return at;
  }

  // Behind the last step the m_block is any.
  __device__ __forceinline__ void advance(ListedQStep& at) const {
    ++at.index;
    while (at.index >= at.list.count()) {
      if (at.head + 1 >= first_head + heads) return;
      ++at.head;
      at.list = list_of(at.head);
      at.index = 0;
    }
    at.entry.bits = __shfl_sync(0xffffffffu, at.list.at(at.index).bits, 0);
    at.m_block = at.entry.block();
  }
};

// What a thread sees of its scores: a bit for each, those of a row or of a key in one word. Loops over them are rolled
// where they compute words and unrolled where they read them: the code is a third of what it would be otherwise.

// Bits of the columns of a row of `coords`, whole pairs in 32 keys from `key` on: those of an octet of lanes.
__device__ __forceinline__ uint32_t bits_of_octets(uint32_t word, int first_col) {
  word >>= first_col;
  return (word & 0x3u) | (word >> 6 & 0xcu) | (word >> 12 & 0x30u) | (word >> 18 & 0xc0u);
}

// Hides scores whose bit of `seen` is 0 or whose key is hidden from the row. row_begin, key_begin: of the tile.
template <int kRows, class Scores, class Coords>
__device__ __forceinline__ void hide_unseen(Scores& scores, const Coords& coords, const MaskFactors& factors,
                                            int seqlen_k, int row_begin, int key_begin, uint32_t (&seen)[kRows]) {
  constexpr int kCols = decltype(cute::size<1>(scores))::value;
  static_assert(kCols <= 32, "a word holds a bit for each column");
  if (factors.key_hidden != nullptr) {
#pragma unroll 4
    for (int ni = 0; ni < kCols; ++ni) {
      const Intervals hidden = factors.hidden_rows_of(min(key_begin + coords.col(ni), seqlen_k - 1));
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        if (hidden.contain(row_begin + coords.row(mi))) seen[mi] &= ~(1u << ni);
      }
    }
  }
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      if (!(seen[mi] >> ni & 1u)) scores(mi, ni) = -INFINITY;
    }
  }
}

// For rows from row_begin and keys from key_begin on, a multiple of kMaskWordKeys.
template <class Scores, class Coords>
__device__ __forceinline__ void apply_factors(Scores& scores, const Coords& coords, const MaskFactors& factors,
                                              const Visibility& window, int row_begin, int key_begin) {
  using namespace cute;
  constexpr int kRows = 2, kCols = decltype(size<1>(scores))::value, kColsOfWord = kMaskWordKeys / 4;
  static_assert(decltype(size<0>(scores))::value == kRows && kCols <= 32 && kCols % kColsOfWord == 0,
                "a word holds a bit for each column");
  uint32_t seen[kRows] = {};
#pragma unroll 1
  for (int i = 0; i < kCols / kColsOfWord; ++i) {
    const int key = key_begin + kMaskWordKeys * i;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = min(row_begin + coords.row(mi), window.seqlen_q - 1);
      const uint32_t in_window = MaskFactors::interval_word(window.key_begin(row), window.key_end(row), key);
      seen[mi] |= bits_of_octets(in_window & factors.row_word(row, key), coords.col(0)) << (kColsOfWord * i);
    }
  }
  hide_unseen(scores, coords, factors, window.seqlen_k, row_begin, key_begin, seen);
}

// The same where a thread's columns are two keys, 8 apart within a word, and its rows are many queries: accumulators of
// S^T. row_begin, key_begin: of the tile.
template <class Scores, class Coords>
__device__ __forceinline__ void apply_factors_transposed(Scores& scores, const Coords& coords,
                                                         const MaskFactors& factors, const Visibility& window,
                                                         int row_begin, int key_begin) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value, kCols = 2;
  static_assert(kRows <= 32 && decltype(size<1>(scores))::value == kCols, "two keys of one word");
  const int word_key = key_begin + coords.col(0) / kMaskWordKeys * kMaskWordKeys;
  Intervals hidden[kCols];
#pragma unroll
  for (int ni = 0; ni < kCols; ++ni) {
    if (factors.key_hidden != nullptr) {
      hidden[ni] = factors.hidden_rows_of(min(key_begin + coords.col(ni), window.seqlen_k - 1));
    }
  }
  uint32_t seen[kCols] = {};
#pragma unroll 2
  for (int mi = 0; mi < kRows; ++mi) {
    const int row = min(row_begin + coords.row(mi), window.seqlen_q - 1);
    const uint32_t in_window = MaskFactors::interval_word(window.key_begin(row), window.key_end(row), word_key);
    const uint32_t word = in_window == 0u ? 0u : in_window & factors.row_word(row, word_key);
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      const bool sees = (word >> (coords.col(ni) % kMaskWordKeys) & 1u) && !hidden[ni].contain(row);
      seen[ni] |= static_cast<uint32_t>(sees) << mi;
    }
  }
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      if (!(seen[ni] >> mi & 1u)) scores(mi, ni) = -INFINITY;
    }
  }
}

// Rows of the scores are queries; keys are two, of S^T, or a multiple of 8.
template <int kBlockM, int kBlockN, class Scores, class Coords, class Element>
__device__ __forceinline__ void mask_scores(Scores& scores, const Coords& coords, const FactorMask<Element>& mask,
                                            const TileCoords& tile_coords) {
  if (!mask.hides) return;
  if constexpr (decltype(cute::size<1>(scores))::value == 2) {
    apply_factors_transposed(scores, coords, mask.factors, mask, tile_coords.row_begin, tile_coords.key_begin);
  } else {
    apply_factors(scores, coords, mask.factors, mask, tile_coords.row_begin, tile_coords.key_begin);
  }
}

}  // namespace flash
