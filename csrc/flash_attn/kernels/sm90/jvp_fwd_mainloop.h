// Mainloop of the forward with tangents: one consumer warpgroup, 64 rows, descending KV blocks.
//
//   S' = scale (Q' K^T + Q K'^T)    H = P (S' - center)    O' = P V' + H V
//
// The derivative of a row's LSE is mean(H) + center, that of its output O' - mean(H) O. Any center of a row is right;
// near the mean of S' it keeps the rounding of H to 16 bits from that part of S' that cancels.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/mask.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tangent_scores.h"
#include "kernels/sm90/fwd_storage.h"
#include "kernels/sm90/gemm.h"
#include "kernels/sm90/jvp_fwd_config.h"
#include "kernels/sm90/jvp_fwd_launch_params.h"

namespace flash {
namespace sm90 {

template <class Config>
struct JvpFwdMainloop {
  using Element = typename Config::Element;
  using Storage = FwdStorage<Config>;
  using KvState = PipelineState<Config::kKvStages>;
  using MmaQk = typename Config::MmaQk;
  using MmaPv = typename Config::MmaPv;
  static constexpr int kRows = 2;                                  // accumulator rows per thread
  static constexpr uint32_t kPingPongBarrier = kBeginBarrier + 1;  // the first of one for each warpgroup
  enum Operand { kPrimal, kTangent };
  using AccS = decltype(cute::partition_fragment_C(MmaQk{}, cute::Shape<cute::_64, cute::Int<Config::kBlockN>>{}));
  using AccO = decltype(cute::partition_fragment_C(MmaPv{}, cute::Shape<cute::_64, cute::Int<Config::kHeadDimV>>{}));
  using LayoutP =
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<Config::kBlockN / 16>>>;
  using FragmentP = decltype(cute::make_tensor<Element>(LayoutP{}));

  const JvpFwdLaunch& launch;
  Storage& storage;
  const int group;
  const AccumulatorCoords<4> coords;  // within the warpgroup's 64 rows
  KvState k_state, v_state;

  AccS acc_s, acc_ts;  // S, then P in 32 bits; S'
  AccO acc_o, acc_to;
  FragmentP tOrP, tOrH;
  Softmax<kRows, int> softmax;
  float center[kRows], sum_h[kRows];  // sum_h: over this thread's columns
  int centered;                       // a bit for each row that has its center

  __device__ __forceinline__ JvpFwdMainloop(const JvpFwdLaunch& launch_, Storage& storage_, int group_)
      : launch(launch_), storage(storage_), group(group_), coords(threadIdx.x % 128) {}

  // The work tile in a slot. What only some steps need stays in shared memory: registers are short.
  __device__ __forceinline__ const WorkTile& tile(int slot) const { return storage.tile[slot].value; }
  __device__ __forceinline__ const typename Config::TripCount& steps(int slot) const {
    return storage.steps[slot][group].value;
  }

  // ---- GEMMs: none waits ----

  // acc += Q K^T (acc = Q K^T if `clears`) of the block at k_state.
  __device__ __forceinline__ void issue_qk(AccS& acc, int q_stage, Operand of_q, Operand of_k, bool clears) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    const int q_tile = 2 * (q_stage * Config::kWarpGroups + group) + of_q;
    auto tSrQ = thread.partition_fragment_A(q)(_, _, _, q_tile);
    auto tSrK = thread.partition_fragment_B(k)(_, _, _, 2 * k_state.stage + of_k);
    start_gemm(mma, tSrQ, tSrK, acc, clears);
  }

  __device__ __forceinline__ void issue_scores(int q_stage) { issue_qk(acc_s, q_stage, kPrimal, kPrimal, true); }

  __device__ __forceinline__ void issue_tangent_scores(int q_stage) {
    issue_qk(acc_ts, q_stage, kTangent, kPrimal, true);
    issue_qk(acc_ts, q_stage, kPrimal, kTangent, false);
  }

  // acc += P V of the block at v_state, as a part of a group of GEMMs.
  __device__ __forceinline__ void add_pv(AccO& acc, const FragmentP& p, Operand of_v, bool clears) {
    using namespace cute;
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt = make_tensor(make_smem_ptr(storage.v[0]), typename Config::SmemLayoutVt{});
    auto tOrV = thread.partition_fragment_B(vt)(_, _, _, 2 * v_state.stage + of_v);
    mma.accumulate_ = clears ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
#pragma unroll
    for (int k = 0; k < size<2>(p); ++k) {
      gemm(mma, p(_, _, k), tOrV(_, _, k), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
  }

  // O and O' of the block at v_state, which is the tile's first if `clears`, as one group.
  __device__ __forceinline__ void issue_outputs(bool clears) {
    storage.v_full[v_state.stage].wait(v_state.phase);
    cute::warpgroup_fence_operand(acc_o);
    cute::warpgroup_fence_operand(acc_to);
    cute::warpgroup_arrive();
    add_pv(acc_o, tOrP, kPrimal, clears);
    add_pv(acc_to, tOrH, kPrimal, clears);
    add_pv(acc_to, tOrP, kTangent, false);
    cute::warpgroup_commit_batch();
    cute::warpgroup_fence_operand(acc_o);
    cute::warpgroup_fence_operand(acc_to);
  }

  // All GEMMs of this warpgroup are complete.
  __device__ __forceinline__ void wait_for_outputs() {
    wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(acc_to);
    cute::warpgroup_fence_operand(tOrP);
    cute::warpgroup_fence_operand(tOrH);
    release(storage.v_empty, v_state);
  }

  // ---- barriers ----

  __device__ __forceinline__ void wait_for_k() const { storage.k_full[k_state.stage].wait(k_state.phase); }

  // Ping-pong barrier: once per KV block, skipped blocks included, because both warpgroups must arrive equally often.
  __device__ __forceinline__ void wait_for_order_barrier() const {
    if constexpr (Config::kPingPong) cutlass::arch::NamedBarrier::sync(256, kPingPongBarrier + group);
  }
  __device__ __forceinline__ void arrive_at_order_barrier() const {
    if constexpr (Config::kPingPong) cutlass::arch::NamedBarrier::arrive(256, kPingPongBarrier + (group ^ 1));
  }

  // This warp has read the stage.
  __device__ __forceinline__ static void release(Barrier* empty, KvState& state) {
    if (threadIdx.x % 32 == 0) empty[state.stage].arrive();
    state.advance();
  }

  // Skipped blocks have to land before their stages can be released.
  __device__ __forceinline__ void skip_k(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_for_k();
      wait_for_order_barrier();
      arrive_at_order_barrier();
      release(storage.k_empty, k_state);
    }
  }
  __device__ __forceinline__ void skip_v(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      storage.v_full[v_state.stage].wait(v_state.phase);
      release(storage.v_empty, v_state);
    }
  }
  // All blocks of a tile, K and V in turn, since the ring has fewer stages.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      skip_k(1);
      skip_v(1);
    }
  }

  // ---- scores ----

  // The KV blocks of the work tile in a slot, downwards.
  struct BlockIterator {
    int slot;
    int n_block, last;
    int unmasked_begin, unmasked_end;  // of the warpgroup's rows

    __device__ __forceinline__ bool is_masked() const { return n_block < unmasked_begin || n_block >= unmasked_end; }
  };
  __device__ __forceinline__ BlockIterator iterator(int slot) const {
    const auto& own = steps(slot);
    return {slot, own.first_block, own.first_block - own.count + 1, own.unmasked_begin, own.unmasked_end};
  }

  // S becomes P. Returns, warp-uniform, whether row_max was updated.
  template <bool kFirst>
  __device__ __forceinline__ int exponentiate(const BlockIterator& at, float (&correction)[kRows]) {
    const Flash_fwd_params& params = launch.params;
    auto scores = row_col_view(acc_s);
    if (at.is_masked()) {
      const WorkTile& own = tile(at.slot);
      const int rows = min(64, own.seqlen_q - own.row_begin - 64 * group), key = at.n_block * Config::kBlockN;
      apply_bounds(scores, coords, steps(at.slot).bounds, rows, own.seqlen_k, key, key + Config::kBlockN);
    }
    int updates = false;
    if constexpr (kFirst) {
      softmax.set_row_max(scores, params.softmax_scale_log2);
    } else {
      updates = softmax.update_row_max(scores, params.softmax_scale_log2, correction, params.rescale_threshold_log2);
    }
    softmax.exponentiate(scores, params.softmax_scale_log2);
    return updates;
  }

  __device__ __forceinline__ void rescale(const float (&correction)[kRows]) {
    auto out = row_col_view(acc_o), t_out = row_col_view(acc_to);
    softmax.rescale(out, correction);
    softmax.rescale(t_out, correction);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) sum_h[mi] *= correction[mi];
  }

  // P and H in 16 bits, of P in acc_s and S' in acc_ts.
  template <bool kFirst>
  __device__ __forceinline__ void pack(const BlockIterator& at) {
    using namespace cute;
    const auto probs = row_col_view(acc_s);
    auto t_scores = row_col_view(acc_ts);
    const bool is_masked = at.is_masked();
    if (is_masked) clear_hidden_tangents<kRows>(probs, t_scores);
    if (kFirst || (is_masked && __any_sync(0xffffffffu, centered != 3)))
      set_centers(probs, t_scores, launch.params.scale_softmax, center, centered);
    const float scale = launch.params.scale_softmax;
#pragma unroll
    for (int ni = 0; ni < size<1>(probs); ++ni) {
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        t_scores(mi, ni) = probs(mi, ni) * fmaf(t_scores(mi, ni), scale, -center[mi]);
        sum_h[mi] += t_scores(mi, ni);
      }
    }
    auto p = recast<uint32_t>(tOrP), h = recast<uint32_t>(tOrH);
#pragma unroll
    for (int i = 0; i < size(p); ++i) {
      p(i) = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
      h(i) = pack_pair(acc_ts(2 * i), acc_ts(2 * i + 1), Element{});
    }
  }

  // ---- steps ----

  __device__ __forceinline__ void reset() {
    softmax = decltype(softmax)();
    centered = 0;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) center[mi] = sum_h[mi] = 0.0f;
  }

  // Keeps exp2 before the next wait for GEMMs. `row_sum < 0` is never true, but ptxas cannot know that, so this wait
  // for a phase that is complete depends on every exp2.
  __device__ __forceinline__ void finish_exp(const Barrier& complete, uint32_t phase) const {
    const bool never = softmax.row_sum[0][0] + softmax.row_sum[1][0] < 0.0f;
    complete.wait(phase ^ never);
  }

  // P and H of a tile's first block.
  __device__ __forceinline__ void first_step(const BlockIterator& at, int q_stage) {
    reset();
    wait_for_k();
    wait_for_order_barrier();
    issue_scores(q_stage);
    issue_tangent_scores(q_stage);
    wait_for<Config::kExpBeforeWait ? 2 : 0>(acc_s);
    arrive_at_order_barrier();
    float correction[kRows];
    if constexpr (Config::kExpBeforeWait) {
      exponentiate<true>(at, correction);
      finish_exp(storage.k_full[k_state.stage], k_state.phase);
      wait_for<0>(acc_ts);
    }
    cute::warpgroup_fence_operand(acc_ts);
    release(storage.k_empty, k_state);
    if constexpr (!Config::kExpBeforeWait) exponentiate<true>(at, correction);
    pack<true>(at);
  }

  // P and H of a block, O and O' of the one before it. S' has to wait for registers until H of that block has been
  // read. The other warpgroup may issue its S once this one's is complete: they stay out of phase.
  __device__ __forceinline__ void step(const BlockIterator& at, int q_stage, bool clears) {
    wait_for_k();
    wait_for_order_barrier();
    issue_scores(q_stage);
    issue_outputs(clears);
    wait_for<1>(acc_s);
    arrive_at_order_barrier();
    float correction[kRows];
    const int updates = exponentiate<false>(at, correction);
    if constexpr (Config::kExpBeforeWait) finish_exp(storage.v_full[v_state.stage], v_state.phase);
    wait_for_outputs();
    issue_tangent_scores(q_stage);
    if (updates) rescale(correction);
    wait_for<0>(acc_ts);
    release(storage.k_empty, k_state);
    pack<false>(at);
  }

  // All blocks of the warpgroup. Leaves to the caller O and O' of the last one, whose `clears` it returns.
  __device__ __forceinline__ bool run(int slot, int q_stage) {
    skip_k(steps(slot).skipped_first);
    BlockIterator at = iterator(slot);
    first_step(at, q_stage);
    skip_v(steps(slot).skipped_first);
    bool clears = true;
#pragma unroll 1
    while (--at.n_block >= at.last) {
      step(at, q_stage, clears);
      clears = false;
    }
    return clears;
  }
};

}  // namespace sm90
}  // namespace flash
