// Mainloop of the e4m3 forward: one consumer warpgroup, 64 rows, KV blocks downwards, in halves: the upper keys of a
// block, then the lower ones. While a half's S becomes P, S of the next half and P V of the one before are computed.
// P V adds to T, whose 13 bits are added to O, in fp32, after kFlushHalves halves.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/mask.h"
#include "kernels/sm90/fp8_fwd_config.h"
#include "kernels/sm90/fp8_fwd_softmax.h"
#include "kernels/sm90/fwd_storage.h"
#include "kernels/sm90/gemm.h"

namespace flash {
namespace sm90 {

template <class Config>
struct Fp8FwdMainloop {
  using Element = typename Config::Element;
  using Storage = FwdStorage<Config>;
  using KvState = PipelineState<Config::kKvStages>;
  using MmaQk = typename Config::MmaQk;
  using MmaPv = typename Config::MmaPv;
  static constexpr int kNegates = 0x7fffffff;  // every block takes the path of masked ones, which negates S too
  static constexpr int kHalfKeys = Config::kHalfKeys;
  using AccS = decltype(cute::partition_fragment_C(MmaQk{}, cute::Shape<cute::_64, cute::Int<kHalfKeys>>{}));
  using AccO = decltype(cute::partition_fragment_C(MmaPv{}, cute::Shape<cute::_64, cute::Int<Config::kVtRows>>{}));
  using LayoutP =
      cute::Layout<cute::Shape<cute::Shape<cute::_4, cute::_2, cute::_2>, cute::_1, cute::Int<kHalfKeys / 32>>>;
  using FragmentP = decltype(cute::make_tensor<Element>(LayoutP{}));
  enum Half { kLower, kUpper };  // keys of a block

  Storage& storage;
  const int group;
  const AccumulatorCoords<4> coords;
  KvState k_state, v_state;

  AccS acc_s[2];  // of each half
  AccO acc_t, acc_o;
  FragmentP tOrP[2];
  Fp8Softmax<Config::kCodes> softmax;
  bool negates;      // S of this tile
  float scale_log2;  // what scores are multiplied by: descales, softmax_scale, log2(e)
  int halves_in_t = 0;

  __device__ __forceinline__ Fp8FwdMainloop(Storage& storage_, int group_)
      : storage(storage_), group(group_), coords(threadIdx.x % 128) {}

  // Of the work tile in a slot. What only some steps need stays in shared memory: registers are short.
  __device__ __forceinline__ const WorkTile& tile(int slot) const { return storage.tile[slot].value; }
  __device__ __forceinline__ const typename Config::TripCount& steps(int slot) const {
    return storage.steps[slot][group].value;
  }

  __device__ __forceinline__ void wait_for_k() const { storage.k_full[k_state.stage].wait(k_state.phase); }

  // S = Q K^T of half the block at k_state: issued, not waited for.
  template <Half kHalf>
  __device__ __forceinline__ void issue_qk(int q_stage) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    auto tSrQ = thread.partition_fragment_A(q)(_, _, _, q_stage * Config::kWarpGroups + group);
    auto tSrK = thread.partition_fragment_B(k)(_, _, _, 2 * k_state.stage + kHalf);
    start_gemm(mma, tSrQ, tSrK, acc_s[kHalf], true);
  }

  // Of a tile's first half.
  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s[kUpper]); }

  // T += P V of half the block at v_state: issued, not waited for. The upper half comes first, and sets T where it was
  // flushed: a count, so that the predicate is one of the whole warpgroup.
  template <Half kHalf>
  __device__ __forceinline__ void issue_pv() {
    using namespace cute;
    if constexpr (kHalf == kUpper) storage.v_full[v_state.stage].wait(v_state.phase);
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt = make_tensor(make_smem_ptr(storage.v[0]), typename Config::SmemLayoutVt{});
    auto tOrV = domain_offset(make_coord(_0{}, _0{}, Int<kHalf*(kHalfKeys / 32)>{}),
                              thread.partition_fragment_B(vt)(_, _, _, v_state.stage));
    start_gemm(mma, tOrP[kHalf], tOrV, acc_t, kHalf == kUpper && halves_in_t == 0);
    ++halves_in_t;
  }

  // This warp has read the stage.
  __device__ __forceinline__ static void release(Barrier* empty, KvState& state) {
    if (threadIdx.x % 32 == 0) empty[state.stage].arrive();
    state.advance();
  }
  __device__ __forceinline__ void release_k() { release(storage.k_empty, k_state); }
  __device__ __forceinline__ void release_v() { release(storage.v_empty, v_state); }

  // Skipped blocks have to land before their stages can be released.
  __device__ __forceinline__ void skip_k(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_for_k();
      release_k();
    }
  }
  __device__ __forceinline__ void skip_v(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      storage.v_full[v_state.stage].wait(v_state.phase);
      release_v();
    }
  }
  // All blocks of a tile: K and V in turns, for the ring holds fewer blocks.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      skip_k(1);
      skip_v(1);
    }
  }

  // S of half of `n_block` to P. `unmasked_begin`: of the warpgroup's rows, or kNegates. Returns, warp-uniform, whether
  // row_max was updated.
  template <Half kHalf, bool kFirst = false>
  __device__ __forceinline__ int make_p(int slot, int n_block, int unmasked_begin, int unmasked_end,
                                        float (&correction)[2]) {
    auto scores = row_col_view(acc_s[kHalf]);
    if (n_block < unmasked_begin || n_block >= unmasked_end) {
      if (unmasked_begin == kNegates) negate(acc_s[kHalf]);
      const int rows = min(64, tile(slot).seqlen_q - tile(slot).row_begin - 64 * group);
      const int key = n_block * Config::kBlockN + kHalf * kHalfKeys;
      apply_bounds(scores, coords, steps(slot).bounds, rows, tile(slot).seqlen_k, key, key + kHalfKeys);
    }
    auto words = cute::recast<uint32_t>(tOrP[kHalf]);
    float sums[2];
    int updated = kFirst;
    if constexpr (kFirst) softmax.update_row_max(scores, scale_log2, correction);
#pragma unroll 1
    while (true) {  // row_max rarely has to be updated: what it is of is found out by exceeding it
      const bool exceeds = softmax.exponentiate(acc_s[kHalf], scale_log2, words, sums);
      if (updated || !__any_sync(0xffffffffu, exceeds)) break;
      softmax.update_row_max(scores, scale_log2, correction);
      updated = true;
    }
    softmax.add(sums);
    return updated;
  }

  // Descales of opposite signs: maxima are those of scores that a positive factor scales.
  __device__ __forceinline__ static void negate(AccS& acc) {
#pragma unroll
    for (int i = 0; i < cute::size(acc); ++i) acc(i) = -acc(i);
  }
  __device__ __forceinline__ int unmasked_begin(int slot) const {
    return negates ? kNegates : steps(slot).unmasked_begin;
  }

  // O += T, which the next P V sets.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < size(acc_o); ++i) acc_o(i) += acc_t(i);
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
    softmax = decltype(softmax)();
    cute::clear(acc_o);
    halves_in_t = 0;
    float correction[2];
    const int n_block = steps(slot).first_block;
    make_p<kUpper, true>(slot, n_block, unmasked_begin(slot), steps(slot).unmasked_end, correction);
    wait_for<0>(acc_s[kLower]);
    release_k();
  }

  // The result of rows that see no key.
  __device__ __forceinline__ void set_fully_masked() {
    softmax = decltype(softmax)();
    cute::clear(acc_o);
  }

  // P of the lower keys of `n_block`; S of the upper keys of the next block, P V of this block's upper keys.
  __device__ __forceinline__ void lower_step(int slot, int n_block, int unmasked_begin, int unmasked_end, int q_stage) {
    wait_for_k();
    issue_qk<kUpper>(q_stage);
    issue_pv<kUpper>();
    float correction[2];
    const int rescales = make_p<kLower>(slot, n_block, unmasked_begin, unmasked_end, correction);
    wait_for_gemms<kUpper>();
    if (rescales) rescale(correction);
  }

  // P of the upper keys of `n_block`; S of its lower keys, P V of the lower keys of the block before.
  __device__ __forceinline__ void upper_step(int slot, int n_block, int unmasked_begin, int unmasked_end, int q_stage) {
    issue_qk<kLower>(q_stage);
    issue_pv<kLower>();
    float correction[2];
    const int rescales = make_p<kUpper>(slot, n_block, unmasked_begin, unmasked_end, correction);
    wait_for_gemms<kLower>();
    release_k();
    release_v();
    if (rescales) rescale(correction);
    if (halves_in_t == Config::kFlushHalves) flush();
  }

  // All KV blocks of the tile after first_step(), but for P V of the last one's lower keys.
  __device__ __forceinline__ void run(int slot, int q_stage) {
    const int last = steps(slot).first_block - steps(slot).count + 1;
    const int first_unmasked = unmasked_begin(slot), unmasked_end = steps(slot).unmasked_end;
    int n_block = steps(slot).first_block;
#pragma unroll 1
    while (n_block > last) {
      lower_step(slot, n_block, first_unmasked, unmasked_end, q_stage);
      --n_block;
      upper_step(slot, n_block, first_unmasked, unmasked_end, q_stage);
    }
    issue_pv<kUpper>();
    float correction[2];
    const int rescales = make_p<kLower>(slot, n_block, first_unmasked, unmasked_end, correction);
    wait_for<0>(acc_t);
    cute::warpgroup_fence_operand(tOrP[kUpper]);
    if (rescales) rescale(correction);
  }

  // P V of the last half is complete; S of the next tile, issued behind it, is under way.
  __device__ __forceinline__ void wait_for_o() {
    wait_for<1>(acc_t);
    cute::warpgroup_fence_operand(tOrP[kLower]);
    release_v();
    flush();
  }
};

}  // namespace sm90
}  // namespace flash
