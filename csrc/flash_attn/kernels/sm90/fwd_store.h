// Epilogue warp of the wgmma forward: stores the O of all consumers by TMA, so that no consumer waits for the
// store before its next work tile.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/sm90/fwd_launch_params.h"
#include "kernels/sm90/fwd_storage.h"
#include "kernels/tma/tensor_map.h"

namespace flash {
namespace sm90 {

using namespace tma;

template <class Config>
struct OutputStore {
  const CUtensorMap& map;
  const bool is_varlen;
  const bool is_split;  // consumers store partial results of splits themselves
  FwdStorage<Config>& storage;
  PipelineState<Config::kQStages> state;

  __device__ __forceinline__ OutputStore(const FwdLaunch& launch, FwdStorage<Config>& storage_)
      : map(launch.o_map),
        is_varlen(launch.params.is_varlen()),
        is_split(is_split_kv<Config>(launch)),
        storage(storage_) {}

  // Stores O of a work tile once all consumers have staged it over Q; lane 0 releases Q when the copies have read it.
  __device__ __forceinline__ void store(const WorkTile& tile) {
    const bool issues = threadIdx.x % 32 == 0;
    const TmaRows rows(is_varlen, tile.batch, tile.q_begin, tile.seqlen_q);
#pragma unroll
    for (int group = 0; group < Config::kWarpGroups; ++group) {
      storage.o_full[state.stage][group].wait(state.phase);
      if (!issues || is_split) continue;
      fence_buffer();
#pragma unroll
      for (int atom = 0; atom < Config::kAtomsV; ++atom) {
        cute::SM90_TMA_STORE_5D::copy(&map, storage.q[state.stage][group] + atom * 64 * Config::kAtomCols,
                                      atom * Config::kAtomCols, tile.row_begin + 64 * group + rows.shift, tile.head,
                                      rows.outer, rows.origin);
      }
      cute::tma_store_arrive();
    }
    if (issues) {
      cute::tma_store_wait<0>();
#pragma unroll
      for (int group = 0; group < Config::kWarpGroups; ++group) storage.q_empty[state.stage][group].arrive();
    }
    state.advance();
  }
};

}  // namespace sm90
}  // namespace flash
