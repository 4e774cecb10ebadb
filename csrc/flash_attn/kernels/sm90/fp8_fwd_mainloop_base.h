// Base of the e4m3 forward's mainloop: one consumer warpgroup, 64 rows, descending KV blocks; its pipeline states of K
// and V, and scores to P.
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
struct Fp8FwdMainloopBase {
  using Element = typename Config::Element;
  using Storage = FwdStorage<Config>;
  using KvState = PipelineState<Config::kKvStages>;
  using MmaQk = typename Config::MmaQk;
  static constexpr int kNegates = 0x7fffffff;  // every block takes the masked path, which also negates S
  static constexpr int kStepKeys = Config::kStepKeys;
  using AccS = decltype(cute::partition_fragment_C(MmaQk{}, cute::Shape<cute::_64, cute::Int<kStepKeys>>{}));
  // In the layout of a wgmma accumulator.
  template <int kCols>
  using Accumulator = decltype(cute::make_tensor<float>(
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::Int<kCols / 8>>, cute::_1, cute::_1>>{}));
  using AccO = Accumulator<Config::kHeadDimV>;
  template <int kKeys>
  using LayoutP = cute::Layout<cute::Shape<cute::Shape<cute::_4, cute::_2, cute::_2>, cute::_1, cute::Int<kKeys / 32>>>;
  template <int kKeys>
  using FragmentP = decltype(cute::make_tensor<Element>(LayoutP<kKeys>{}));

  Storage& storage;
  const int group;
  const AccumulatorCoords<4> coords;
  KvState k_state, v_state;

  AccO acc_o;
  Fp8Softmax<Config::kExpBits> softmax;
  bool negates;      // S of this tile is negated
  float scale_log2;  // factor of the scores: descales, softmax_scale, log2(e)

  __device__ __forceinline__ Fp8FwdMainloopBase(Storage& storage_, int group_, uint32_t bits_shift)
      : storage(storage_), group(group_), coords(threadIdx.x % 128), softmax(bits_shift) {}

  // The work tile in a slot. What only some steps need stays in shared memory: registers are short.
  __device__ __forceinline__ const WorkTile& tile(int slot) const { return storage.tile[slot].value; }
  __device__ __forceinline__ const typename Config::TripCount& steps(int slot) const {
    return storage.steps[slot][group].value;
  }

  __device__ __forceinline__ void wait_for_k() const { storage.k_full[k_state.stage].wait(k_state.phase); }
  __device__ __forceinline__ void wait_for_v() const { storage.v_full[v_state.stage].wait(v_state.phase); }

  // Issues S = Q K^T of step `step` of the block at k_state; does not wait.
  __device__ __forceinline__ void issue_qk(AccS& acc_s, int q_stage, int step) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    auto tSrQ = thread.partition_fragment_A(q)(_, _, _, q_stage * Config::kWarpGroups + group);
    // Sliced in two ways, since each makes ptxas serialise the products of the other head dims.
    if constexpr (Config::kAtoms == 1) {
      auto steps = local_tile(k, Shape<Int<kStepKeys>, Int<Config::kHeadDim>>{}, make_coord(_, _0{}));
      auto tSrK = thread.partition_fragment_B(steps)(_, _, _, step, k_state.stage);
      start_gemm(mma, tSrQ, tSrK, acc_s, true);
    } else {
      auto keys =
          local_tile(k(_, _, k_state.stage), Shape<Int<kStepKeys>, Int<Config::kHeadDim>>{}, make_coord(step, _0{}));
      auto tSrK = thread.partition_fragment_B(keys);
      start_gemm(mma, tSrQ, tSrK, acc_s, true);
    }
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
      wait_for_v();
      release_v();
    }
  }
  // Skips all blocks of a tile, K and V in turn, since the ring has fewer stages.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      skip_k(1);
      skip_v(1);
    }
  }

  // Iterates over the KV blocks of the work tile in a slot, downwards.
  struct BlockIterator {
    int slot;
    int n_block, last;
    int unmasked_begin, unmasked_end;  // of the warpgroup's rows; begin may be kNegates
  };
  __device__ __forceinline__ BlockIterator iterator(int slot) const {
    const auto& own = steps(slot);
    return {slot, own.first_block, own.first_block - own.count + 1, negates ? kNegates : own.unmasked_begin,
            own.unmasked_end};
  }

  // Negates, if needed, and masks S of the kStepKeys keys from `key` on of the current block.
  __device__ __forceinline__ void mask(AccS& acc_s, const BlockIterator& at, int key) {
    if (at.n_block >= at.unmasked_begin && at.n_block < at.unmasked_end) return;
    auto scores = row_col_view(acc_s);
    if (at.unmasked_begin == kNegates) negate(acc_s);
    const WorkTile& own = tile(at.slot);
    const int rows = min(64, own.seqlen_q - own.row_begin - 64 * group);
    apply_bounds(scores, coords, steps(at.slot).bounds, rows, own.seqlen_k, key, key + kStepKeys);
  }

  // S of the kStepKeys keys from `key` on of the current block becomes P. Returns, warp-uniform, whether row_max was
  // updated. kMayMask: keys may be masked, or S negated.
  template <bool kFirst, bool kMayMask = true, class P>
  __device__ __forceinline__ int make_p(AccS& acc_s, P& p, const BlockIterator& at, int key, float (&correction)[2]) {
    if constexpr (kMayMask) mask(acc_s, at, key);
    auto scores = row_col_view(acc_s);
    auto words = cute::recast<uint32_t>(p);
    typename decltype(softmax)::Sums sums;
    if constexpr (kFirst) softmax.update_row_max(scores, scale_log2, correction);
    const bool exceeds = softmax.exponentiate(acc_s, scale_log2, kFirst, words, sums);
    // row_max rarely has to be updated, so P is computed first: its overflow says when.
    const bool updates = !kFirst && __any_sync(0xffffffffu, exceeds);
    if (updates) {
      softmax.update_row_max(scores, scale_log2, correction);
      softmax.exponentiate(acc_s, scale_log2, true, words, sums);
    }
    softmax.add(sums);
    return updates || kFirst;
  }

  // For descales of opposite signs: maxima must be those of scores that a positive factor scales.
  __device__ __forceinline__ static void negate(AccS& acc) {
#pragma unroll
    for (int i = 0; i < cute::size(acc); ++i) acc(i) = -acc(i);
  }

  // The state of rows that have seen no key.
  __device__ __forceinline__ void reset() {
    softmax = decltype(softmax)(softmax.bits_shift);
    cute::clear(acc_o);
  }
};

}  // namespace sm90
}  // namespace flash
