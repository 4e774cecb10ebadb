// The e4m3 forward kernel: persistent thread blocks with the scheduler and the producer of the 16-bit one.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/fwd_epilogue.h"
#include "kernels/common/pdl.h"
#include "kernels/sm90/fp8_fwd_launch_params.h"
#include "kernels/sm90/fp8_fwd_mainloop.h"
#include "kernels/sm90/fp8_fwd_producer.h"
#include "kernels/sm90/fwd_epilogue.h"
#include "kernels/sm90/transpose_warp.h"
#include "plan/fp8_fwd_plan.h"

namespace flash {
namespace sm90 {

__device__ __forceinline__ float descale_of(const Descale& descale, const WorkTile& tile) {
  if (descale.ptr == nullptr) return 1.0f;
  return descale.ptr[tile.batch * descale.batch_stride + descale.group.divide(tile.head) * descale.head_stride];
}

__device__ __forceinline__ float score_scale_log2(const Fp8FwdLaunch& launch, const WorkTile& tile) {
  constexpr float kLog2e = 1.4426950408889634f;
  return launch.params.scale_softmax * kLog2e * descale_of(launch.q_descale, tile) * descale_of(launch.k_descale, tile);
}
__device__ __forceinline__ void complete_tile(const Fp8FwdLaunch& launch, ScaledTile& tile) {
  tile.score_scale_log2 = score_scale_log2(launch, tile);
}

// A consumer warpgroup, which computes one work tile after the other.
template <class Config>
struct Fp8FwdConsumer {
  using Mainloop = Fp8FwdMainloop<Config>;
  static constexpr int kRows = 2;

  const Fp8FwdLaunch& launch;
  FwdStorage<Config>& storage;
  WorkPipeline<Config> pipeline;
  PipelineState<Config::kQStages> q_state;
  Mainloop mainloop;

  __device__ __forceinline__ Fp8FwdConsumer(const Fp8FwdLaunch& launch_, FwdStorage<Config>& storage_, int group)
      : launch(launch_), storage(storage_), pipeline(storage_), mainloop(storage_, group, launch_.bits_shift) {}

  // Advances to the other slot and releases the previous one, which may be overwritten from here on.
  __device__ __forceinline__ int next_slot() {
    static_assert(FwdStorage<Config>::kTileSlots == 2, "the current tile and the next one");
    const int slot = pipeline.state.stage;
    storage.trip_count_full[slot].wait(pipeline.state.phase);
    pipeline.release();
    return slot;
  }

  // The kernels flush denormals to 0, and 0 * -inf is NaN: a masked score needs a scale that is not 0.
  __device__ __forceinline__ void set_scale(int slot) {
    constexpr float kLeastNormal = 1.17549435e-38f;
    float scale;
    if constexpr (Config::kScaledTiles) {
      scale = storage.tile[slot].value.score_scale_log2;
    } else {
      scale = score_scale_log2(launch, mainloop.tile(slot));
    }
    mainloop.negates = scale < 0.0f;
    mainloop.scale_log2 = fabsf(scale) < kLeastNormal ? kLeastNormal : fabsf(scale);
  }

  // Issues S of a tile's first block; without a block, of whatever the buffers hold: the result is never read.
  __device__ __forceinline__ void issue_first_qk(int slot) {
    if (!mainloop.tile(slot).empty() && mainloop.steps(slot).count > 0) {
      mainloop.skip_k(mainloop.steps(slot).skipped_first);
      storage.q_full[q_state.stage][mainloop.group].wait(q_state.phase);
      mainloop.wait_for_k();
    }
    mainloop.issue_first_qk(q_state.stage);
  }

  // This warp reads the stage of Q no more: all GEMMs are complete, and with kStagesOverQ stores from it too.
  __device__ __forceinline__ void release_q(int q_stage) {
    if (threadIdx.x % 32 != 0) return;
    if constexpr (Config::kStagesOverQ) cute::tma_store_wait<0>();
    storage.q_empty[q_stage][mainloop.group].arrive();
  }
  // With kStagesOverQ the Q of the previous tile is released after the first step of this tile: its store has ended by
  // then.
  __device__ __forceinline__ void release_previous_q(bool is_first) {
    static_assert(Config::kQStages == 2);
    if (Config::kStagesOverQ && !is_first) release_q(1 - q_state.stage);
  }

  // On entry S of this tile's first block is complete, on exit that of the tile in the returned slot.
  __device__ __forceinline__ int compute_attn_1rowblock(int slot, bool is_first) {
    const int q_stage = q_state.stage;
    const bool computes = mainloop.steps(slot).count > 0;
    set_scale(slot);
    if (computes) {
      mainloop.first_step(slot, q_stage);
      release_previous_q(is_first);
      mainloop.skip_v(mainloop.steps(slot).skipped_first);
      mainloop.run(slot, q_stage);
      mainloop.skip_k(mainloop.steps(slot).skipped_last);
    } else {
      storage.q_full[q_stage][mainloop.group].wait(q_state.phase);
      release_previous_q(is_first);  // before the wait for V, which may be loaded after the Q of that stage
      mainloop.skip(storage.order[slot].value.count());
    }
    if constexpr (!Config::kStagesOverQ) release_q(q_stage);
    q_state.advance();
    const WorkTile tile = mainloop.tile(slot);
    const int skipped_last = mainloop.steps(slot).skipped_last;
    const int next = next_slot();
    if (computes) {  // one branch for ptxas, which otherwise sees T read while P V is in flight
      mainloop.issue_last_pv();
      issue_first_qk(next);
      mainloop.finish();
      mainloop.skip_v(skipped_last);
    } else {
      issue_first_qk(next);
      mainloop.reset();
    }
    store(tile, q_stage);
    mainloop.wait_for_scores();
    return next;
  }

  __device__ __forceinline__ void store(const WorkTile& tile, int q_stage) {
    const Flash_fwd_params& params = launch.params;
    const float sink = row_sink(params, tile);
    const int row_begin = tile.row_begin + 64 * mainloop.group;
    float o_scale[kRows];
    mainloop.softmax.finalize_rounded(o_scale, descale_of(launch.v_descale, tile), sink);
    store_o(tile, row_begin, q_stage, o_scale);
    store_lse(mainloop.softmax, params, tile, mainloop.coords, row_begin, sink);
  }

  // Each warp stores its 16 rows, kStagedCols columns at a time: from a buffer, once its last store has read it, and
  // with kStagesOverQ the second half from over its rows of Q.
  __device__ __forceinline__ void store_o(const WorkTile& tile, int row_begin, int q_stage,
                                          const float (&o_scale)[kRows]) {
    using OutElement = typename Config::OutElement;
    constexpr int kCols = Config::kOutAtomCols, kStagedCols = Config::kStagedCols;
    const int warp_row = threadIdx.x % 128 / 32 * 16;
    const bool issues = threadIdx.x % 32 == 0;
    const TmaRows rows(launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
#pragma unroll
    for (int first = 0; first < Config::kHeadDimV; first += kStagedCols) {
      const bool is_over_q = Config::kStagesOverQ && first > 0;
      auto* const buffer =
          is_over_q ? reinterpret_cast<OutElement*>(storage.q[q_stage][mainloop.group]) : storage.o[mainloop.group];
      if (issues && !is_over_q) cute::tma_store_wait<0>();
      __syncwarp();
      const auto columns = cute::make_tensor(mainloop.acc_o.data() + first / 2, cute::Int<kStagedCols / 2>{});
      stage_o<kCols, kStagedCols>(columns, buffer, o_scale);
      fence_buffer();
      __syncwarp();
      if (issues) {
#pragma unroll
        for (int atom = 0; atom < kStagedCols / kCols; ++atom) {
          cute::SM90_TMA_STORE_5D::copy(&launch.o_map, buffer + (atom * 64 + warp_row) * kCols, first + atom * kCols,
                                        row_begin + warp_row + rows.shift, tile.head, rows.outer, rows.origin);
        }
        cute::tma_store_arrive();
      }
    }
  }

  // The work tiles of this warpgroup.
  __device__ __forceinline__ void compute_attn() {
    mainloop.begin_turns();
    int slot = next_slot();
    if (!mainloop.tile(slot).empty()) {
      issue_first_qk(slot);
      mainloop.wait_for_scores();
    }
    for (bool is_first = true; !mainloop.tile(slot).empty(); is_first = false) {
      slot = compute_attn_1rowblock(slot, is_first);
    }
    // Shared memory must outlive the last TMA store's reads.
    if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
  }
};

// Fills the columns of ones after V^T in every stage; TMA never writes them.
template <class Config>
__device__ __forceinline__ void fill_ones(FwdStorage<Config>& storage) {
  constexpr int kWords = (Config::kVtRows - Config::kHeadDimV) * Config::kBlockN / 4;
  for (int stage = 0; stage < Config::kKvStages; ++stage) {
    auto* const ones = reinterpret_cast<uint32_t*>(storage.v[stage] + Config::kHeadDimV * Config::kBlockN);
    for (int i = threadIdx.x; i < kWords; i += Config::kThreads) ones[i] = e4m3::kOnes;
  }
  fence_buffer();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_fwd_fp8_kernel(const __grid_constant__ Fp8FwdLaunch launch) {
  constexpr bool kTransposesV = Config::kTransposeWarps > 0;
  static_assert(sizeof(FwdStorage<Config>) == plan::sm90_fp8_fwd_smem_bytes(Config::kTile, kTransposesV),
                "plan and kernel agree on the shared memory");
  extern __shared__ __align__(1024) char smem[];
  FwdStorage<Config>& storage = *reinterpret_cast<FwdStorage<Config>*>(smem);
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) storage.init_barriers(false);  // a branch without the warp: ptxas serializes wgmma at d 256
    __syncwarp();
    Barrier::fence_init();
  }
  fill_ones(storage);
  const int warp_group =
      __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // shuffled, so that ptxas sees uniform branches
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if constexpr (kTransposesV) {
      wait_for_previous_kernel();
      store_rng_state(launch.params.dropout);
    }
    if (warp == kSchedulerWarp) {
      SchedulerWarp<Config, Fp8FwdLaunch>{launch, storage, 0}.run();  // calls begin_together()
    } else {
      begin_together<Config>();
      if (warp == kLoadWarp) {
        std::conditional_t<kTransposesV, FwdProducer<Config>, VtProducer<Config>>(launch, storage).run();
      }
      if constexpr (kTransposesV) {
        if (warp > kSchedulerWarp) TransposeWarp<Config>{storage, warp - kSchedulerWarp - 1}.run();
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    begin_together<Config>();
    if constexpr (kTransposesV || !Config::kStartsEarly) wait_for_previous_kernel();  // descales and sinks
    Fp8FwdConsumer<Config>(launch, storage, warp_group - 1).compute_attn();
  }
}

}  // namespace sm90
}  // namespace flash
