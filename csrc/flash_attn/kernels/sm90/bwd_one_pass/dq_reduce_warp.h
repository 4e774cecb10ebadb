// Reduction of dQ tiles from shared into global memory by two warps of the producer warpgroup: the warpgroups that
// compute dQ wait neither for memory nor, in deterministic mode, for the dQ semaphore.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/bwd_schedule.h"
#include "kernels/common/dq_semaphore.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bwd_one_pass/storage.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/tma/bulk_reduce.h"

namespace flash {
namespace sm90 {

using namespace tma;

// Each of the two warps takes every second tile, even if there is only one buffer.
template <class Config>
struct DqReduceWarp {
  const BwdLaunch& launch;
  const Flash_bwd_params& params;
  BwdStorage<Config>& storage;
  const int stage;
  PipelineState<2> state;

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    const int count = order.count();
    BwdStep<Config> at = order.start();
    for (int i = 0; i < count; ++i) {
      if (state.stage == stage) reduce(tile, at);
      state.advance();
      order.advance(at);
    }
  }

  __device__ __forceinline__ void reduce(const BwdWorkTile& tile, const QStep& at) const {
    const int64_t dq_tile = dq_tile_index(params, tile, at, Config::kBlockM);
    const bool is_elected = threadIdx.x % 32 == 0;
    const bool is_deterministic = !Config::kListed && params.dq_semaphore_ptr != nullptr;  // then not by lists
    int* const semaphore = params.dq_semaphore_ptr + dq_tile;
    if (is_elected && is_deterministic) {
      const MaskOf<Config> visibility = mask_of<Config>(params, tile);
      dq_semaphore_acquire<Config>(params, visibility, at.m_block, tile.n_block, dq_tile, dq_semaphore_peek(semaphore));
      fence_before_reductions();
    }
    __syncwarp();
    storage.dq_full[stage].wait(state.phase);
    if (is_elected) {
      fence_buffer();  // orders the stores of the tile before the bulk reduction; stalls no computing warp here
      reduce_bulk(params.dq_accum_ptr + dq_tile * Config::kDqTile, storage.dq_tile(stage), Config::kDqTile,
                  static_cast<uint64_t>(Config::kDqHint));
      cute::tma_store_wait<0>();  // the bulk reduction has read the buffer
      storage.dq_empty[stage].arrive();
      if (is_deterministic) {
        wait_for_reductions();
        dq_semaphore_release(semaphore);
      }
    }
    __syncwarp();
  }
};

}  // namespace sm90
}  // namespace flash
