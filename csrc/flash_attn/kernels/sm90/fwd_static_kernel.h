// The wgmma forward of a few whole waves of m_blocks (kStatic): a thread block computes one m_block of each wave, which
// load warp and consumers find from its index. Between them there is no scheduler, before them no kernel that clears a
// counter. K and Q of the next m_block land while this one ends.
#pragma once

#include "kernels/sm90/fwd_direct_kernel.h"
#include "kernels/sm90/fwd_kernel.h"

namespace flash {
namespace sm90 {

// In place of WorkPipeline: each warp finds the same tiles.
template <class Config>
struct StaticTiles {
  const FwdLaunch& launch;
  plan::StaticTileOrder at;

  __device__ __forceinline__ explicit StaticTiles(const FwdLaunch& launch_)
      : launch(launch_), at(blockIdx.x, gridDim.x) {}

  __device__ __forceinline__ WorkTile tile() const {
    const HeadBlock block = launch.order.at(at.index);
    const int batch = launch.heads_of_batch.divide(block.head);
    return equal_work_tile(launch.params, Config::kBlockM, batch, block.head - batch * launch.heads_of_batch.divisor,
                           block.block);
  }

  // The next tile with visible keys; of the others the load warp stores the rows.
  template <bool kStores>
  __device__ __forceinline__ FwdWork<Config> next() {
    for (; at.index < launch.tiles; at.advance()) {
      const WorkTile own = tile();
      const KvBlockOrder order = kv_block_order<Config>(launch, own);
      if (order.count() > 0) {
        at.advance();
        return {own, order};
      }
      if constexpr (kStores) store_fully_masked<Config>(launch, own, 0);
    }
    return {WorkTile{}, KvBlockOrder{}};
  }

  // For the load warp.
  __device__ __forceinline__ FwdWork<Config> wait() { return next<true>(); }
  __device__ __forceinline__ void release_early(const KvBlockOrder&, int) const {}

  // For consumer warpgroup `group`, with its trip count.
  __device__ __forceinline__ FwdWork<Config> consumer_wait(int group) {
    FwdWork<Config> work = next<false>();
    if (work.exists()) work.steps = trip_count_of<Config>(work.tile, work.order, launch.params.window, group);
    return work;
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_fwd_static_kernel(const __grid_constant__ FwdLaunch launch) {
  static_assert(
      sizeof(FwdStorage<Config>) == plan::sm90_fwd_smem_bytes(Config::kTile, Config::kVariant, Config::kDtype),
      "plan and kernel agree on the shared memory");
  extern __shared__ __align__(1024) char smem[];
  FwdStorage<Config>& storage = *reinterpret_cast<FwdStorage<Config>*>(smem);
  StaticTiles<Config> tiles(launch);
  const int warp_group =
      __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // shuffled, so that ptxas sees uniform branches
  if (warp_group == Config::kWarpGroups) {
    if (threadIdx.x % 32 == 0) {
      prefetch_tensor_maps(launch, false);
      storage.init_barriers(false);
      Barrier::fence_init();
    }
    __syncwarp();
    arrive_at_begin<Config>();
    wait_for_previous_kernel();
    FwdProducer<Config>(launch, storage).run_unpaged(tiles);
    return;
  }
  begin_together<Config>();
  wait_for_previous_kernel();
  store_rng_state(launch.params.dropout);
  FwdConsumer<Config, StaticTiles<Config>>(launch, storage, tiles, warp_group).compute_attn();
  allow_next_kernel();  // not earlier: its thread blocks would crowd onto the few idle SMs
}

}  // namespace sm90
}  // namespace flash
