// The computing side of the wgmma forward: one warpgroup, 64 rows. S of a block of keys is computed while the product
// of P and V of the block before is still under way, so that the tensor cores work through the softmax.
#pragma once

#include <cute/tensor.hpp>

#include "common/block_range.h"
#include "common/convert.h"
#include "common/dropout.h"
#include "common/mask.h"
#include "common/score_mod.h"
#include "common/softmax.h"
#include "sm90/fwd_storage.h"

namespace flash {
namespace sm90 {

// acc += A B over all k slices; started, not waited for. `clears`: acc = A B.
template <class Mma, class A, class B, class Acc>
__device__ __forceinline__ void start_gemm(Mma& mma, const A& tCrA, const B& tCrB, Acc& acc, bool clears) {
  using namespace cute;
  warpgroup_fence_operand(acc);
  warpgroup_arrive();
  mma.accumulate_ = clears ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
#pragma unroll
  for (int k = 0; k < size<2>(tCrA); ++k) {
    gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
  warpgroup_fence_operand(acc);
}

template <class Config>
struct FwdMainloop {
  using Element = typename Config::Element;
  using Storage = FwdStorage<Config>;
  using MmaQk = typename Config::MmaQk;
  using MmaPv = typename Config::MmaPv;
  static constexpr int kRows = 2;  // accumulator rows per thread
  using AccS = decltype(cute::partition_fragment_C(
      MmaQk{}, cute::Shape<cute::_64, cute::Int<Config::kBlockN>>{}));  // ((2, 2, N / 8), 1, 1)
  using AccO = decltype(cute::partition_fragment_C(
      MmaPv{}, cute::Shape<cute::_64, cute::Int<Config::kHeadDim>>{}));  // ((2, 2, D / 8), 1, 1)
  using LayoutP = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1,
                                           cute::Int<Config::kBlockN / 16>>>;  // P as the A operand: the same registers
  using FragmentP = decltype(cute::make_tensor<Element>(LayoutP{}));

  const Flash_fwd_params& params;
  Storage& storage;
  const RowBlock& block;
  const int group;  // of the consumer warpgroups
  const Visibility visibility;
  const BlockRange range;
  const AccumulatorCoords<4> coords;  // within the warpgroup's 64 rows
  RingIndex<Config::kKvStages>& k_place;
  RingIndex<Config::kKvStages>& v_place;

  AccO acc_o;
  FragmentP tOrP;
  Softmax<kRows> softmax;

  __device__ __forceinline__ FwdMainloop(const Flash_fwd_params& params_, Storage& storage_, const RowBlock& block_,
                                         int group_, RingIndex<Config::kKvStages>& k_place_,
                                         RingIndex<Config::kKvStages>& v_place_)
      : params(params_),
        storage(storage_),
        block(block_),
        group(group_),
        visibility{block_.seqlen_q, block_.seqlen_k, params_.window},
        range(block_range(visibility, block_.row_begin, block_.row_end, Config::kBlockN)),
        coords(threadIdx.x % 128),
        k_place(k_place_),
        v_place(v_place_) {}

  __device__ __forceinline__ int row_begin() const { return block.row_begin + 64 * group; }

  __device__ __forceinline__ void start_qk(AccS& acc_s, int q_stage) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[q_stage][group]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[k_place.stage]), typename Config::SmemLayoutK{});
    auto tSrQ = thread.partition_fragment_A(q);  // (MMA, 1, MMA_D)
    auto tSrK = thread.partition_fragment_B(k);  // (MMA, 1, MMA_D)
    start_gemm(mma, tSrQ, tSrK, acc_s, true);
  }

  __device__ __forceinline__ void start_pv(bool clears) {
    using namespace cute;
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt = make_tensor(make_smem_ptr(storage.v[v_place.stage]), typename Config::SmemLayoutVt{});
    auto tOrV = thread.partition_fragment_B(vt);  // (MMA, 1, MMA_N)
    start_gemm(mma, tOrP, tOrV, acc_o, clears);
  }

  // This warp has read the buffer.
  __device__ __forceinline__ static void release(Barrier* empty, RingIndex<Config::kKvStages>& place) {
    if (threadIdx.x % 32 == 0) empty[place.stage].arrive();
    place.advance();
  }

  // Raw scores to what the softmax takes: softcap, ALiBi, mask.
  template <bool kEdge, class Scores>
  __device__ __forceinline__ void modify_scores(Scores& scores, int key) const {
    if (params.has_score_mod) {
      ScoreMod(params, block.batch, block.head).apply(scores, coords, visibility.diagonal(row_begin()), key);
    }
    if constexpr (kEdge) {
      apply_mask(scores, coords, visibility, row_begin(), min(row_begin() + 64, block.seqlen_q), key,
                 key + Config::kBlockN);
    }
  }

  __device__ __forceinline__ void set_probabilities(AccS& acc_s, int key) {
    using namespace cute;
    if constexpr (Config::kVariant == FwdVariant::kDropout) {
      auto scores = row_col_view(acc_s);
      DropoutMask(params.dropout, block.batch, block.head).apply(scores, coords, row_begin(), key);
    }
    auto pairs = recast<uint32_t>(tOrP);
#pragma unroll
    for (int i = 0; i < size(pairs); ++i) pairs(i) = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
  }

  __device__ __forceinline__ void first_step(int q_stage) {
    using namespace cute;
    AccS acc_s;
    storage.k_full[k_place.stage].wait(k_place.phase);
    start_qk(acc_s, q_stage);
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc_s);
    release(storage.k_empty, k_place);
    const int key = range.block_interior_first(0) * Config::kBlockN;
    auto scores = row_col_view(acc_s);
    modify_scores<true>(scores, key);
    float correction[kRows];
    softmax.raise_reference(scores, params.softmax_scale_log2, correction, params.softmax_slack_log2);
    softmax.template exponentiate<true>(scores, params.softmax_scale_log2);
    set_probabilities(acc_s, key);
  }

  // S of step i, and P V of step i - 1.
  template <bool kEdge>
  __device__ __forceinline__ void step(int i, int q_stage) {
    using namespace cute;
    AccS acc_s;
    storage.k_full[k_place.stage].wait(k_place.phase);
    start_qk(acc_s, q_stage);
    storage.v_full[v_place.stage].wait(v_place.phase);
    start_pv(i == 1);
    warpgroup_wait<1>();
    warpgroup_fence_operand(acc_s);
    release(storage.k_empty, k_place);
    const int key = range.block_interior_first(i) * Config::kBlockN;
    auto scores = row_col_view(acc_s);
    modify_scores<kEdge>(scores, key);
    float correction[kRows];
    const bool raised =
        softmax.raise_reference(scores, params.softmax_scale_log2, correction, params.softmax_slack_log2);
    softmax.template exponentiate<kEdge>(scores, params.softmax_scale_log2);
    warpgroup_fence_operand(acc_s);  // the exponentials come before the wait
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc_o);
    warpgroup_fence_operand(tOrP);
    release(storage.v_empty, v_place);
    if (raised) {
      auto out = row_col_view(acc_o);
      softmax.rescale(out, correction);
    }
    set_probabilities(acc_s, key);
  }

  __device__ __forceinline__ void last_pv(bool clears) {
    storage.v_full[v_place.stage].wait(v_place.phase);
    start_pv(clears);
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(acc_o);
    release(storage.v_empty, v_place);
  }

  // Every key block of the tile. Q has landed in q_stage.
  __device__ __forceinline__ void run(int q_stage) {
    const int count = range.count();
    if (count == 0) {
      cute::clear(acc_o);
      return;
    }
    const int interior = range.interior_end - range.interior_begin;
    first_step(q_stage);
    int i = 1;
    for (; i < interior; ++i) step<false>(i, q_stage);
    for (; i < count; ++i) step<true>(i, q_stage);
    last_pv(count == 1);
  }
};

}  // namespace sm90
}  // namespace flash
