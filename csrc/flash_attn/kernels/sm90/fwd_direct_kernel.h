// The wgmma forward of one wave of m_blocks (kDirect): a thread block computes one and ends. There is nothing to
// schedule and nobody to hand tiles on: every warp finds the tile from blockIdx, and the load warp asks for K and Q as
// soon as it has initialised the mbarriers. In a call of few microseconds the way to these first loads counts, and the
// size of the code, which is in no cache yet.
#pragma once

#include "kernels/common/max_logit.h"
#include "kernels/common/pdl.h"
#include "kernels/common/shared_storage.h"
#include "kernels/common/warp_index.h"
#include "kernels/sm90/fwd_epilogue.h"
#include "kernels/sm90/fwd_mainloop.h"
#include "kernels/sm90/fwd_producer.h"

namespace flash {
namespace sm90 {

// The last m_blocks of all heads come first, as a mask on the right makes them the longest; head after head in pairs of
// thread blocks.
template <class Config>
__device__ __forceinline__ WorkTile direct_tile(const FwdLaunch& launch, int index) {
  if constexpr (Config::kCluster > 1) {
    const FastDiv& m_blocks = launch.order.band_tiles;
    const int head = m_blocks.divide(index), batch = launch.heads_of_batch.divide(head);
    return equal_work_tile(launch.params, Config::kBlockM, batch, head - batch * launch.heads_of_batch.divisor,
                           index - head * m_blocks.divisor);
  }
  const FastDiv& heads = launch.order.heads;
  const int from_last = heads.divide(index), head = index - from_last * heads.divisor;
  const int batch = launch.heads_of_batch.divide(head);
  return equal_work_tile(launch.params, Config::kBlockM, batch, head - batch * launch.heads_of_batch.divisor,
                         from_last);
}

// The rows of a warpgroup: the m_block they lie in, and the first of them.
struct DirectRows {
  WorkTile m_block;
  int first;

  // The m_block as it would have to begin for these to be the rows of that warpgroup.
  __device__ __forceinline__ WorkTile tile(int group) const {
    WorkTile shifted = m_block;
    shifted.row_begin = first - 64 * group;
    return shifted;
  }
};

template <class Config>
__device__ __forceinline__ DirectRows direct_rows(const FwdLaunch& launch, int group) {
  static_assert(Config::kWarpGroups == 2, "paired_strip()");
  WorkTile tile = direct_tile<Config>(launch, blockIdx.x);
  if (Config::kCluster > 1 || !launch.pairs_rows) return {tile, tile.row_begin + 64 * group};
  const int m_blocks = (tile.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int first = 64 * plan::paired_strip(m_blocks, tile.row_begin / Config::kBlockM, group);
  tile.row_begin = first / Config::kBlockM * Config::kBlockM;
  tile.row_end = min(tile.row_begin + Config::kBlockM, tile.seqlen_q);
  return {tile, first};
}

// The warpgroup whose rows see the most keys: what it visits is loaded.
template <class Config>
__device__ __forceinline__ DirectRows last_direct_rows(const FwdLaunch& launch) {
  return direct_rows<Config>(launch, Config::kWarpGroups - 1);
}

// Load warp: initialises the mbarriers, then loads Q, K and V.
template <class Config>
struct DirectLoader : FwdProducer<Config> {
  using Base = FwdProducer<Config>;
  using Base::issues;
  using Base::launch;
  using Base::storage;
  using typename Base::LoadWork;

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (issues) {
      prefetch_tensor_maps(launch, false);
      storage.init_tile_barriers(false);
      Barrier::fence_init();
    }
    __syncwarp();
    arrive_at_begin<Config>();
    const WorkTile tile = last_direct_rows<Config>(launch).m_block;
    const KvBlockOrder order = kv_block_order<Config>(launch, tile);
    wait_for_previous_kernel();
    if (order.count() == 0) {  // of neighbouring rows
      store_fully_masked<Config>(launch, tile, 0);
      return;
    }
    load({tile, order, TmaRows(false, tile.batch, 0, tile.seqlen_k), launch.group.divide(tile.head)});
  }

  // V one block after K, as the consumers want them.
  __device__ __forceinline__ void load(const LoadWork& work) {
    if constexpr (Config::kCluster == 1) this->load_k(work, 0);
    load_q(work.tile);
    if constexpr (Config::kCluster > 1) {
      begin_together<Config>();  // Q needs no mbarrier of the other thread block
      this->load_k(work, 0);
    }
    const int count = work.order.count();
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      this->load_k(work, i);
      this->load_v(work, i - 1);
    }
    this->load_v(work, count - 1);
    this->wait_for_other_thread_block();
  }

  __device__ __forceinline__ void load_q(const WorkTile& tile) const {
    const TmaRows rows(false, tile.batch, 0, tile.seqlen_q);
#pragma unroll
    for (int group = 0; group < Config::kWarpGroups; ++group) {
      Base::load_q(direct_rows<Config>(launch, group).tile(group), rows, group);
    }
  }
};

// Consumer warpgroup: 64 rows from S to O.
template <class Config>
struct DirectConsumer {
  const FwdLaunch& launch;
  FwdMainloop<Config> mainloop;
  int loaded_beyond = 0;  // blocks that are loaded for the other warpgroup, after those of this one's m_block

  __device__ __forceinline__ DirectConsumer(const FwdLaunch& launch_, FwdStorage<Config>& storage, int group)
      : launch(launch_), mainloop(launch_, storage, group) {}

  __device__ __forceinline__ FwdWork<Config> work() {
    const DirectRows rows = direct_rows<Config>(launch, mainloop.group);
    const KvBlockOrder order = kv_block_order<Config>(launch, rows.m_block);
    const WorkTile tile = rows.tile(mainloop.group);
    if (Config::kCluster == 1 && launch.pairs_rows) {
      const KvBlockOrder loaded = kv_block_order<Config>(launch, last_direct_rows<Config>(launch).m_block);
      loaded_beyond = loaded.count() - order.count();
    }
    return {tile, order, trip_count_of<Config>(tile, order, launch.params.window, mainloop.group)};
  }

  // One block after the other: the ring has no room for all K before the first V is released.
  __device__ __forceinline__ void skip_loaded_beyond() {
#pragma unroll 1
    for (int i = 0; i < loaded_beyond; ++i) {
      mainloop.skip_k(1);
      mainloop.skip_v(1);
    }
  }

  __device__ __forceinline__ void compute_attn(const FwdWork<Config>& work) {
    if (mainloop.is_last_group()) mainloop.arrive_at_order_barrier();  // lets the first group start
    mainloop.wait_for_tile(0, 0);
    mainloop.issue_qk(0);
    mainloop.wait_for_scores();
    mainloop.first_step(work);
    const int num_skipped = mainloop.run(work, 0);
    mainloop.issue_last_pv(work);
    const int row_begin = mainloop.row_begin(work);
    float o_scale[FwdMainloop<Config>::kRows];
    store_max_logit(mainloop.softmax, launch.params, work.tile, mainloop.coords, row_begin);
    const float sink = row_sink(launch.params, work.tile);
    finalize_rows(mainloop.softmax, o_scale, launch.params, sink);
    mainloop.wait_for_o();
    mainloop.skip_v(num_skipped);
    skip_loaded_beyond();  // before O is stored: the other warpgroup may wait for the order barrier
    store_o(mainloop, work, launch.o_map, 0, o_scale);
    store_lse(mainloop.softmax, launch.params, work.tile, mainloop.coords, row_begin, sink);
    if (mainloop.group == 0) mainloop.wait_for_order_barrier();  // the last group's arrival
    if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();        // shared memory must outlive the store's reads
  }
};

template <class Config>
__device__ __forceinline__ FwdStorage<Config>& fwd_storage() {
  constexpr int kBytes = plan::sm90_fwd_smem_bytes(Config::kTile, Config::kVariant, Config::kDtype);
  return shared_storage<FwdStorage<Config>, kBytes>();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_fwd_direct_kernel(const __grid_constant__ FwdLaunch launch) {
  FwdStorage<Config>& storage = fwd_storage<Config>();
  const int warp_group = warpgroup_index();
  if (warp_group == Config::kWarpGroups) {
    DirectLoader<Config>(launch, storage).run();
    return;
  }
  if constexpr (Config::kCluster > 1) arrive_at_begin<Config>();
  DirectConsumer<Config> consumer(launch, storage, warp_group);
  const FwdWork<Config> work = consumer.work();
  begin_together<Config>();
  wait_for_previous_kernel();
  store_rng_state(launch.params.dropout);
  if (work.order.count() > 0) consumer.compute_attn(work);
  allow_next_kernel();  // not earlier: its thread blocks would crowd onto the few idle SMs
}

}  // namespace sm90
}  // namespace flash
