// Load warp of the forward with tangents: every tile of Q, K and V together with that of its tangent, if it has one.
#pragma once

#include "kernels/sm90/fwd_producer.h"
#include "kernels/sm90/jvp_fwd_config.h"
#include "kernels/sm90/jvp_fwd_launch_params.h"

namespace flash {
namespace sm90 {

// Rows without keys have tangents of 0. Called by the scheduler warp.
template <class Config>
__device__ __forceinline__ void store_fully_masked(const JvpFwdLaunch& launch, const WorkTile& tile, int split) {
  store_fully_masked<Config>(static_cast<const FwdLaunch&>(launch), tile, split);
  using Element = typename Config::OutElement;
  const Flash_fwd_params& params = launch.params;
  const int lane = threadIdx.x % 32;
  auto* const out = static_cast<Element*>(launch.to_ptr) + q_offset(tile, launch.to_strides);
  float* const t_lse = launch.t_lse_ptr + lse_offset(tile, params);
  for (int row = tile.row_begin; row < tile.row_end; ++row) {
    if (kVectorCols * lane >= params.d_v) continue;
    *reinterpret_cast<uint4*>(out + row * launch.to_strides.row + kVectorCols * lane) = uint4{};
  }
  for (int row = tile.row_begin + lane; row < tile.row_end; row += 32) t_lse[row] = 0.0f;
}

template <class Config>
struct JvpFwdProducer : FwdProducer<Config> {
  using Base = FwdProducer<Config>;
  using Element = typename Config::Element;
  using LoadWork = typename Base::LoadWork;
  using KvState = PipelineState<Config::kKvStages>;
  using Base::issues;
  using Base::storage;

  const JvpFwdLaunch& launch;

  __device__ __forceinline__ JvpFwdProducer(const JvpFwdLaunch& launch_, FwdStorage<Config>& storage_)
      : Base(launch_, storage_), launch(launch_) {}

  // A tensor's maps; tangent: null without one.
  struct Maps {
    const CUtensorMap& primal;
    const CUtensorMap* tangent;
  };
  __device__ __forceinline__ static Maps maps(const CUtensorMap& primal, const CUtensorMap& tangent, bool has_tangent) {
    return {primal, has_tangent ? &tangent : nullptr};
  }

  // Both tiles of a buffer, by one thread.
  template <int kRows>
  __device__ __forceinline__ void load_both(const Maps& maps, Barrier& full, Element* smem, const TmaRows& rows,
                                            int row, int head, cute::TMA::CacheHintSm90 hint) const {
    constexpr int kElements = kRows * Config::kHeadDim, kBytes = kElements * static_cast<int>(sizeof(Element));
    full.arrive_and_expect(maps.tangent == nullptr ? kBytes : 2 * kBytes);
    this->template load<kRows, Config::kAtoms>(maps.primal, full, smem, rows, row, head, hint);
    if (maps.tangent == nullptr) return;
    this->template load<kRows, Config::kAtoms>(*maps.tangent, full, smem + kElements, rows, row, head, hint);
  }

  // Waits until all consumers have released the stage. The first `num_masked` rows become zeros.
  __device__ __forceinline__ void load_kv(const Maps& maps, Barrier* full, Barrier* empty, Element* buffers,
                                          KvState& state, const LoadWork& work, int n_block, int num_masked = 0) {
    const bool clears = num_masked > 0;
    Barrier& tma_full = clears ? storage.pre_clear_full : full[state.stage];
    Element* const smem = buffers + state.stage * Config::kSmemK;
    empty[state.stage].wait(state.phase ^ 1);
    if (issues) {
      load_both<Config::kBlockN>(maps, tma_full, smem, work.rows, n_block * Config::kBlockN, work.head_k,
                                 cute::TMA::CacheHintSm90::EVICT_LAST);
    }
    if (clears) {
      tma_full.wait(this->pre_clear_phase);
      this->pre_clear_phase ^= 1;
#pragma unroll 1
      for (int tile = 0; tile < (maps.tangent == nullptr ? 1 : 2); ++tile) {
        clear_rows<Config::kBlockN, Config::kAtoms, Config::kAtomCols>(smem + tile * Config::kTileKv,
                                                                       min(num_masked, Config::kBlockN));
      }
      if (issues) full[state.stage].arrive();
    }
    state.advance();
  }

  __device__ __forceinline__ void load_k(const LoadWork& work, int i) {
    load_kv(maps(launch.k_map, launch.tk_map, launch.has_tk), storage.k_full, storage.k_empty, storage.k[0],
            this->k_state, work, block_to_load<Config>(work.order, i));
  }

  // As in the forward, keys before a window's first visible key have their V cleared.
  __device__ __forceinline__ void load_v(const LoadWork& work, int i) {
    const int n_block = block_to_load<Config>(work.order, i);
    const MaskOf<Config> visibility = mask_of<Config>(launch.params, work.tile);
    const int unmasked_begin_key = visibility.may_mask_left() ? first_visible_key(visibility) : 0;
    load_kv(maps(launch.v_map, launch.tv_map, launch.has_tv), storage.v_full, storage.v_empty, storage.v[0],
            this->v_state, work, n_block, unmasked_begin_key - n_block * Config::kBlockN);
  }

  // Waits, for each warpgroup, until its GEMMs that read the stage are complete.
  __device__ __forceinline__ void load_q(const WorkTile& tile) {
    auto& state = this->q_state;
    const TmaRows rows(launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
#pragma unroll
    for (int group = 0; group < Config::kWarpGroups; ++group) {
      storage.q_empty[state.stage][group].wait(state.phase ^ 1);
      if (!issues) continue;
      load_both<64>(maps(launch.q_map, launch.tq_map, launch.has_tq), storage.q_full[state.stage][group],
                    storage.q[state.stage][group], rows, tile.row_begin + 64 * group, tile.head,
                    cute::TMA::CacheHintSm90::EVICT_FIRST);
    }
    state.advance();
  }

  // V one block after K, in the order the consumers want them, across work tiles too.
  __device__ __forceinline__ void run() {
    WorkPipeline<Config> pipeline(storage);
    LoadWork work = this->next_tile(pipeline);
    if (!work.tile.empty()) load_k(work, 0);
    while (!work.tile.empty()) {
      load_q(work.tile);
      const int count = work.order.count();
      for (int i = 1; i < count; ++i) {
        pipeline.release_early(work.order, i);
        load_k(work, i);
        load_v(work, i - 1);
      }
      const LoadWork next = this->next_tile(pipeline);
      if (!next.tile.empty()) load_k(next, 0);
      load_v(work, count - 1);
      work = next;
    }
  }
};

}  // namespace sm90
}  // namespace flash
