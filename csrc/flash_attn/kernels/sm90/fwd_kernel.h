// The wgmma forward kernel: persistent thread blocks, which take work tiles until none is left.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/max_logit.h"
#include "kernels/common/pdl.h"
#include "kernels/sm90/fwd_epilogue.h"
#include "kernels/sm90/fwd_mainloop.h"
#include "kernels/sm90/fwd_roles.h"

namespace flash {
namespace sm90 {

// A consumer warpgroup, which computes one work tile after the other. Pipeline: where it gets them from.
template <class Config, class Pipeline = WorkPipeline<Config>>
struct FwdConsumer {
  using Work = FwdWork<Config>;
  // When S of the next tile's first block is issued.
  enum class NextQk { kBeforeLastPv, kAfterLastPv, kAfterO };
  static constexpr NextQk kNextQk = Config::kTile.overlaps      ? NextQk::kBeforeLastPv
                                    : Config::kIssueNextQkEarly ? NextQk::kAfterLastPv
                                                                : NextQk::kAfterO;
  static constexpr bool kSeparateOSmem = Config::kSeparateOSmem;
  static constexpr bool kHasStoreWarp = Config::kHasStoreWarp;

  const FwdLaunch& launch;
  FwdStorage<Config>& storage;
  Pipeline pipeline;
  PipelineState<Config::kQStages> q_state;
  int stored_stage = -1;  // Q stage that the last O was staged in
  FwdMainloop<Config> mainloop;

  __device__ __forceinline__ FwdConsumer(const FwdLaunch& launch_, FwdStorage<Config>& storage_,
                                         const Pipeline& pipeline_, int group)
      : launch(launch_), storage(storage_), pipeline(pipeline_), mainloop(launch_, storage_, group) {}

  // With kNoMask recomputing the block order is cheaper than reading it from shared memory: 1 % on long rows
  // (docs/tuning/fwd_sm90.md).
  __device__ __forceinline__ Work next_tile() {
    if constexpr (!Config::kNoMask) {
      return pipeline.consumer_wait(mainloop.group);
    } else {
      Work work{pipeline.consumer_wait(mainloop.group).tile};
      if (work.exists()) {
        work.order = kv_block_order<Config>(launch, work.tile);
        work.steps.skipped.begin = work.order.unmasked_steps_end();
      }
      return work;
    }
  }

  // On entry S of this tile's first block is complete, on exit that of the returned tile.
  __device__ __forceinline__ Work compute_attn_1rowblock(const Work& work) {
    const int q_stage = q_state.stage;
    mainloop.first_step(work);
    if (!kSeparateOSmem && !kHasStoreWarp) release_stored_buffer();  // long before the producer needs it
    const int num_skipped = mainloop.run(work, q_stage);
    if (kSeparateOSmem) free_q(q_stage);
    q_state.advance();
    const Work next = next_tile();
    if (kNextQk == NextQk::kBeforeLastPv) issue_next_qk(next);
    mainloop.issue_last_pv(work);
    if (kNextQk == NextQk::kAfterLastPv) issue_next_qk(next);
    const int row_begin = mainloop.row_begin(work);
    float o_scale[FwdMainloop<Config>::kRows];
    store_max_logit(mainloop.softmax, launch.params, work.tile, mainloop.coords, row_begin);
    const float sink = row_sink(launch.params, work.tile);
    finalize_rows(mainloop.softmax, o_scale, launch.params, sink);
    // LSE overlaps the last P V; without an epilogue warp it follows O, whose TMA fence would wait for it.
    if (kHasStoreWarp) store_lse_of(work, row_begin, sink);
    mainloop.wait_for_o();
    store_output(work, q_stage, o_scale);
    mainloop.skip_v(num_skipped);
    stored_stage = q_stage;
    if (kNextQk == NextQk::kAfterO) issue_next_qk(next);
    if (!kHasStoreWarp) store_lse_of(work, row_begin, sink);
    if (kNextQk != NextQk::kBeforeLastPv) mainloop.wait_for_scores();
    return next;
  }

  __device__ __forceinline__ void store_output(const Work& work, int q_stage,
                                               const float (&o_scale)[FwdMainloop<Config>::kRows]) {
    if (is_split_kv<Config>(launch)) {
      store_partial(mainloop, work, launch.splits, o_scale);
    } else if constexpr (kHasStoreWarp) {
      stage_o(mainloop, q_stage, o_scale);
    } else {
      store_o(mainloop, work, launch.o_map, q_stage, o_scale);
    }
    if constexpr (kHasStoreWarp) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) storage.o_full[q_stage][mainloop.group].arrive();
    }
  }

  __device__ __forceinline__ void store_lse_of(const Work& work, int row_begin, float sink) const {
    store_lse(mainloop.softmax, launch.params, work.tile, mainloop.coords, row_begin, sink,
              is_split_kv<Config>(launch) ? work.split * launch.splits.rows : 0);
  }

  // Issues S of the next tile's first block; without a block, of whatever the buffers hold: the result is never read.
  __device__ __forceinline__ void issue_next_qk(const Work& next) {
    if (next.exists()) mainloop.wait_for_tile(q_state.stage, q_state.phase);
    mainloop.issue_qk(q_state.stage);
  }

  // Releases the Q stage that the last O was staged in.
  __device__ __forceinline__ void release_stored_buffer() {
    if (stored_stage >= 0) wait_for_store(storage, stored_stage, mainloop.group);
  }

  // All GEMMs of this warp that read Q are complete: releases Q.
  __device__ __forceinline__ void free_q(int q_stage) {
    if (threadIdx.x % 32 == 0) storage.q_empty[q_stage][mainloop.group].arrive();
  }

  __device__ __forceinline__ void begin() {
    mainloop.wait_for_tile(q_state.stage, q_state.phase);
    mainloop.issue_qk(q_state.stage);
    mainloop.wait_for_scores();
  }

  // The work tiles of this warpgroup.
  __device__ __forceinline__ void compute_attn() {
    if (Config::kModifiers == Modifiers::kSoftcap) mainloop.load_short_series();
    if (mainloop.is_last_group()) mainloop.arrive_at_order_barrier();  // lets the first group start
    Work work = next_tile();
    if (work.exists()) begin();
    while (work.exists()) work = compute_attn_1rowblock(work);
    if (mainloop.group == 0) mainloop.wait_for_order_barrier();  // the last group's arrival
    // Shared memory must outlive the last TMA store's reads.
    if (!kHasStoreWarp && threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) flash_fwd_kernel(const __grid_constant__ FwdLaunch launch) {
  static_assert(Config::kConsumerGroups * static_cast<int>(sizeof(FwdStorage<Config>)) ==
                    plan::sm90_fwd_smem_bytes(Config::kTile, Config::kVariant, Config::kDtype),
                "plan and kernel agree on the shared memory");
  // Splits could wait as late as other calls do, but without this branch ptxas spills at head dim 256.
  if (is_split_kv<Config>(launch)) wait_for_previous_kernel();
  extern __shared__ __align__(1024) char smem[];
  FwdStorage<Config>* const storages = reinterpret_cast<FwdStorage<Config>*>(smem);  // one per consumer group
  if (!overlaps_launches<Config>(launch)) store_rng_state(launch.params.dropout);
  if (Config::kModifiers == Modifiers::kSoftcap && threadIdx.x < 2) {
    const float coefficient = launch.params.softcap_series.short_series.coefficient[threadIdx.x];
    for (int consumer_group = 0; consumer_group < Config::kConsumerGroups; ++consumer_group) {
      storages[consumer_group].short_series.coefficient[threadIdx.x] = coefficient;
    }
  }
  if (threadIdx.x == 0) {
    prefetch_tensor_maps(launch, launch.params.is_paged());
    for (int consumer_group = 0; consumer_group < Config::kConsumerGroups; ++consumer_group)
      storages[consumer_group].init_barriers(launch.params.is_paged());
    Barrier::fence_init();
  }
  const int warp_group =
      __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // shuffled, so that ptxas sees uniform branches
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    using Roles = typename Config::Roles;
    const int index = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), consumer_group = index / Roles::kWarps,
              warp = index % Roles::kWarps;
    if (warp != kSchedulerWarp) {  // schedulers choose their first tile before begin_together()
      begin_together<Config>();
      if (overlaps_launches<Config>(launch)) {
        wait_for_previous_kernel();
        store_rng_state(launch.params.dropout);  // a kernel before this one may still use that memory
      }
    }
    FwdStorage<Config>& storage = storages[consumer_group];
    if (warp == kLoadWarp) typename Roles::Load{launch, storage}.run();
    if (warp == kSchedulerWarp) typename Roles::Scheduler{launch, storage, consumer_group}.run();
    // Separate tests, each with a load of is_paged(): nested ones, or one load, change how ptxas orders the loops.
    if (Config::kPackedDropout && warp == 2) typename Roles::ColumnBits{launch, storage}.run();
    if (Config::kBiased && warp == 2) typename Roles::Bias{launch, storage}.run();
    if (Config::kHasStoreWarp && !launch.params.is_paged() && warp == 3) typename Roles::Store{launch, storage}.run();
    if (Config::kHasPages && launch.params.is_paged() && warp == 2) typename Roles::PagedK{launch, storage}.run();
    if (Config::kHasPages && launch.params.is_paged() && warp == 3) typename Roles::PagedV{launch, storage}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    begin_together<Config>();
    const int consumer_group =
        Config::kConsumerGroups == 1 ? 0 : (warp_group - 1) / Config::kWarpGroups;  // the constant saves instructions
    const int group = warp_group - 1 - consumer_group * Config::kWarpGroups;
    FwdStorage<Config>& storage = storages[consumer_group];
    FwdConsumer<Config>(launch, storage, WorkPipeline<Config>(storage), group).compute_attn();
    // Not earlier: thread blocks of the combine kernel would crowd onto the few idle SMs.
    if (overlaps_launches<Config>(launch)) allow_next_kernel();
  }
}

}  // namespace sm90
}  // namespace flash
