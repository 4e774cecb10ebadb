// The forward with tangents: persistent thread blocks with the scheduler of the forward.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/fwd_epilogue.h"
#include "kernels/common/pdl.h"
#include "kernels/common/shared_storage.h"
#include "kernels/common/warp_index.h"
#include "kernels/sm90/fwd_epilogue.h"
#include "kernels/sm90/jvp_fwd_mainloop.h"
#include "kernels/sm90/jvp_fwd_producer.h"
#include "plan/jvp_fwd_plan.h"

namespace flash {
namespace sm90 {

// A consumer warpgroup, which computes one work tile after the other.
template <class Config>
struct JvpFwdConsumer {
  using Mainloop = JvpFwdMainloop<Config>;
  static constexpr int kRows = Mainloop::kRows;

  const JvpFwdLaunch& launch;
  FwdStorage<Config>& storage;
  WorkPipeline<Config> pipeline;
  PipelineState<Config::kQStages> q_state;
  Mainloop mainloop;

  __device__ __forceinline__ JvpFwdConsumer(const JvpFwdLaunch& launch_, FwdStorage<Config>& storage_, int group)
      : launch(launch_), storage(storage_), pipeline(storage_), mainloop(launch_, storage_, group) {}

  // Advances to the other slot and releases the previous one, which may be overwritten from here on.
  __device__ __forceinline__ int next_slot() {
    static_assert(FwdStorage<Config>::kTileSlots == 2, "the current tile and the next one");
    const int slot = pipeline.state.stage;
    storage.trip_count_full[slot].wait(pipeline.state.phase);
    pipeline.release();
    return slot;
  }

  __device__ __forceinline__ void compute_attn_1rowblock(int slot) {
    const int q_stage = q_state.stage;
    storage.q_full[q_stage][mainloop.group].wait(q_state.phase);
    if (mainloop.steps(slot).count > 0) {
      const bool clears = mainloop.run(slot, q_stage);
      free_q(q_stage);
      mainloop.skip_k(mainloop.steps(slot).skipped_last);
      mainloop.issue_outputs(clears);
      mainloop.wait_for_outputs();
      mainloop.skip_v(mainloop.steps(slot).skipped_last);
    } else {
      mainloop.skip(storage.order[slot].value.count());
      free_q(q_stage);
      mainloop.reset();
      cute::clear(mainloop.acc_o);
      cute::clear(mainloop.acc_to);
    }
    q_state.advance();
    store(mainloop.tile(slot));
  }

  // All GEMMs of this warp that read Q are complete: releases Q.
  __device__ __forceinline__ void free_q(int q_stage) {
    if (threadIdx.x % 32 == 0) storage.q_empty[q_stage][mainloop.group].arrive();
  }

  __device__ __forceinline__ void store(const WorkTile& tile) {
    const Flash_fwd_params& params = launch.params;
    const int row_begin = tile.row_begin + 64 * mainloop.group;
    float o_scale[kRows], mean[kRows];
    mainloop.softmax.finalize(o_scale, 1.0f, params.softmax_scale_log2, -INFINITY);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) mean[mi] = quad_sum(mainloop.sum_h[mi]) * o_scale[mi];
    auto out = row_col_view(mainloop.acc_o), t_out = row_col_view(mainloop.acc_to);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < cute::size<1>(out); ++ni) {
        out(mi, ni) *= o_scale[mi];
        t_out(mi, ni) = t_out(mi, ni) * o_scale[mi] - mean[mi] * out(mi, ni);
      }
    }
    constexpr int kTangentCols = Config::kStagesBoth ? Config::kHeadDim : 0;
    auto* const buffer = storage.o[mainloop.group];
    store_matrix(mainloop.acc_o, launch.o_map, buffer, tile, row_begin, true);
    store_lse(mainloop.softmax, params, tile, mainloop.coords, row_begin, -INFINITY);
    store_t_lse(mean, tile, row_begin);
    store_matrix(mainloop.acc_to, launch.to_map, buffer + 64 * kTangentCols, tile, row_begin, !Config::kStagesBoth);
  }

  __device__ __forceinline__ void store_t_lse(const float (&mean)[kRows], const WorkTile& tile, int row_begin) const {
    if (threadIdx.x % 4 != 0) return;
    float* const t_lse = launch.t_lse_ptr + lse_offset(tile, launch.params);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = row_begin + mainloop.coords.row(mi);
      if (row < tile.row_end) t_lse[row] = mean[mi] + mainloop.center[mi];
    }
  }

  // Each warp stores its 16 rows. waits: the buffer holds an earlier store.
  __device__ __forceinline__ void store_matrix(const typename Mainloop::AccO& acc, const CUtensorMap& map,
                                               typename Config::Element* buffer, const WorkTile& tile, int row_begin,
                                               bool waits) {
    constexpr int kCols = Config::kAtomCols;
    constexpr float kOnes[2] = {1.0f, 1.0f};
    const int warp_row = threadIdx.x % 128 / 32 * 16;
    const bool issues = threadIdx.x % 32 == 0;
    const TmaRows rows(launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
    if (waits) {
      if (issues) cute::tma_store_wait<0>();
      __syncwarp();
    }
    stage_o<kCols, Config::kHeadDim>(acc, buffer, kOnes);
    fence_buffer();
    __syncwarp();
    if (!issues) return;
#pragma unroll
    for (int atom = 0; atom < Config::kAtoms; ++atom) {
      cute::SM90_TMA_STORE_5D::copy(&map, buffer + (atom * 64 + warp_row) * kCols, atom * kCols,
                                    row_begin + warp_row + rows.shift, tile.head, rows.outer, rows.origin);
    }
    cute::tma_store_arrive();
  }

  // The work tiles of this warpgroup.
  __device__ __forceinline__ void compute_attn() {
    if (mainloop.group == 1) mainloop.arrive_at_order_barrier();  // lets the first group start
#pragma unroll 1
    for (int slot = next_slot(); !mainloop.tile(slot).empty(); slot = next_slot()) compute_attn_1rowblock(slot);
    if (mainloop.group == 0) mainloop.wait_for_order_barrier();  // the last group's arrival
    // Shared memory must outlive the last TMA store's reads.
    if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
  }
};

// The second tile of each of these buffers becomes 0, for a tangent that no load writes. By all threads.
template <class Config, int kBuffers, int kElements, class Element>
__device__ __forceinline__ void clear_tangents(Element (&buffers)[kBuffers][kElements]) {
  constexpr int kVectors = kElements / 2 * static_cast<int>(sizeof(Element)) / static_cast<int>(sizeof(uint4));
#pragma unroll 1
  for (int buffer = 0; buffer < kBuffers; ++buffer) {
    auto* const vectors = reinterpret_cast<uint4*>(buffers[buffer] + kElements / 2);
#pragma unroll 1
    for (int i = threadIdx.x; i < kVectors; i += Config::kThreads) vectors[i] = uint4{};
  }
}

// Products of a missing tangent are of zeros: branches around them would let ptxas serialise all wgmma.
template <class Config>
__device__ __forceinline__ void clear_missing_tangents(const JvpFwdLaunch& launch, FwdStorage<Config>& storage) {
  static_assert(Config::kQStages == 1);
  if (!launch.has_tq) clear_tangents<Config>(storage.q[0]);
  if (!launch.has_tk) clear_tangents<Config>(storage.k);
  if (!launch.has_tv) clear_tangents<Config>(storage.v);
  fence_buffer();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_fwd_jvp_kernel(const __grid_constant__ JvpFwdLaunch launch) {
  constexpr int kBytes = plan::sm90_jvp_fwd_smem_bytes(Config::kTile, Config::kDtype);
  FwdStorage<Config>& storage = shared_storage<FwdStorage<Config>, kBytes>();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) storage.init_barriers(false);
    __syncwarp();
    Barrier::fence_init();
  }
  clear_missing_tangents(launch, storage);
  const int warp_group = warpgroup_index();
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = warp_index();
    wait_for_previous_kernel();  // the semaphore, the segments
    store_rng_state(launch.params.dropout);
    if (warp == kSchedulerWarp) {
      SchedulerWarp<Config, JvpFwdLaunch>{launch, storage, 0}.run();  // calls begin_together()
    } else {
      begin_together<Config>();
      if (warp == kLoadWarp) JvpFwdProducer<Config>(launch, storage).run();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    begin_together<Config>();
    wait_for_previous_kernel();  // which may read the memory of the results
    JvpFwdConsumer<Config>(launch, storage, warp_group - 1).compute_attn();
  }
}

}  // namespace sm90
}  // namespace flash
