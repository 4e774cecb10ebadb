// Work tile indices of a persistent thread block, passed from its load warp to all others through a ring of two.
#pragma once

#include "kernels/tma/mbarrier.h"
#include "kernels/tma/pipeline_state.h"

namespace flash {
namespace sm90 {

using namespace tma;

// The next work tile index of a static (semaphore == nullptr) or dynamic scheduler, the same in all lanes of a warp.
__device__ __forceinline__ int fetch_index(int* semaphore, bool is_first, int index) {
  if (is_first) return blockIdx.x;
  if (semaphore == nullptr) return index + gridDim.x;
  const int fetched = threadIdx.x % 32 == 0 ? atomicAdd(semaphore, 1) : 0;
  return gridDim.x + __shfl_sync(0xffffffffu, fetched, 0);
}

// The load warp: calls fetch(is_first, previous index), the same in all lanes, until the index is num_tiles or more;
// announces each index (work_full), then calls load(index).
template <class Storage, class Fetch, class Load>
__device__ __forceinline__ void announce_work_tiles(Storage& storage, int64_t num_tiles, bool is_elected,
                                                    const Fetch& fetch, const Load& load) {
  PipelineState<2> work_state;
  int index = fetch(true, 0);
  while (true) {
    storage.work_empty[work_state.stage].wait(work_state.phase ^ 1);
    if (is_elected) {
      storage.work[work_state.stage] = index;
      storage.work_full[work_state.stage].arrive();
    }
    __syncwarp();
    work_state.advance();
    if (index >= num_tiles) return;
    load(index);
    index = fetch(false, index);
  }
}

// The other warps: visit(index) for each announced index.
template <class Storage, class Visit>
__device__ __forceinline__ void for_each_index(Storage& storage, int64_t num_tiles, const Visit& visit) {
  PipelineState<2> work_state;
  while (true) {
    storage.work_full[work_state.stage].wait(work_state.phase);
    const int index = __shfl_sync(0xffffffffu, storage.work[work_state.stage], 0);
    storage.work_empty[work_state.stage].arrive();
    work_state.advance();
    if (index >= num_tiles) return;
    visit(index);
  }
}

}  // namespace sm90
}  // namespace flash
