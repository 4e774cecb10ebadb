// Mainloop of the e4m3 forward: one consumer warpgroup, 64 rows, KV blocks downwards. S of a block is issued before P V
// of the one before it. P V adds to T, whose 13 bits are added to O, in fp32, after kFlushBlocks blocks.
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
  static constexpr int kNegates = 0x7fffffff;         // every block takes the path of masked ones, which negates S too
  static constexpr int kWords = Config::kBlockN / 8;  // of P, four codes each
  using AccS = decltype(cute::partition_fragment_C(MmaQk{}, cute::Shape<cute::_64, cute::Int<Config::kBlockN>>{}));
  using AccO = decltype(cute::partition_fragment_C(MmaPv{}, cute::Shape<cute::_64, cute::Int<Config::kVtRows>>{}));
  using LayoutP =
      cute::Layout<cute::Shape<cute::Shape<cute::_4, cute::_2, cute::_2>, cute::_1, cute::Int<Config::kBlockN / 32>>>;
  using FragmentP = decltype(cute::make_tensor<Element>(LayoutP{}));

  using HalfP = typename Fp8Softmax<Config::kCodes>::template HalfP<kWords>;

  Storage& storage;
  const int group;
  const AccumulatorCoords<4> coords;
  KvState k_state, v_state;

  AccS acc_s;
  AccO acc_t, acc_o;
  FragmentP tOrP;
  Fp8Softmax<Config::kCodes> softmax;
  bool negates;      // S of this tile
  float scale_log2;  // what scores are multiplied by: descales, softmax_scale, log2(e)
  int blocks_in_t = 0;

  __device__ __forceinline__ Fp8FwdMainloop(Storage& storage_, int group_)
      : storage(storage_), group(group_), coords(threadIdx.x % 128) {}

  // Of the work tile in a slot. What only some steps need stays in shared memory: registers are short.
  __device__ __forceinline__ const WorkTile& tile(int slot) const { return storage.tile[slot].value; }
  __device__ __forceinline__ const typename Config::TripCount& steps(int slot) const {
    return storage.steps[slot][group].value;
  }

  __device__ __forceinline__ void wait_for_k() const { storage.k_full[k_state.stage].wait(k_state.phase); }

  // S = Q K^T of the block at k_state: issued, not waited for.
  __device__ __forceinline__ void issue_qk(int q_stage) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    auto tSrQ = thread.partition_fragment_A(q)(_, _, _, q_stage * Config::kWarpGroups + group);
    auto tSrK = thread.partition_fragment_B(k)(_, _, _, k_state.stage);
    start_gemm(mma, tSrQ, tSrK, acc_s, true);
  }

  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s); }

  // T += P V of the block at v_state: issued, not waited for.
  __device__ __forceinline__ void issue_pv() {
    using namespace cute;
    storage.v_full[v_state.stage].wait(v_state.phase);
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt = make_tensor(make_smem_ptr(storage.v[0]), typename Config::SmemLayoutVt{});
    auto tOrV = thread.partition_fragment_B(vt)(_, _, _, v_state.stage);
    start_gemm(mma, tOrP, tOrV, acc_t, false);
    ++blocks_in_t;
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

  // Keeps the softmax above the P V wait; ptxas would sink it. The sign is 0, but ptxas cannot know, so this (already
  // complete) wait depends on it.
  __device__ __forceinline__ void finish_p_before_pv_wait(const HalfP& half) const {
    storage.v_full[v_state.stage].wait(v_state.phase ^ half.sign);
  }

  // S of an n_block to P. `unmasked_begin`: of the warpgroup's rows, or kNegates. Returns, warp-uniform, whether
  // row_max was updated.
  template <bool kFirst>
  __device__ __forceinline__ int make_p(int slot, int n_block, int unmasked_begin, int unmasked_end, HalfP& half,
                                        float (&correction)[2]) {
    auto scores = row_col_view(acc_s);
    if (n_block < unmasked_begin || n_block >= unmasked_end) {
      if (unmasked_begin == kNegates) negate_s();
      const int rows = min(64, tile(slot).seqlen_q - tile(slot).row_begin - 64 * group);
      const int key = n_block * Config::kBlockN;
      apply_bounds(scores, coords, steps(slot).bounds, rows, tile(slot).seqlen_k, key, key + Config::kBlockN);
    }
    const int rescale = softmax.update_row_max(scores, scale_log2, kFirst, correction);
    softmax.exponentiate(acc_s, scale_log2, half);
    return rescale;
  }

  // Descales of opposite signs: maxima are those of scores that a positive factor scales.
  __device__ __forceinline__ void negate_s() {
#pragma unroll
    for (int i = 0; i < cute::size(acc_s); ++i) acc_s(i) = -acc_s(i);
  }
  __device__ __forceinline__ int unmasked_begin(int slot) const {
    return negates ? kNegates : steps(slot).unmasked_begin;
  }

  // With nothing under way.
  __device__ __forceinline__ void set_p(const HalfP& half) {
    auto operand = cute::recast<uint32_t>(tOrP);
#pragma unroll
    for (int i = 0; i < kWords; ++i) operand(i) = softmax.word(acc_s, half, i);
  }

  // O += T.
  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < size(acc_o); ++i) acc_o(i) += acc_t(i);
  }

  // T = 0, by each warp for itself: whether a wgmma adds or sets is one predicate of the whole warpgroup, and warps
  // flush by their own row maxima.
  __device__ __forceinline__ void clear_t() {
    cute::clear(acc_t);
    blocks_in_t = 0;
  }

  // P of a tile's first block, whose S is complete.
  __device__ __forceinline__ void first_step(int slot) {
    release_k();
    softmax = decltype(softmax)();
    cute::clear(acc_o);
    clear_t();
    HalfP half;
    float correction[2];
    const int n_block = steps(slot).first_block;
    make_p<true>(slot, n_block, unmasked_begin(slot), steps(slot).unmasked_end, half, correction);
    set_p(half);
  }

  // The result of rows that see no key.
  __device__ __forceinline__ void set_fully_masked() {
    softmax = decltype(softmax)();
    cute::clear(acc_o);
  }

  // One KV block: S and P of `n_block`, and T += P V of the block before.
  __device__ __forceinline__ void step(int slot, int n_block, int unmasked_begin, int unmasked_end, int q_stage) {
    // 1. Issue S = Q K^T, then T += P V of the block before.
    wait_for_k();
    issue_qk(q_stage);
    issue_pv();
    // 2. S is complete. Softmax.
    wait_for<1>(acc_s);
    release_k();
    HalfP half;
    float correction[2];
    const int rescale = make_p<false>(slot, n_block, unmasked_begin, unmasked_end, half, correction);
    finish_p_before_pv_wait(half);
    // 3. P V is complete, nothing is under way: only here may T be read.
    cute::warpgroup_fence_operand(acc_s);
    wait_for<0>(acc_t);
    cute::warpgroup_fence_operand(tOrP);
    release_v();
    if (rescale || blocks_in_t == Config::kFlushBlocks) {
      flush();
      clear_t();
    }
    if (rescale) {
      auto out = row_col_view(acc_o);
      softmax.rescale(out, correction);
    }
    set_p(half);
  }

  // All KV blocks of the tile after first_step(), but for P V of the last one.
  __device__ __forceinline__ void run(int slot, int q_stage) {
    const int last = steps(slot).first_block - steps(slot).count + 1;
    const int first_unmasked = unmasked_begin(slot), unmasked_end = steps(slot).unmasked_end;
    int n_block = steps(slot).first_block;
#pragma unroll 1
    while (n_block > last) {
      --n_block;
      step(slot, n_block, first_unmasked, unmasked_end, q_stage);
    }
  }

  // P V of the last block is complete; S of the next tile, issued behind it, is under way.
  __device__ __forceinline__ void wait_for_o() {
    wait_for<1>(acc_t);
    cute::warpgroup_fence_operand(tOrP);
    release_v();
    flush();
  }
};

}  // namespace sm90
}  // namespace flash
