// Mainloop of the e4m3 forward where two accumulators of all columns of O do not fit: P V of kSliceCols columns at a
// time goes to T and is added to O, in fp32, after each block. S of the next block is issued behind the last of them,
// awaited with it. The other warpgroup's GEMMs fill the gaps.
#pragma once

#include "kernels/sm90/fp8_fwd_mainloop_base.h"

namespace flash {
namespace sm90 {

template <class Config>
struct Fp8FwdSlicedMainloop : Fp8FwdMainloopBase<Config> {
  using Base = Fp8FwdMainloopBase<Config>;
  using Base::acc_o;
  using Base::softmax;
  using Base::storage;
  using Base::v_state;
  using typename Base::AccS;
  using typename Base::Storage;
  using typename Base::Walk;
  static constexpr int kSlices = Config::kHeadDimV / Config::kSliceCols;
  static_assert(!Config::kHasOnes);

  AccS acc_s;
  // One for all slices: of several, ptxas would keep all at once.
  typename Base::template Accumulator<Config::kSliceCols> acc_t;
  typename Base::template FragmentP<Config::kStepKeys> tOrP;

  __device__ __forceinline__ Fp8FwdSlicedMainloop(Storage& storage_, int group_, uint32_t code_shift)
      : Base(storage_, group_, code_shift) {}

  __device__ __forceinline__ void issue_first_qk(int q_stage) { Base::issue_qk(acc_s, q_stage, 0); }
  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s); }

  // O += P V of the block at v_state; behind the last product issue_next() issues others, complete on return too.
  template <class IssueNext>
  __device__ __forceinline__ void add_pv(const IssueNext& issue_next) {
    using namespace cute;
    this->wait_for_v();
    using Mma = decltype(make_tiled_mma(Fp8PvAtom<Config::kSliceCols>{}));
    Mma mma;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const auto* const rows = storage.v[v_state.stage] + slice * Config::kSliceCols * Config::kBlockN;
      auto vt = make_tensor(make_smem_ptr(rows), typename Config::template SmemLayoutVt<Config::kSliceCols>{});
      auto tOrV = mma.get_slice(threadIdx.x % 128).partition_fragment_B(vt)(_, _, _, _0{});
      start_gemm(mma, tOrP, tOrV, acc_t, true);
      if (slice == kSlices - 1) issue_next();
      wait_for<0>(acc_t);
#pragma unroll
      for (int i = 0; i < size(acc_t); ++i) acc_o(slice * Config::kSliceCols / 2 + i) += acc_t(i);
    }
    warpgroup_fence_operand(tOrP);
    this->release_v();
  }

  template <bool kFirst>
  __device__ __forceinline__ int make_p(const Walk& at, float (&correction)[2]) {
    return Base::template make_p<kFirst>(acc_s, tOrP, at, at.n_block * Config::kBlockN, correction);
  }

  // P of a tile's first block, whose S is complete.
  __device__ __forceinline__ void first_step(int slot, int) {
    this->release_k();
    this->reset();
    float correction[2];
    make_p<true>(this->walk(slot), correction);
  }

  // All KV blocks of the tile after first_step(), but for P V of the last one.
  __device__ __forceinline__ void run(int slot, int q_stage) {
    Walk at = this->walk(slot);
#pragma unroll 1
    while (at.n_block > at.last) {
      --at.n_block;
      add_pv([&] {
        this->wait_for_k();
        issue_first_qk(q_stage);
      });
      cute::warpgroup_fence_operand(acc_s);
      this->release_k();
      float correction[2];
      if (make_p<false>(at, correction)) {
        auto out = row_col_view(acc_o);
        softmax.rescale(out, correction);
      }
    }
  }
  __device__ __forceinline__ void issue_last_pv() {
    add_pv([] {});
  }
  __device__ __forceinline__ void finish() {}
};

}  // namespace sm90
}  // namespace flash
