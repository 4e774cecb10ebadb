// Mainloop of the e4m3 forward: consumers of 64 rows share the tensor cores. A KV block is two steps of S, a half of
// its keys each; P V of the whole block follows, in slices of columns, each of which goes to T and is added to O in
// fp32. S, P and T of a consumer take turns in the same registers. If there are enough of them (not at head dim 128), S
// of the second half overlaps P of the first, and S of the next block the last slice.
#pragma once

#include "kernels/sm90/fp8_fwd_mainloop_base.h"

namespace flash {
namespace sm90 {

template <class Config>
struct Fp8FwdMainloop : Fp8FwdMainloopBase<Config> {
  using Base = Fp8FwdMainloopBase<Config>;
  using Base::acc_o;
  using Base::kStepKeys;
  using Base::softmax;
  using Base::storage;
  using Base::v_state;
  using typename Base::AccS;
  using typename Base::BlockIterator;
  using typename Base::Storage;
  static constexpr int kCols = Config::kSliceCols, kOnes = Config::kVtRows - Config::kHeadDimV;
  static constexpr int kSlices = Config::kHeadDimV / kCols;
  static constexpr bool kOverlaps = Config::kScoreBuffers == 2;
  // Whether a slice is in flight while the one before is added. Both take the accumulators of S, and a separate
  // product sums P: ptxas has no registers for a wider slice while another one is in flight.
  static constexpr bool kOverlapsSlices = kOverlaps && kSlices > 1;
  // Whether the last P V overlaps S of the next tile. Otherwise ptxas runs out of registers and serialises the
  // products.
  static constexpr bool kOverlapsTiles = kOverlaps || Config::kWarpGroups == 2;
  static_assert(kOnes == 8 && kSlices * kCols == Config::kHeadDimV);
  enum Half { kLower, kUpper };  // keys of a block
  static constexpr Half kFirstHalf = Config::kLowerKeysFirst ? kLower : kUpper;
  static constexpr Half kSecondHalf = Config::kLowerKeysFirst ? kUpper : kLower;

  AccS acc_s[Config::kScoreBuffers];
  // One accumulator for all slices, or for the sums of P alone, which the last slice includes. Several would all be
  // live at once.
  typename Base::template Accumulator<kOverlapsSlices ? kOnes : kCols + kOnes> acc_t;
  typename Base::template FragmentP<Config::kBlockN> tOrP;

  __device__ __forceinline__ Fp8FwdMainloop(Storage& storage_, int group_, uint32_t bits_shift)
      : Base(storage_, group_, bits_shift) {}

  template <Half kHalf>
  __device__ __forceinline__ AccS& scores() {
    return acc_s[kHalf == kFirstHalf ? 0 : Config::kScoreBuffers - 1];
  }
  template <Half kHalf>
  __device__ __forceinline__ void issue_qk(int q_stage) {
    Base::issue_qk(scores<kHalf>(), q_stage, kHalf);
  }
  // S of a tile's first half block.
  __device__ __forceinline__ void issue_first_qk(int q_stage) { issue_qk<kFirstHalf>(q_stage); }
  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(scores<kFirstHalf>()); }

  // Issues P V of kRows columns from kFirst on of the block at v_state; does not wait.
  template <int kFirst, int kRows, class Acc>
  __device__ __forceinline__ void issue_pv(Acc& target) {
    using namespace cute;
    using Mma = decltype(make_tiled_mma(Fp8PvAtom<kRows>{}));
    Mma mma;
    auto acc = make_tensor(target.data(), typename Base::template Accumulator<kRows>::layout_type{});
    const auto* const rows = storage.v[v_state.stage] + kFirst * Config::kBlockN;
    auto vt = make_tensor(make_smem_ptr(rows), typename Config::template SmemLayoutVt<kRows>{});
    start_gemm(mma, tOrP, mma.get_slice(threadIdx.x % 128).partition_fragment_B(vt)(_, _, _, _0{}), acc, true);
  }
  // O += T, the columns of a slice.
  template <class Acc>
  __device__ __forceinline__ void add_slice(int slice, const Acc& acc) {
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) acc_o(slice * kCols / 2 + i) += acc(i);
  }

  // O += P V of the block at v_state. The last slice is issued only.
  __device__ __forceinline__ void start_pv() {
    this->wait_for_v();
    if constexpr (kOverlapsSlices) {
      start_overlapping_slices();
    } else {
      cute::for_each(cute::make_seq<kSlices - 1>{}, [&](auto slice) {
        issue_pv<slice * kCols, kCols>(acc_t);
        wait_for<0>(acc_t);
        add_slice(slice, acc_t);
      });
      issue_pv<(kSlices - 1) * kCols, kCols + kOnes>(acc_t);
    }
  }
  __device__ __forceinline__ void start_overlapping_slices() {
    issue_pv<Config::kHeadDimV, kOnes>(acc_t);
    issue_pv<0, kCols>(acc_s[0]);
    cute::for_each(cute::make_seq<kSlices - 1>{}, [&](auto slice) {
      issue_pv<(slice + 1) * kCols, kCols>(acc_s[(slice + 1) % 2]);
      wait_for<1>(acc_s[slice % 2]);
      add_slice(slice, acc_s[slice % 2]);
    });
  }
  // Finishes the last slice; kPending later groups stay in flight.
  template <int kPending>
  __device__ __forceinline__ void finish_pv() {
    constexpr int kSums = kOverlapsSlices ? 0 : kCols / 2;
    wait_for<kPending>(acc_t);
    cute::warpgroup_fence_operand(tOrP);
    this->release_v();
    if constexpr (kOverlapsSlices) {
      auto& last = acc_s[(kSlices - 1) % 2];
      cute::warpgroup_fence_operand(last);
      add_slice(kSlices - 1, last);
    } else {
      add_slice(kSlices - 1, acc_t);
    }
    softmax.add_rounded(acc_t(kSums), acc_t(kSums + 2));
  }

  // P of one half of the current KV block, whose S is complete. kZeroO: O is zero.
  template <Half kHalf, bool kFirst, bool kMayMask, bool kZeroO = false>
  __device__ __forceinline__ void make_half(const BlockIterator& at) {
    using Layout = typename Base::template LayoutP<kStepKeys>;
    const auto half = [&](Half which) { return cute::make_tensor(tOrP.data() + which * (kStepKeys / 2), Layout{}); };
    auto p = half(kHalf);
    float correction[2];
    const int updates = Base::template make_p<kFirst, kMayMask>(
        scores<kHalf>(), p, at, at.n_block * Config::kBlockN + kHalf * kStepKeys, correction);
    if (kFirst || !updates) return;
    if constexpr (!kZeroO) {
      auto out = row_col_view(acc_o);
      softmax.rescale(out, correction);
    }
    if constexpr (kHalf == kSecondHalf) {
      auto words = cute::recast<uint32_t>(half(kFirstHalf));
      softmax.rescale_p(words, correction);
    }
  }

  // P of the current KV block; S of its first half is complete and, with kOverlaps, that of the second issued.
  template <bool kFirst, bool kMayMask>
  __device__ __forceinline__ void make_block(const BlockIterator& at, int q_stage) {
    make_half<kFirstHalf, kFirst, kMayMask>(at);
    if constexpr (!kOverlaps) issue_qk<kSecondHalf>(q_stage);
    wait_for<0>(scores<kSecondHalf>());
    this->release_k();
    make_half<kSecondHalf, false, kMayMask, kFirst && Config::kKnowsZeroO>(at);
  }

  // P of a tile's first block; S of its first half is complete.
  __device__ __forceinline__ void first_step(int slot, int q_stage) {
    if constexpr (kOverlaps) issue_qk<kSecondHalf>(q_stage);
    this->reset();
    make_block<true, true>(this->iterator(slot), q_stage);
  }

  // Named barriers of turns, one for each consumer.
  __device__ __forceinline__ static int turn_of(int consumer) {
    return kBeginBarrier + 1 + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount + consumer;
  }
  // The other consumer's turn, once it waits for it. Predicated: a branch would serialise the products.
  __device__ __forceinline__ void pass_turn(bool takes_turns) const {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p barrier.arrive %0, 256;}" ::"r"(turn_of(1 - this->group)),
                 "r"(int{takes_turns})
                 : "memory");
  }
  __device__ __forceinline__ void wait_for_turn(bool takes_turns) const {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %1, 0; @p barrier.sync %0, 256;}" ::"r"(turn_of(this->group)),
                 "r"(int{takes_turns})
                 : "memory");
  }
  // The first turn is that of consumer 0. Tiles leave it so: both take as many turns, or none.
  __device__ __forceinline__ void begin_turns() const {
    if (Config::kTakesTurns && this->group == 1) pass_turn(true);
  }
  __device__ __forceinline__ bool takes_turns(int slot) const {
    if constexpr (Config::kTakesTurns) {
      return storage.steps[slot][0].value.count == storage.steps[slot][1].value.count;
    }
    return false;
  }

  // P V of a block, P of the next.
  template <bool kMayMask>
  __device__ __forceinline__ void step(BlockIterator& at, int q_stage, bool takes_turns) {
    if constexpr (Config::kTakesTurns) wait_for_turn(takes_turns);
    start_pv();
    --at.n_block;
    if constexpr (kOverlaps) {
      this->wait_for_k();
      issue_qk<kFirstHalf>(q_stage);
      finish_pv<1>();
      issue_qk<kSecondHalf>(q_stage);
      if constexpr (Config::kTakesTurns) pass_turn(takes_turns);
      wait_for<1>(scores<kFirstHalf>());
    } else {
      finish_pv<0>();
      this->wait_for_k();
      issue_qk<kFirstHalf>(q_stage);
      wait_for_scores();
    }
    make_block<false, kMayMask>(at, q_stage);
  }

  // All KV blocks of the tile after first_step(), except P V of the last one.
  __device__ __forceinline__ void run(int slot, int q_stage) {
    BlockIterator at = this->iterator(slot);
    const bool turns = takes_turns(slot);
#pragma unroll 1
    while (at.n_block > at.last) {
      const int last_unmasked = Config::kHasUnmaskedLoop ? max(at.unmasked_begin, at.last) : at.n_block;
      if (at.n_block > at.unmasked_end || at.n_block <= last_unmasked) {
        step<true>(at, q_stage, turns);
        continue;
      }
#pragma unroll 1
      do {
        step<false>(at, q_stage, turns);
      } while (at.n_block > last_unmasked);
    }
  }
  // Call it before issue_first_qk() of the next tile.
  __device__ __forceinline__ void issue_last_pv() {
    start_pv();
    if constexpr (!kOverlapsTiles) finish_pv<0>();
  }
  // Call it while S of the next tile is in flight.
  __device__ __forceinline__ void finish() {
    if constexpr (kOverlapsTiles) finish_pv<1>();
  }
};

}  // namespace sm90
}  // namespace flash
