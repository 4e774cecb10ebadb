// Mainloop of the e4m3 forward where two accumulators of all columns of O fit: KV blocks in halves, the upper keys of a
// block, then the lower ones. While a half's S becomes P, S of the next half and P V of the one before are computed.
// P V adds to T, whose 13 bits are added to O, in fp32, after kFlushSteps halves.
#pragma once

#include "kernels/sm90/fp8_fwd_mainloop_base.h"

namespace flash {
namespace sm90 {

template <class Config>
struct Fp8FwdMainloop : Fp8FwdMainloopBase<Config> {
  using Base = Fp8FwdMainloopBase<Config>;
  using Base::acc_o;
  using Base::softmax;
  using Base::storage;
  using Base::v_state;
  using typename Base::AccO;
  using typename Base::AccS;
  using typename Base::FragmentP;
  using typename Base::Storage;
  using typename Base::Walk;
  using MmaPv = decltype(cute::make_tiled_mma(Fp8PvAtom<Config::kVtRows>{}));
  static_assert(decltype(cute::tile_size<1>(MmaPv{}))::value == Config::kVtRows);
  enum Half { kLower, kUpper };  // keys of a block

  AccS acc_s[2];  // of each half
  AccO acc_t;
  FragmentP tOrP[2];
  int halves_in_t = 0;
  bool k_is_full = false, v_is_full = false;  // K of the next block and V of this one, as far as is known

  __device__ __forceinline__ Fp8FwdMainloop(Storage& storage_, int group_, uint32_t code_shift)
      : Base(storage_, group_, code_shift) {}

  template <Half kHalf>
  __device__ __forceinline__ void issue_qk(int q_stage) {
    Base::issue_qk(acc_s[kHalf], q_stage, kHalf);
  }
  // Of a tile's first half.
  __device__ __forceinline__ void issue_first_qk(int q_stage) { issue_qk<kUpper>(q_stage); }
  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s[kUpper]); }

  // T += P V of half the block at v_state: issued, not waited for. The upper half comes first, and sets T where it was
  // flushed: by a count, so that the predicate is one of the whole warpgroup.
  template <Half kHalf>
  __device__ __forceinline__ void issue_pv() {
    using namespace cute;
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt =
        make_tensor(make_smem_ptr(storage.v[v_state.stage]), typename Config::template SmemLayoutVt<Config::kVtRows>{});
    auto tOrV = domain_offset(make_coord(_0{}, _0{}, Int<kHalf*(Config::kStepKeys / 32)>{}),
                              thread.partition_fragment_B(vt)(_, _, _, _0{}));
    start_gemm(mma, tOrP[kHalf], tOrV, acc_t, kHalf == kUpper && halves_in_t == 0);
    ++halves_in_t;
  }

  template <Half kHalf, bool kFirst = false, bool kMayMask = true>
  __device__ __forceinline__ int make_p(const Walk& at, float (&correction)[2]) {
    return Base::template make_p<kFirst, kMayMask>(
        acc_s[kHalf], tOrP[kHalf], at, at.n_block * Config::kBlockN + kHalf * Config::kStepKeys, correction);
  }

  // O += T, which the next P V sets.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < cute::size(acc_o); ++i) acc_o(i) += acc_t(i);
    halves_in_t = 0;
  }

  // Behind the wait for everything: only here may T be read. Corrections are powers of 2: T loses nothing.
  __device__ __forceinline__ void rescale(const float (&correction)[2]) {
    auto partial = row_col_view(acc_t), out = row_col_view(acc_o);
    softmax.rescale(partial, correction);
    softmax.rescale(out, correction);
  }

  // Waits for S of half kNext and for P V of it, of the block before.
  template <Half kNext>
  __device__ __forceinline__ void wait_for_gemms() {
    wait_for<0>(acc_t);
    cute::warpgroup_fence_operand(acc_s[kNext]);
    cute::warpgroup_fence_operand(tOrP[kNext]);
  }

  // P of a tile's first half, whose S is complete.
  __device__ __forceinline__ void first_step(int slot, int q_stage) {
    issue_qk<kLower>(q_stage);
    this->reset();
    halves_in_t = 0;
    k_is_full = v_is_full = false;
    float correction[2];
    make_p<kUpper, true>(this->walk(slot), correction);
    wait_for<0>(acc_s[kLower]);
    this->release_k();
  }

  // P of the lower keys of a block; S of the upper keys of the next block, P V of this block's upper keys.
  template <bool kMayMask>
  __device__ __forceinline__ void lower_step(const Walk& at, int q_stage) {
    if (!(k_is_full && v_is_full)) {
      this->wait_for_k();
      this->wait_for_v();
    }
    issue_qk<kUpper>(q_stage);
    issue_pv<kUpper>();
    float correction[2];
    const int rescales = make_p<kLower, false, kMayMask>(at, correction);
    wait_for_gemms<kUpper>();
    if (rescales) rescale(correction);
  }

  // P of the upper keys of a block; S of its lower keys, P V of the lower keys of the block before.
  template <bool kMayMask>
  __device__ __forceinline__ void upper_step(const Walk& at, int q_stage) {
    issue_qk<kLower>(q_stage);
    issue_pv<kLower>();
    k_is_full = this->next_is_full(storage.k_full, this->k_state);
    v_is_full = this->next_is_full(storage.v_full, v_state);
    float correction[2];
    const int rescales = make_p<kUpper, false, kMayMask>(at, correction);
    wait_for_gemms<kLower>();
    this->release_k();
    this->release_v();
    if (rescales) rescale(correction);
    if (halves_in_t == Config::kFlushSteps) flush();
  }

  template <bool kMayMask>
  __device__ __forceinline__ void step(Walk& at, int q_stage) {
    lower_step<kMayMask>(at, q_stage);
    --at.n_block;
    upper_step<kMayMask>(at, q_stage);
  }

  // All KV blocks of the tile after first_step(), but for P V of the last one's lower keys, which finish() awaits.
  __device__ __forceinline__ void run(int slot, int q_stage) {
    Walk at = this->walk(slot);
#pragma unroll 1
    while (at.n_block > at.last) {
      const int last_unmasked = Config::kHasUnmaskedLoop ? max(at.unmasked_begin, at.last) : at.n_block;
      if (at.n_block >= at.unmasked_end || at.n_block <= last_unmasked) {
        step<true>(at, q_stage);
        continue;
      }
#pragma unroll 1
      do {
        step<false>(at, q_stage);
      } while (at.n_block > last_unmasked);
    }
    this->wait_for_v();
    issue_pv<kUpper>();
    float correction[2];
    const int rescales = make_p<kLower>(at, correction);
    wait_for<0>(acc_t);
    cute::warpgroup_fence_operand(tOrP[kUpper]);
    if (rescales) rescale(correction);
  }
  __device__ __forceinline__ void issue_last_pv() { issue_pv<kLower>(); }

  // With S of the next tile, issued behind the last P V, under way.
  __device__ __forceinline__ void finish() {
    wait_for<1>(acc_t);
    cute::warpgroup_fence_operand(tOrP[kLower]);
    this->release_v();
    flush();
  }
};

}  // namespace sm90
}  // namespace flash
