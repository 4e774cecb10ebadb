// Additions to dQ by two warps beside the loading ones, from tiles that others leave in shared memory: neither those
// who compute dQ nor the next tile wait for memory, or in deterministic mode for a turn.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/bwd_schedule.h"
#include "kernels/common/dq_turns.h"
#include "kernels/sm90/bwd_storage.h"
#include "kernels/tma/bulk_reduce.h"

namespace flash {
namespace sm90 {

// One of the two warps: every second tile, also where they share a buffer.
template <class Config>
struct BwdDqAdder {
  const Flash_bwd_params& params;
  BwdStorage<Config>& storage;
  const int stage;
  RingIndex<2> place;

  __device__ __forceinline__ void run(const KeyBlock& block) {
    const RowWalk walk = row_walk(params, block, Config::kBlockM, Config::kBlockN);
    const int count = walk.count();
    RowStep at = walk.start();
    for (int i = 0; i < count; ++i) {
      if (place.stage == stage) add(block, at);
      place.advance();
      walk.advance(at);
    }
  }

  __device__ __forceinline__ void add(const KeyBlock& block, const RowStep& at) const {
    const int64_t tile = dq_tile_index(params, block, at, Config::kBlockM);
    const bool adds = threadIdx.x % 32 == 0, is_deterministic = params.dq_turns_ptr != nullptr;
    int* const turns = params.dq_turns_ptr + tile;
    if (adds && is_deterministic) {
      const Visibility visibility{block.seqlen_q, block.seqlen_k, params.window};
      wait_for_turn(turns, dq_turn(visibility, at.row_block, block.n_block, Config::kBlockM, Config::kBlockN),
                    peek_turn(turns));
      fence_before_additions();
    }
    __syncwarp();
    storage.dq_full[stage].wait(place.phase);
    if (adds) {
      fence_buffer();  // behind the stores of those who computed it, whom it does not hold up here
      reduce_bulk(params.dq_accum_ptr + tile * Config::kDqTile, storage.dq_tile(stage), Config::kDqTile);
      cute::tma_store_wait<0>();  // the buffer has been read
      storage.dq_empty[stage].arrive();
      if (is_deterministic) {
        wait_for_additions();
        pass_turn(turns);
      }
    }
    __syncwarp();
  }
};

}  // namespace sm90
}  // namespace flash
