// The dK and dV kernel of the two-pass wgmma backward: keys of a K/V head against every m_block that sees them, for all
// query heads of the group. If registers hold dK and dV of 64 keys, a thread block has 128 keys, 64 for each consumer
// (KeyTileConsumer). Otherwise it has 64, and the consumers split each step by role: consumer 0 computes S, P and dV,
// consumer 1 dP, dS and dK; P is handed over in fp32 in register order, which is the same in both. Each consumer has
// its own tile of K or V and releases it before the last gradients are complete; these are stored straight from
// registers.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <type_traits>

#include "core/bwd_schedule.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/pdl.h"
#include "kernels/common/row_store.h"
#include "kernels/common/shared_storage.h"
#include "kernels/common/warp_index.h"
#include "kernels/sm90/bwd_row_values.h"
#include "kernels/sm90/bwd_statistics_warp.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/sm90/bwd_tile_loader.h"
#include "kernels/sm90/bwd_two_pass/dkv_key_tile_consumer.h"
#include "kernels/sm90/bwd_two_pass/products.h"
#include "kernels/sm90/bwd_two_pass/storage.h"
#include "kernels/sm90/bwd_work_queue.h"

namespace flash {
namespace sm90 {

// Visits the key tile of an index: worker.run(tile). Of kernels with lists, whose functions are so large that lambdas
// become calls, which would serialise the wgmmas of all warps (C7510).
template <class Config, class Worker>
struct InlinedKeyTile {
  const BwdTwoPassLaunch& launch;
  Worker& worker;

  __device__ __forceinline__ void operator()(int index) const {
    const BwdWorkTile tile = bwd_work_tile_at(launch.params, Config::kBlockN, index, launch.grid);
    if (!tile.empty(Config::kBlockN)) worker.run(tile);
  }
};

template <class Config>
struct DkvLoader : BwdTileLoader<Config> {
  using BwdTileLoader<Config>::is_elected;

  const BwdTwoPassLaunch& launch;
  DkvStorage<Config>& storage;
  PipelineState<Config::kStages> state;
  uint32_t kv_phase = 0;

  __device__ __forceinline__ DkvLoader(const BwdTwoPassLaunch& launch_, DkvStorage<Config>& storage_)
      : BwdTileLoader<Config>(storage_.pre_clear_full), launch(launch_), storage(storage_) {}

  __device__ __forceinline__ void run_all() {
    const auto fetch = [&](bool is_first, int index) {
      return fetch_index(launch.tile_count_semaphore, is_first, index);
    };
    const auto load = [&](int index) {
      const BwdWorkTile tile = bwd_work_tile_at(launch.params, Config::kBlockN, index, launch.grid);
      if (!tile.empty(Config::kBlockN)) run(tile);
    };
    if constexpr (Config::kListed) {
      announce_work_tiles(storage, launch.num_tiles, is_elected, fetch,
                          InlinedKeyTile<Config, DkvLoader>{launch, *this});
    } else {
      announce_work_tiles(storage, launch.num_tiles, is_elected, fetch, load);
    }
  }

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    using cute::TMA::CacheHintSm90;
    const Flash_bwd_params& params = launch.params;
    const TmaRows k_rows(params.is_varlen(), tile.batch, tile.k_begin, tile.seqlen_k);
    const TmaRows q_rows(params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
    const MaskOf<Config> visibility = mask_of<Config>(params, tile);
    const int first_row = first_visible_row(visibility), first_key = first_visible_key(visibility);
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    const int count = order.count();
    BwdStep<Config> at = order.start();
    MaskedRows<Config> masked_keys[Config::kKeyTiles];
#pragma unroll
    for (int i = 0; i < Config::kKeyTiles; ++i) {
      const int key = tile.n_block * Config::kBlockN + i * Config::kTileRows;
      masked_keys[i] = masked_keys_of<Config, Config::kTileRows>(launch, tile, order, key, first_key);
    }
    for (int i = 0; i < count; ++i) {
      const auto masked_queries = masked_queries_of<Config>(launch, tile, at, at.m_block * Config::kBlockM, first_row);
      const int stage = state.stage, row = at.m_block * Config::kBlockM;
      if (i == 0) {
        load_keys<Config::kHeadDim>(launch.k_map, storage.k_full, storage.k_empty, storage.k, k_rows, tile,
                                    masked_keys);
      }
      storage.q_empty[stage].wait(state.phase ^ 1);
      this->template load<Config::kBlockM, Config::kHeadDim>(launch.q_map, storage.q_full[stage], storage.q[stage],
                                                             q_rows, row, masked_queries, at.head,
                                                             CacheHintSm90::EVICT_LAST);
      if (i == 0) {
        load_keys<Config::kHeadDimV>(launch.v_map, storage.v_full, storage.v_empty, storage.v, k_rows, tile,
                                     masked_keys);
        kv_phase ^= 1;
      }
      storage.do_empty[stage].wait(state.phase ^ 1);
      this->template load<Config::kBlockM, Config::kHeadDimV>(launch.do_map, storage.do_full[stage],
                                                              storage.dout[stage], q_rows, row, masked_queries, at.head,
                                                              CacheHintSm90::EVICT_LAST);
      state.advance();
      order.advance(at);
    }
  }

  template <int kCols, int kSmemTile>
  __device__ __forceinline__ void load_keys(const CUtensorMap& map, Barrier (&full)[Config::kKeyTiles],
                                            Barrier (&empty)[Config::kKeyTiles],
                                            typename Config::Element (&tiles)[Config::kKeyTiles][kSmemTile],
                                            const TmaRows& k_rows, const BwdWorkTile& tile,
                                            const MaskedRows<Config> (&masked)[Config::kKeyTiles]) {
#pragma unroll
    for (int i = 0; i < Config::kKeyTiles; ++i) {
      const int key = tile.n_block * Config::kBlockN + i * Config::kTileRows;
      empty[i].wait(kv_phase ^ 1);
      this->template load<Config::kTileRows, kCols>(map, full[i], tiles[i], k_rows, key, masked[i], tile.head_k,
                                                    cute::TMA::CacheHintSm90::EVICT_FIRST);
    }
  }
};

template <class Config, class Visit>
__device__ __forceinline__ void for_each_key_tile(const BwdTwoPassLaunch& launch, DkvStorage<Config>& storage,
                                                  const Visit& visit) {
  for_each_index(storage, launch.num_tiles, [&](int index) {
    const BwdWorkTile tile = bwd_work_tile_at(launch.params, Config::kBlockN, index, launch.grid);
    if (!tile.empty(Config::kBlockN)) visit(tile);
  });
}

template <class Config>
struct DkvStatistics {
  const BwdTwoPassLaunch& launch;
  DkvStorage<Config>& storage;
  PipelineState<Config::kStages>& state;

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    load_statistics<Config>(launch, storage, tile, state);
  }
};

// Consumer 0: S, P and dV.
template <class Config>
struct DvConsumer : DkvConsumer<Config> {
  using Base = DkvConsumer<Config>;
  using Base::coords;
  using Base::kv_phase;
  using Base::launch;
  using Base::params;
  using Base::state;
  using Base::storage;
  using Base::thread;
  using typename Base::Coords;
  using typename Base::Element;
  using typename Base::RowValues;
  using typename Base::Scores;
  using Gradient = AccGradient<Config, Config::kHeadDimV>;

  using Base::Base;

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    Gradient acc_dv;
    cute::clear(acc_dv);
    if (order.count() > 0) accumulate(tile, order, acc_dv);
    store_dkv<Config>(params, tile, 0, thread, acc_dv, params.dropout.keep_scale, params.dv_ptr, params.dv_strides,
                      params.d_v);
    __syncwarp();  // wgmma needs converged warps
  }

  // S of the next step is issued after dV of this one, and both are in flight. No wgmma is in flight where branches
  // join: ptxas would serialise it (C7514).
  __device__ __forceinline__ void accumulate(const BwdWorkTile& tile, const BwdSteps<Config>& order, Gradient& acc_dv) {
    const int count = order.count();
    BwdStep<Config> at = order.start();
    Scores acc_s;
    storage.k_full[0].wait(kv_phase);
    kv_phase ^= 1;
    start_s(acc_s);
    wait_for<0>(acc_s);
    for (int i = 0; i < count; ++i) {
      if (i + 1 == count) storage.k_empty[0].arrive();
      const auto p = publish_p(tile, at, acc_s);
      const int stage = state.stage;
      storage.do_full[stage].wait(state.phase);
      start_gradient<Config, Config::kHeadDimV>(thread, p, storage.dout[stage], acc_dv);
      state.advance();
      order.advance(at);
      if (i + 1 < count) {
        start_s(acc_s);
        wait_for<1>(acc_dv);
        storage.do_empty[stage].arrive();
        wait_for<0>(acc_s);
      } else {
        wait_for<0>(acc_dv);
        storage.do_empty[stage].arrive();
      }
    }
  }

  __device__ __forceinline__ void start_s(Scores& acc_s) const {
    storage.q_full[state.stage].wait(state.phase);
    start_scores<Config, Config::kHeadDim>(thread, storage.k[0], storage.q[state.stage], acc_s, [](int) {});
  }

  // P of the step from its scores: published for consumer 1 and returned for dV. Releases Q.
  __device__ __forceinline__ auto publish_p(const BwdWorkTile& tile, const BwdStep<Config>& at, Scores& acc_s) const {
    const TileCoords tile_coords{tile.batch, at.head, at.m_block * Config::kBlockM, tile.n_block * Config::kBlockN};
    const auto visibility = mask_of_step<Config>(launch, tile, at, 0);
    const RowValues lse_log2{storage.lse_log2[state.stage], coords};
    auto scores = transposed_row_col_view(acc_s);
    if constexpr (!Config::kIsGeneral) {
      mask_scores<Config::kBlockM, Config::kBlockN>(scores, coords, visibility, tile_coords);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      storage.q_empty[state.stage].arrive();
      store_p(acc_s);
    } else {
      const SmemRandomBits<Coords> bits{storage.dropout_row_bits[state.stage], storage.dropout_col_bits[state.stage],
                                        coords};
      Scores acc_handed;
      auto handed = transposed_row_col_view(acc_handed);
      exponentiate_general<Config::kBlockM, Config::kBlockN>(params, visibility, tile_coords, coords, bits, lse_log2,
                                                             scores, handed);
      storage.q_empty[state.stage].arrive();
      store_p(acc_handed);
    }
    return convert<Element>(acc_s);
  }

  __device__ __forceinline__ void store_p(const Scores& acc_p) const {
    storage.p_empty.wait(this->p_phase() ^ 1);
    this->write_p(0, acc_p);
    storage.p_full.arrive();
  }
};

// Consumer 1: dP, dS and dK.
template <class Config>
struct DkConsumer : DkvConsumer<Config> {
  using Base = DkvConsumer<Config>;
  using Base::coords;
  using Base::kv_phase;
  using Base::launch;
  using Base::params;
  using Base::state;
  using Base::storage;
  using Base::thread;
  using typename Base::Element;
  using typename Base::RowValues;
  using typename Base::Scores;
  using Gradient = AccGradient<Config, Config::kHeadDim>;

  using Base::Base;

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    Gradient acc_dk;
    cute::clear(acc_dk);
    if (order.count() > 0) accumulate(order.count(), acc_dk);
    store_dkv<Config>(params, tile, 0, thread, acc_dk, params.scale_softmax, params.dk_ptr, params.dk_strides,
                      params.d);
    __syncwarp();  // wgmma needs converged warps
  }

  // dP of the next step is issued after dK of this one, and both are in flight.
  __device__ __forceinline__ void accumulate(int count, Gradient& acc_dk) {
    Scores acc_dp;
    storage.v_full[0].wait(kv_phase);
    kv_phase ^= 1;
    start_dp(acc_dp);
    wait_for<0>(acc_dp);
    for (int i = 0; i < count; ++i) {
      if (i + 1 == count) storage.v_empty[0].arrive();
      const auto ds = differentiate(acc_dp);
      const int stage = state.stage;
      storage.q_full[stage].wait(state.phase);
      start_gradient<Config, Config::kHeadDim>(thread, ds, storage.q[stage], acc_dk);
      state.advance();
      if (i + 1 < count) {
        start_dp(acc_dp);
        wait_for<1>(acc_dk);
        storage.q_empty[stage].arrive();
        wait_for<0>(acc_dp);
      } else {
        wait_for<0>(acc_dk);
        storage.q_empty[stage].arrive();
      }
    }
  }

  __device__ __forceinline__ void start_dp(Scores& acc_dp) const {
    storage.do_full[state.stage].wait(state.phase);
    start_scores<Config, Config::kHeadDimV>(thread, storage.v[0], storage.dout[state.stage], acc_dp, [](int) {});
  }

  // dS of the step from dP and consumer 0's P. Releases dO and P.
  __device__ __forceinline__ auto differentiate(Scores& acc_dp) const {
    const RowValues softmax_d{storage.softmax_d[state.stage], coords};
    auto dp = transposed_row_col_view(acc_dp);
    Scores acc_p;
    if constexpr (!Config::kIsGeneral) {
      subtract_softmax_d(dp, softmax_d);
      storage.do_empty[state.stage].arrive();
      load_p(acc_p);
#pragma unroll
      for (int i = 0; i < cute::size(acc_dp); ++i) acc_dp(i) *= acc_p(i);
    } else {
      load_p(acc_p);
      differentiate_handed(params, transposed_row_col_view(acc_p), dp, softmax_d);
      storage.do_empty[state.stage].arrive();
    }
    return convert<Element>(acc_dp);
  }

  __device__ __forceinline__ void load_p(Scores& acc_p) const {
    storage.p_full.wait(this->p_phase());
    this->read_p(0, acc_p);
    storage.p_empty.arrive();
  }
};

template <class Config>
using FirstConsumer = std::conditional_t<Config::kSplitsByRole, DvConsumer<Config>, KeyTileConsumer<Config, 0>>;
template <class Config>
using SecondConsumer = std::conditional_t<Config::kSplitsByRole, DkConsumer<Config>, KeyTileConsumer<Config, 1>>;

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_bwd_dkv_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {
  constexpr int kBytes = plan::sm90_dkv_smem_bytes(Config::kTile, Config::kIsGeneral, Config::kDtype);
  DkvStorage<Config>& storage = shared_storage<DkvStorage<Config>, kBytes>();
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();
  // The order matters: the dQ kernel, which may start from here on, relies on a complete softmax_d.
  wait_for_previous_kernel();
  allow_next_kernel();
  const int warp_group = warpgroup_index();
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = warp_index();
    if (warp == 0) DkvLoader<Config>(launch, storage).run_all();
    if (warp == 1) {
      PipelineState<Config::kStages> state;
      if constexpr (Config::kListed) {
        DkvStatistics<Config> statistics{launch, storage, state};
        for_each_index(storage, launch.num_tiles, InlinedKeyTile<Config, DkvStatistics<Config>>{launch, statistics});
      } else {
        for_each_key_tile(launch, storage,
                          [&](const BwdWorkTile& tile) { load_statistics<Config>(launch, storage, tile, state); });
      }
    }
  } else if (warp_group == 1) {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    FirstConsumer<Config> consumer(launch, storage);
    if constexpr (Config::kListed) {
      for_each_index(storage, launch.num_tiles, InlinedKeyTile<Config, FirstConsumer<Config>>{launch, consumer});
    } else {
      for_each_key_tile(launch, storage, [&](const BwdWorkTile& tile) { consumer.run(tile); });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    SecondConsumer<Config> consumer(launch, storage);
    if constexpr (Config::kListed) {
      for_each_index(storage, launch.num_tiles, InlinedKeyTile<Config, SecondConsumer<Config>>{launch, consumer});
    } else {
      for_each_key_tile(launch, storage, [&](const BwdWorkTile& tile) { consumer.run(tile); });
    }
  }
}

}  // namespace sm90
}  // namespace flash
