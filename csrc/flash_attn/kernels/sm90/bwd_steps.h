// The steps of a work tile of the wgmma backward: its m_blocks by the window, or by list.
#pragma once

#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bwd_launch_params.h"

namespace flash {
namespace sm90 {

template <class Config, class Launch>
__device__ __forceinline__ auto bwd_steps(const Launch& launch, const BwdWorkTile& tile) {
  if constexpr (Config::kListed) {
    return ListedQOrder(launch.params, launch.mask, tile, Config::kBlockN);
  } else {
    return q_block_order<Config>(launch.params, tile);
  }
}
template <class Config>
using BwdSteps = std::conditional_t<Config::kListed, ListedQOrder, QBlockOrder>;
template <class Config>
using BwdStep = std::conditional_t<Config::kListed, ListedQStep, QStep>;

}  // namespace sm90
}  // namespace flash
