// The steps of a work tile of the wgmma backward: its m_blocks by the window, or by list.
#pragma once

#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/tma/clear_rows.h"

namespace flash {
namespace sm90 {

// Of parameters as a warp refers to them: through the launch, plain kernels have other machine code.
template <class Config>
__device__ __forceinline__ auto bwd_steps(const Flash_bwd_params& params, const MaskParams& mask,
                                          const BwdWorkTile& tile) {
  if constexpr (Config::kListed) {
    return ListedQOrder(params, mask, tile, Config::kBlockN);
  } else {
    return q_block_order<Config>(params, tile);
  }
}
template <class Config>
using BwdSteps = std::conditional_t<Config::kListed, ListedQOrder, QBlockOrder>;
template <class Config>
using BwdStep = std::conditional_t<Config::kListed, ListedQStep, QStep>;
template <class Config>
using BwdVisit = std::conditional_t<Config::kListed, ListedStep, QStep>;

// Fully masked rows of a tile, as loaders clear them.
template <class Config>
using MaskedRows = std::conditional_t<Config::kListed, tma::MarkedRows, int>;

// Of the rows of a step's tile from `row` on: those before first_row, or with lists those
// that see no key.
template <class Config, class Launch>
__device__ __forceinline__ MaskedRows<Config> masked_queries_of(const Launch& launch, const BwdWorkTile& tile,
                                                                const BwdStep<Config>& at, int row, int first_row) {
  if constexpr (Config::kListed) {
    if (at.entry.has_whole_strip()) return {};
    const uint32_t* const seen = seen_rows_of(launch.params, launch.mask, tile, at.head);
    return tma::MarkedRows{unseen_of_lane<Config::kBlockM>(seen, row, tile.seqlen_q)};
  } else {
    return first_row;
  }
}

// Of the kRows keys from `key` on likewise: those before first_key, or with lists those that no query head of the group
// sees.
template <class Config, int kRows, class Launch>
__device__ __forceinline__ MaskedRows<Config> masked_keys_of(const Launch& launch, const BwdWorkTile& tile,
                                                             const BwdSteps<Config>& order, int key, int first_key) {
  if constexpr (Config::kListed) {
    uint32_t unseen = ~0u;
    for (int head = order.first_head; head < order.first_head + order.heads; ++head) {
      const uint32_t* const seen = seen_keys_of(launch.params, launch.mask, tile, head, tile.q_segment);
      unseen &= unseen_of_lane<kRows>(seen, key, tile.seqlen_k);
    }
    return tma::MarkedRows{unseen};
  } else {
    return first_key;
  }
}

// The mask of a step for the 64 keys of a strip of the work tile.
template <class Config, class Launch>
__device__ __forceinline__ auto mask_of_step(const Launch& launch, const BwdWorkTile& tile, const BwdVisit<Config>& at,
                                             int strip) {
  const MaskOf<Config> window = mask_of<Config>(launch.params, tile);
  if constexpr (Config::kListed) {
    return factor_mask<typename Config::Element>(launch.params, launch.mask, window, tile, at.head,
                                                 at.entry.strip(strip) != BlockClass::kWhole);
  } else {
    return window;
  }
}

}  // namespace sm90
}  // namespace flash
