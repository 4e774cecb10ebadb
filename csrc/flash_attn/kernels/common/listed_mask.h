// Masks as data on a tile of scores: hidden ones become -inf. Runs on partial blocks only.
#pragma once

#include <cute/tensor_impl.hpp>

#include "core/bwd_schedule.h"
#include "core/mask_factors.h"
#include "core/visibility.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/score_bias.h"
#include "kernels/common/seen_bits.h"
#include "kernels/common/seen_lines.h"
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
template <class Params, class Tile>
__device__ __forceinline__ const uint32_t* seen_keys_of(const Params& params, const MaskParams& mask, const Tile& tile,
                                                        int head, int segment) {
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

// A step of a work tile of the backward by list.
struct ListedStep : QStep {
  BlockEntry entry;
};

// The same where it is found: of each query head its list of m_blocks, head after head.
struct ListedQStep : ListedStep {
  int index = -1;
  BlockList list;
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
    ListedQStep at{{{first_head - 1, 0}}};
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
    at.entry.bits = __shfl_sync(0xffffffffu, at.list.downwards(at.index).bits, 0);
    at.m_block = at.entry.block();
  }
};

// Hides what is not seen of a warp's scores by its rows, or of S^T by its keys: of the two the one of length 2. Of P
// `hidden` is 0.
template <int kWords, class Scores>
__device__ __forceinline__ void hide_unseen(Scores& scores, const SeenLines<kWords>& seen, float hidden = -INFINITY) {
  constexpr int kRows = decltype(cute::size<0>(scores))::value, kCols = decltype(cute::size<1>(scores))::value;
  constexpr bool kByKeys = kCols == 2;
  static_assert(kByKeys ? kRows == 8 * kWords : kRows == 2 && kCols == 8 * kWords, "a bit for each score");
#pragma unroll
  for (int line = 0; line < 2; ++line) {
    const uint32_t bits = seen.of_thread(line);
#pragma unroll
    for (int i = 0; i < 8 * kWords; ++i) {
      if (!(bits >> i & 1u)) scores(kByKeys ? i : line, kByKeys ? line : i) = hidden;
    }
  }
}

// Rows of the scores are queries; keys are two, of S^T, or a multiple of 16.
template <int kBlockM, int kBlockN, class Scores, class Coords, class Element>
__device__ __forceinline__ void mask_scores(Scores& scores, const Coords& coords, const FactorMask<Element>& mask,
                                            const TileCoords& tile_coords) {
  if (!mask.hides) return;
  const int row = tile_coords.row_begin, key = tile_coords.key_begin;
  if constexpr (decltype(cute::size<1>(scores))::value == 2) {
    hide_unseen(scores, seen_by_keys(mask.factors, mask, row, key + coords.col(0) / 16 * 16));
  } else {
    hide_unseen(scores, seen_by_rows<kBlockN>(mask.factors, mask, row + coords.row(0) / 16 * 16, key));
  }
}

}  // namespace flash
