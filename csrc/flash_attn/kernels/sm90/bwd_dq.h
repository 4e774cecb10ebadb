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
__device__ __forceinline__ void compute_dq(BwdStorage<Config>& storage, const RingIndex<2>& place, int kv_stage,
                                           int thread, Accumulator& acc_dq) {
  using namespace cute;
  typename Config::MmaDq mma;
  const auto slice = mma.get_slice(thread);
  const auto ds = make_tensor(make_smem_ptr(storage.ds[place.stage]), typename Config::SmemLayoutDs{});  // (M, N)
  const auto k = make_tensor(make_smem_ptr(storage.k[kv_stage]), typename Config::SmemLayoutKt{});       // (D, N)
  storage.ds_full[place.stage].wait(place.phase);
  fence_buffer();  // between the consumers' stores and what reads them here
  start_gemm(mma, slice.partition_fragment_A(ds), slice.partition_fragment_B(k), acc_dq, true);
  wait_for<0>(acc_dq);
  storage.ds_empty[place.stage].arrive();
}

// What the tile at this place overwrites has been read.
template <class Config>
__device__ __forceinline__ void wait_for_dq_buffer(const BwdStorage<Config>& storage, const RingIndex<2>& place) {
  if constexpr (Config::kDqBuffers == 2) {
    storage.dq_empty[place.stage].wait(place.phase ^ 1);
  } else {  // by the other warp
    storage.dq_empty[place.stage ^ 1].wait(place.phase ^ (place.stage ^ 1));
  }
}

// For the warp that has the tile added, by all threads that computed it.
template <class Config, class Accumulator>
__device__ __forceinline__ void leave_dq(BwdStorage<Config>& storage, const RingIndex<2>& place,
                                         const Accumulator& acc_dq, int thread) {
  wait_for_dq_buffer<Config>(storage, place);
  stage_dq(acc_dq, storage.dq_tile(place.stage) + Config::dq_place(thread / 32, 0), thread % 32);
  storage.dq_full[place.stage].arrive();
}

}  // namespace sm90
}  // namespace flash
