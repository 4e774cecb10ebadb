// The wgmma forward of a few whole waves of m_blocks (kStatic): a thread block computes one m_block of each wave, which
// load warp and consumers find from its index. Between them there is no scheduler, before them no kernel that clears a
// counter. K and Q of the next m_block land while this one ends.
#pragma once

#include "kernels/sm90/fwd_direct_kernel.h"
#include "kernels/sm90/fwd_kernel.h"

namespace flash {
namespace sm90 {

// The work tiles of a thread block with visible keys.
template <class Config>
struct StaticTiles {
  const FwdLaunch& launch;
  plan::StaticTileOrder at;

  __device__ __forceinline__ explicit StaticTiles(const FwdLaunch& launch_)
      : launch(launch_), at(blockIdx.x, gridDim.x) {}

  // kStores: zeros in the rows of tiles without such keys.
  template <bool kStores>
  __device__ __forceinline__ FwdWork<Config> next() {
    for (; at.index < launch.tiles; at.advance()) {
      const WorkTile tile = direct_tile<Config>(launch, at.index);
      const KvBlockOrder order = kv_block_order<Config>(launch, tile);
      if (Config::kCluster > 1 || order.count() > 0) {
        at.advance();
        return {tile, order};
      }
      if constexpr (kStores) store_fully_masked<Config>(launch, tile, 0);
    }
    return {WorkTile{}, KvBlockOrder{}};
  }
};

// In place of WorkPipeline, for the load warp.
template <class Config>
struct LoaderTiles : StaticTiles<Config> {
  using StaticTiles<Config>::StaticTiles;

  __device__ __forceinline__ FwdWork<Config> wait() { return this->template next<true>(); }
  __device__ __forceinline__ void release_early(const KvBlockOrder&, int) const {}
};

// For a consumer warpgroup: it knows the next tile before it begins one, so that nothing delays the last P V.
template <class Config>
struct ConsumerTiles : StaticTiles<Config> {
  FwdWork<Config> found;

  __device__ __forceinline__ ConsumerTiles(const FwdLaunch& launch_, int group) : StaticTiles<Config>(launch_) {
    find(group);
  }

  __device__ __forceinline__ void find(int group) {
    found = this->template next<false>();
    if (Config::kCluster > 1 || found.exists()) {
      found.steps = trip_count_of<Config>(found.tile, found.order, this->launch.params.window, group);
    }
  }

  __device__ __forceinline__ FwdWork<Config> consumer_wait(int group) {
    const FwdWork<Config> work = found;
    find(group);
    return work;
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_fwd_static_kernel(const __grid_constant__ FwdLaunch launch) {
  FwdStorage<Config>& storage = fwd_storage<Config>();
  const int warp_group = warpgroup_index();
  if (warp_group == Config::kWarpGroups) {
    if (threadIdx.x % 32 == 0) {
      prefetch_tensor_maps(launch, false);
      storage.init_barriers(false);
      Barrier::fence_init();
    }
    __syncwarp();
    arrive_at_begin<Config>();
    wait_for_previous_kernel();
    if constexpr (Config::kCluster > 1) begin_together<Config>();
    LoaderTiles<Config> tiles(launch);
    FwdProducer<Config> producer(launch, storage);
    producer.run_unpaged(tiles);
    producer.wait_for_other_thread_block();
    return;
  }
  if constexpr (Config::kCluster > 1) arrive_at_begin<Config>();
  const ConsumerTiles<Config> tiles(launch, warp_group);
  begin_together<Config>();
  wait_for_previous_kernel();
  store_rng_state(launch.params.dropout);
  FwdConsumer<Config, ConsumerTiles<Config>>(launch, storage, tiles, warp_group).compute_attn();
  allow_next_kernel();  // not earlier: its thread blocks would crowd onto the few idle SMs
}

}  // namespace sm90
}  // namespace flash
