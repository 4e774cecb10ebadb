// K and V of a warp group's steps as TMA boxes (Config::kBoxes): one thread asks for those of a step, which land in a
// stage of the group's ring and complete the stage's mbarrier.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/decode/launch_params.h"
#include "kernels/decode/warp_group.h"
#include "kernels/tma/mbarrier.h"

namespace flash {
namespace decode {

template <class Config>
struct KvBoxes {
  using Stored = typename Config::Stored;
  static constexpr int kNowhere = -1;  // an outer coordinate: TMA writes zeros

  const KvLaunch& launch;
  tma::Barrier* const full;  // for each stage of the group
  uint32_t phase = 0;        // of the stage of the current step

  __device__ __forceinline__ KvBoxes(const KvLaunch& launch_, char* smem)
      : launch(launch_),
        full(reinterpret_cast<tma::Barrier*>(smem + Config::kBarriersAt) +
             threadIdx.x / Config::kGroupThreads * plan::kMaxKvStages) {}

  // The thread that asks for the group's boxes.
  __device__ __forceinline__ static bool issues() { return threadIdx.x % Config::kGroupThreads == 0; }

  // Before anything else: tensor maps are parameters of the launch, not results of the previous kernel.
  __device__ __forceinline__ static void prefetch_maps(const KvLaunch& launch) {
    if constexpr (Config::kBoxes) {
      if (threadIdx.x != 0) return;
      for (const CUtensorMap* const map : {&launch.k_map, &launch.v_map}) {
        cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(map));
      }
    }
  }

  // All threads of the group.
  __device__ __forceinline__ void init_barriers() const {
    if (issues()) {
      for (int stage = 0; stage < launch.params.stages; ++stage) full[stage].init(1);
      tma::Barrier::fence_init();
    }
    sync_group<Config>();
  }

  // A step of K and V, from `row` of a page or sequence `outer` on; zeros where that is none.
  __device__ __forceinline__ void load(int stage, int row, int head, int outer, Stored* k_to, Stored* v_to) const {
    if (!issues()) return;
    constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    full[stage].arrive_and_expect(2 * Config::kValuesAt * static_cast<int>(sizeof(Stored)));
    cute::SM90_TMA_LOAD_5D::copy(&launch.k_map, &full[stage].state, kHint, k_to, 0, row, 0, head, outer);
    cute::SM90_TMA_LOAD_5D::copy(&launch.v_map, &full[stage].state, kHint, v_to, 0, row, 0, head, outer);
  }

  __device__ __forceinline__ void wait(int stage) const { full[stage].wait(phase); }

  // `stage`: of the next step.
  __device__ __forceinline__ void advance(int stage) {
    if (stage == 0) phase ^= 1;
  }
};

}  // namespace decode
}  // namespace flash
