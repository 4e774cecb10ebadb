// The load warp of the e4m3 forward where a pass has transposed V.
#pragma once

#include "core/e4m3.h"
#include "kernels/common/pdl.h"
#include "kernels/sm90/fwd_producer.h"

namespace flash {
namespace sm90 {

// V^T comes from the previous kernel, all else from kernels that had ended before that one let this one start.
template <class Config>
struct VtProducer : FwdProducer<Config> {
  using Base = FwdProducer<Config>;
  using LoadWork = typename Base::LoadWork;
  using Base::launch;
  using Base::storage;
  using Base::v_state;

  __device__ __forceinline__ VtProducer(const FwdLaunch& launch_, FwdStorage<Config>& storage_)
      : Base(launch_, storage_) {}

  // A block of V^T, in which the transposing kernel has written zeros for keys that no query sees.
  __device__ __forceinline__ void load_vt(const LoadWork& work, int i) {
    constexpr int kVtKeys = e4m3::kVtKeys;
    const bool is_varlen = launch.params.is_varlen();
    const int n_block = block_to_load<Config>(work.order, i);
    storage.v_empty[v_state.stage].wait(v_state.phase ^ 1);
    if (this->issues) {
      Barrier& full = storage.v_full[v_state.stage];
      full.arrive_and_expect(Config::kBlockN * Config::kHeadDimV);
      const int first_key =
          is_varlen ? varlen_first_slot(work.tile.k_begin, work.tile.batch + 1, kVtKeys) * kVtKeys : 0;
      cute::SM90_TMA_LOAD_5D::copy(&launch.v_map, &full.state,
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                   storage.v[v_state.stage], first_key + n_block * Config::kBlockN, 0, work.head_k,
                                   is_varlen ? 0 : work.tile.batch, 0);
    }
    v_state.advance();
  }

  // V before the next K: consumers finish P V of a block before S of the next one, so they want V first and release it
  // first.
  __device__ __forceinline__ void run() {
    WorkPipeline<Config> pipeline(storage);
    LoadWork work = this->next_tile(pipeline);
    asm volatile("fence.proxy.async.global;" ::: "memory");  // plain stores may have written what TMA reads
    if (!work.tile.empty()) {
      this->load_k(work, 0);
      this->load_q(work.tile);
    }
    wait_for_previous_kernel();
    while (!work.tile.empty()) {
      const int count = work.order.count();
      for (int i = 1; i < count; ++i) {
        pipeline.release_early(work.order, i);
        load_vt(work, i - 1);
        this->load_k(work, i);
      }
      load_vt(work, count - 1);
      const LoadWork next = this->next_tile(pipeline);
      if (!next.tile.empty()) {
        // As in FwdProducer::run_unpaged(): with few blocks the wait for Q's stage would delay K.
        const bool q_first = count > 2;
        if (q_first) this->load_q(next.tile);
        this->load_k(next, 0);
        if (!q_first) this->load_q(next.tile);
      }
      work = next;
    }
  }
};

}  // namespace sm90
}  // namespace flash
