// Masks as data in the mma.sync kernels: steps by the block lists of the call, and the mask of a step.
#pragma once

#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "kernels/common/listed_mask.h"
#include "kernels/common/sequence.h"
#include "kernels/sm80/bwd_launch_params.h"
#include "params/flash.h"
#include "plan/mask_plan.h"

namespace flash {
namespace sm80 {

// Blocks of the kernel in a block of the lists.
constexpr int blocks_of_entry(int block) { return plan::list_size(block) / block; }

// The n_blocks of a work tile of the forward, masked ones first: those of the window, or by list.
template <class Config>
struct GeneralKvSteps {
  static constexpr int kParts = blocks_of_entry(Config::kBlockN);

  BlockRange range;
  BlockList list;
  bool is_listed;

  __device__ __forceinline__ GeneralKvSteps(const typename Config::Params& params, const WorkTile& tile,
                                            const BlockRange& range_)
      : range(range_), is_listed(params.mask.lists.entries != nullptr) {
    if (is_listed) {
      list = block_list(params.mask.lists, list_index(params, params.mask, tile, plan::list_size(Config::kBlockM)));
    }
  }

  __device__ __forceinline__ int count() const { return is_listed ? kParts * list.count() : range.count(); }
  __device__ __forceinline__ int masked_count() const {
    return is_listed ? kParts * (list.count() - list.whole) : range.masked_count();
  }
  __device__ __forceinline__ int block_at(int step) const {
    if (!is_listed) return range.block_at(step);
    const int entry = step / kParts, partial = list.count() - list.whole;
    return kParts * list.at(entry < partial ? list.whole + entry : entry - partial).block() + step % kParts;
  }
};

// A step of the backward. index: in the list of the query head.
struct GeneralQStep : QStep {
  int index = -1;
  bool hides = true;  // the mask, if any, hides some of its scores
};

// The steps of a work tile of the backward, one query head after the other: those of the window, or of the head's list.
// Deterministic calls go by the window, because lists define no order of the additions to dQ.
template <class Config>
struct GeneralQSteps {
  static constexpr int kParts = blocks_of_entry(Config::kBlockM);
  static constexpr int kTileParts = blocks_of_entry(Config::kBlockN);

  QBlockOrder window;
  const MaskParams& mask;
  int batch;
  int slot;  // number of the work tile among those of a mask matrix
  bool is_listed;

  __device__ __forceinline__ GeneralQSteps(const Flash_bwd_params& params, const MaskParams& mask_,
                                           const BwdWorkTile& tile)
      : window(q_block_order<Config>(params, tile)),
        mask(mask_),
        batch(tile.batch),
        slot(tile.n_block / kTileParts),
        is_listed(mask_.lists.entries != nullptr && params.dq_semaphore_ptr == nullptr) {
    if (params.is_varlen()) {
      slot += varlen_first_slot(tile.k_begin, tile.q_segment, plan::list_size(Config::kBlockN));
    }
  }

  __device__ __forceinline__ BlockList list_of(int head) const { return block_list(mask, batch, head, slot); }

  __device__ __forceinline__ int count() const {
    if (!is_listed) return window.count();
    int entries = 0;
    if (window.count() > 0) {  // otherwise the sequence may be empty
      for (int i = 0; i < window.heads; ++i) entries += list_of(window.first_head + i).count();
    }
    return kParts * entries;
  }

  // The first step. There is at least one.
  __device__ __forceinline__ GeneralQStep start() const {
    if (!is_listed) return {window.start()};
    GeneralQStep at{{window.first_head, 0}};
    advance(at);
    return at;
  }

  // Moves on to the next step, which must exist.
  __device__ __forceinline__ void advance(GeneralQStep& at) const {
    if (!is_listed) {
      window.advance(at);
      return;
    }
    BlockList list = list_of(at.head);
    for (++at.index; at.index >= kParts * list.count(); at.index = 0) list = list_of(++at.head);
    const BlockEntry entry = list.at(at.index / kParts);
    at.m_block = kParts * entry.block() + at.index % kParts;
    at.hides = false;
#pragma unroll
    for (int strip = 0; strip < plan::list_size(Config::kBlockN) / kMaskStrip; ++strip) {
      at.hides |= entry.strip(strip) != BlockClass::kWhole;  // of a whole block too, beyond the last key
    }
  }

  // Whether the m_block has a tile of dQ: part of a block of the list may be beyond the last row.
  __device__ __forceinline__ bool has_dq(const QStep& at) const { return kParts == 1 || at.m_block < window.rows.end; }

  // For deterministic calls.
  __device__ __forceinline__ QStep before(const QStep& at) const { return window.before(at); }
};

template <class Config>
using BwdStepOf = std::conditional_t<Config::kMayBias, GeneralQStep, QStep>;
template <class Config>
using BwdStepsOf = std::conditional_t<Config::kMayBias, GeneralQSteps<Config>, QBlockOrder>;

template <class Config>
__device__ __forceinline__ BwdStepsOf<Config> bwd_steps(const BwdLaunch& launch, const BwdWorkTile& tile) {
  if constexpr (Config::kMayBias) {
    return {launch.params, launch.mask, tile};
  } else {
    return q_block_order<Config>(launch.params, tile);
  }
}

// The mask of a step: the window, the factors of a mask as data, which are read where they are needed, and biases.
template <class Element>
struct GeneralMask : BiasedVisibility<Element> {
  const Flash_bwd_params& params;
  const MaskParams& mask;
  const BwdWorkTile& tile;
  bool hides;
};

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

// For rows from row_begin and keys from key_begin on, multiples of the tile's sizes. Loops over words are rolled: the
// code is a third of what it would be otherwise.
template <class Scores, class Coords>
__device__ __forceinline__ void apply_factors(Scores& scores, const Coords& coords, const MaskFactors& factors,
                                              const Visibility& window, int row_begin, int key_begin) {
  using namespace cute;
  constexpr int kBandCols = 4;  // a thread has 4 of 16 columns, all of them in one word
  constexpr int kRows = decltype(size<0>(scores))::value, kBands = decltype(size<1>(scores))::value / kBandCols;
  uint32_t seen[kRows] = {};
#pragma unroll 1
  for (int band = 0; band < kBands; ++band) {
    const int col = key_begin + coords.col(kBandCols * band), bit = col % kMaskWordKeys, key = col - bit;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = min(row_begin + coords.row(mi), window.seqlen_q - 1);
      const uint32_t in_window = MaskFactors::interval_word(window.key_begin(row), window.key_end(row), key);
      const uint32_t word = (in_window == 0u ? 0u : in_window & factors.row_word(row, key)) >> bit;
      seen[mi] |= ((word & 0x3u) | (word >> 6 & 0xcu)) << (kBandCols * band);
    }
  }
  hide_unseen(scores, coords, factors, window.seqlen_k, row_begin, key_begin, seen);
}

template <int kBlockM, int kBlockN, class Scores, class Coords, class Element>
__device__ __forceinline__ void mask_scores(Scores& scores, const Coords& coords, const GeneralMask<Element>& mask,
                                            const TileCoords& at) {
  const Visibility& window = mask;
  if (mask.mask.lists.entries == nullptr) {
    flash::mask_scores<kBlockM, kBlockN>(scores, coords, window, at);
  } else if (mask.hides) {
    const MaskFactors factors = factors_of(mask.params, mask.mask.factors, mask.tile, at.head);
    sm80::apply_factors(scores, coords, factors, window, at.row_begin, at.key_begin);
  }
}

}  // namespace sm80
}  // namespace flash
