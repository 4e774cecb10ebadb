// All columns of a step's dQ by one warpgroup, from the dS that the consumers leave in shared memory, and its way to
// the warps that add it.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/tensor.hpp>

#include "kernels/common/dq_tile.h"
#include "kernels/sm90/bwd_storage.h"
#include "kernels/sm90/gemm.h"

namespace flash {
namespace sm90 {

// dQ = dS K, of the dS at this place of the ring.
template <class Config, class Accumulator>
__device__ __forceinline__ void compute_dq(BwdStorage<Config>& storage, const PipelineState<2>& state, int kv_stage,
                                           int thread, Accumulator& acc_dq) {
  using namespace cute;
  typename Config::MmaDq mma;
  const auto slice = mma.get_slice(thread);
  const auto ds = make_tensor(make_smem_ptr(storage.ds[state.stage]), typename Config::SmemLayoutDs{});  // (M, N)
  const auto k = make_tensor(make_smem_ptr(storage.k[kv_stage]), typename Config::SmemLayoutKt{});       // (D, N)
  storage.ds_full[state.stage].wait(state.phase);
  fence_buffer();  // between the consumers' stores and what reads them here
  start_gemm(mma, slice.partition_fragment_A(ds), slice.partition_fragment_B(k), acc_dq, true);
  wait_for<0>(acc_dq);
  storage.ds_empty[state.stage].arrive();
}

// What the tile at this place overwrites has been read.
template <class Config>
__device__ __forceinline__ void wait_for_dq_buffer(const BwdStorage<Config>& storage, const PipelineState<2>& state) {
  if constexpr (Config::kDqBuffers == 2) {
    storage.dq_empty[state.stage].wait(state.phase ^ 1);
  } else {  // by the other warp
    storage.dq_empty[state.stage ^ 1].wait(state.phase ^ (state.stage ^ 1));
  }
}

// For the warp that has the tile added, by all threads that computed it.
template <class Config, class Accumulator>
__device__ __forceinline__ void stage_dq_tile(BwdStorage<Config>& storage, const PipelineState<2>& state,
                                              const Accumulator& acc_dq, int thread) {
  wait_for_dq_buffer<Config>(storage, state);
  stage_dq(acc_dq, storage.dq_tile(state.stage) + Config::dq_offset(thread / 32, 0), thread % 32);
  storage.dq_full[state.stage].arrive();
}

}  // namespace sm90
}  // namespace flash
