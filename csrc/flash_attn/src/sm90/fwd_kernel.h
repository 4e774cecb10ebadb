// The wgmma forward kernel: thread blocks stay on their multiprocessor and take row blocks until none is left.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "common/max_logit.h"
#include "sm90/fwd_epilogue.h"
#include "sm90/fwd_mainloop.h"
#include "sm90/fwd_producer.h"

namespace flash {
namespace sm90 {

enum ProducerWarp { kLoadWarp = 0, kSchedulerWarp = 1 };

// Where a consumer warpgroup stands in the rings.
template <class Config>
struct ConsumerState {
  RingIndex<Config::kKvStages> k_place, v_place;
  RingIndex<Config::kQStages> q_place;
};

template <class Config>
__device__ __forceinline__ void compute_attn_1rowblock(const FwdLaunch& launch, FwdStorage<Config>& storage,
                                                       const RowBlock& block, int group, ConsumerState<Config>& state) {
  const int q_stage = state.q_place.stage;
  FwdMainloop<Config> mainloop(launch.params, storage, block, group, state.k_place, state.v_place);
  storage.q_full[q_stage][group].wait(state.q_place.phase);
  mainloop.run(q_stage);
  store_max_logit(mainloop.softmax, launch.params, block, mainloop.coords, mainloop.row_begin());
  store_o(mainloop, launch.o_map, q_stage);
  store_lse(mainloop);
  wait_for_store(storage, q_stage, group);
  state.q_place.advance();
}

template <class Config>
__device__ __forceinline__ void run_consumer(const FwdLaunch& launch, FwdStorage<Config>& storage, int group) {
  TileQueue<Config> queue(storage);
  ConsumerState<Config> state;
  for (RowBlock block = queue.read(); !block.empty(); block = queue.read()) {
    queue.finish();
    compute_attn_1rowblock<Config>(launch, storage, block, group, state);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) flash_fwd_kernel(const __grid_constant__ FwdLaunch launch) {
  extern __shared__ __align__(1024) char smem[];
  FwdStorage<Config>& storage = *reinterpret_cast<FwdStorage<Config>*>(smem);
  store_rng_state(launch.params.dropout);
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // uniform, so that branches are too
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == kLoadWarp) FwdProducer<Config>(launch, storage).run();
    if (warp == kSchedulerWarp) run_scheduler<Config>(launch, storage);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    run_consumer<Config>(launch, storage, warp_group - 1);
  }
}

}  // namespace sm90
}  // namespace flash
