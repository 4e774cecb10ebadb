// GEMMs of shared memory tiles by wgmma.
#pragma once

#include <cute/tensor.hpp>

namespace flash {
namespace sm90 {

// Issues acc += A B (acc = A B if `clears`) over all k slices; does not wait. between(k): other work of the warp after
// slice k, in slots in which it would only wait to issue the next slice.
template <class Mma, class A, class B, class Acc, class Between>
__device__ __forceinline__ void start_gemm(Mma& mma, const A& tCrA, const B& tCrB, Acc& acc, bool clears,
                                           const Between& between) {
  using namespace cute;
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = clears ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
#pragma unroll
  for (int k = 0; k < size<2>(tCrA); ++k) {
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
    between(k);
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(acc);
}

template <class Mma, class A, class B, class Acc>
__device__ __forceinline__ void start_gemm(Mma& mma, const A& tCrA, const B& tCrB, Acc& acc, bool clears) {
  start_gemm(mma, tCrA, tCrB, acc, clears, [](int) {});
}

// Waits until all but the last kPending wgmma groups of this warpgroup are complete; `acc` is the result of one of
// them.
template <int kPending, class Acc>
__device__ __forceinline__ void wait_for(Acc& acc) {
  cute::warpgroup_wait<kPending>();
  cute::warpgroup_fence_operand(acc);
}

}  // namespace sm90
}  // namespace flash
