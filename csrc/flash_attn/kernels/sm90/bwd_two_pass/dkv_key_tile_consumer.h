// A consumer of the dK and dV kernel that computes all products of a step for its 64 keys. Its registers hold dK, dV,
// one 16-bit operand, and both P and dP. Above head dim 128 they hold P or dP: P is spilled to shared memory and read
// back by its own thread.
#pragma once

#include "core/bwd_schedule.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/sm90/bwd_two_pass/dkv_consumer.h"

namespace flash {
namespace sm90 {

// kKeyTile: index of the 64 keys in the n_block; a template parameter, so that addresses take no registers.
template <class Config, int kKeyTile>
struct KeyTileConsumer : DkvConsumer<Config> {
  using Base = DkvConsumer<Config>;
  using Base::coords;
  using Base::kv_phase;
  using Base::launch;
  using Base::params;
  using Base::state;
  using Base::storage;
  using Base::thread;
  using typename Base::Coords;
  using typename Base::Element;
  using typename Base::RowValues;
  using typename Base::Scores;
  using GradientK = AccGradient<Config, Config::kHeadDim>;
  using GradientV = AccGradient<Config, Config::kHeadDimV>;

  using Base::Base;

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    GradientK acc_dk;
    GradientV acc_dv;
    cute::clear(acc_dk);
    cute::clear(acc_dv);
    if (order.count() > 0) visit(tile, order, acc_dk, acc_dv);
    store_dkv<Config>(params, tile, kKeyTile, thread, acc_dv, params.dropout.keep_scale, params.dv_ptr,
                      params.dv_strides, params.d_v);
    store_dkv<Config>(params, tile, kKeyTile, thread, acc_dk, params.scale_softmax, params.dk_ptr, params.dk_strides,
                      params.d);
    __syncwarp();  // wgmma needs converged warps
  }

  __device__ __forceinline__ void visit(const BwdWorkTile& tile, const ListedQOrder& order, GradientK& acc_dk,
                                        GradientV& acc_dv) {
    storage.k_full[kKeyTile].wait(kv_phase);
    storage.v_full[kKeyTile].wait(kv_phase);
    kv_phase ^= 1;
    accumulate(tile, order, acc_dk, acc_dv);
  }

  // Skips the steps of the work tile whose rows do not see this consumer's keys.
  __device__ __forceinline__ void visit(const BwdWorkTile& tile, const QBlockOrder& order, GradientK& acc_dk,
                                        GradientV& acc_dv) {
    QBlockOrder own = order;
    own.rows = row_range(mask_of<Config>(params, tile), Config::kKeyTiles * tile.n_block + kKeyTile, Config::kBlockM,
                         Config::kTileRows);
    if (own.count() <= 0) own.rows = {order.rows.begin, order.rows.begin};
    skip_steps((order.rows.end - own.rows.end) * order.heads);
    storage.k_full[kKeyTile].wait(kv_phase);
    storage.v_full[kKeyTile].wait(kv_phase);
    kv_phase ^= 1;
    if (own.count() > 0) {
      accumulate(tile, own, acc_dk, acc_dv);
    } else {
      storage.k_empty[kKeyTile].arrive();
      storage.v_empty[kKeyTile].arrive();
    }
    skip_steps((own.rows.begin - order.rows.begin) * order.heads);
  }

  // Must still wait for each step: a second arrival in one phase is illegal.
  __device__ __forceinline__ void skip_steps(int steps) {
    for (int i = 0; i < steps; ++i) {
      storage.q_full[state.stage].wait(state.phase);
      storage.q_empty[state.stage].arrive();
      storage.do_full[state.stage].wait(state.phase);
      storage.do_empty[state.stage].arrive();
      state.advance();
    }
  }

  // dV overlaps dS, and dK overlaps P of the next step. No wgmma is in flight where branches of the loop join: ptxas
  // would serialise it (C7514). Scores are converted to 16 bits only after the previous A operand is consumed:
  // registers hold one.
  __device__ __forceinline__ void accumulate(const BwdWorkTile& tile, const BwdSteps<Config>& order, GradientK& acc_dk,
                                             GradientV& acc_dv) {
    int left = order.count();  // steps
    BwdStep<Config> at = order.start();
    Scores acc_s, own_acc_dp;  // S and P; dP and dS; or all of them in turn
    Scores& acc_dp = Config::kPInSmem ? acc_s : own_acc_dp;
    const Element* k = storage.k[kKeyTile];
    asm volatile("" : "+l"(k));  // so that its descriptors take no registers in the loop
    start_s(k, acc_s);
    wait_for<0>(acc_s);
    exponentiate(tile, at, acc_s, left == 1);
    while (left > 0) {
      const int stage = state.stage;
      const auto p = convert<Element>(acc_s);
      storage.do_full[stage].wait(state.phase);
      start_scores<Config, Config::kHeadDimV>(thread, storage.v[kKeyTile], storage.dout[stage], acc_dp, [](int) {});
      start_gradient<Config, Config::kHeadDimV>(thread, p, storage.dout[stage], acc_dv);
      wait_for<1>(acc_dp);
      --left;
      differentiate(acc_s, acc_dp, left == 0);
      wait_for<0>(acc_dv);
      storage.do_empty[stage].arrive();
      cute::warpgroup_fence_operand(acc_dp);
      const auto ds = convert<Element>(acc_dp);
      state.advance();
      order.advance(at);
      if (left > 0) {
        start_s(storage.k[kKeyTile], acc_s);
        start_gradient<Config, Config::kHeadDim>(thread, ds, storage.q[stage], acc_dk);
        wait_for<1>(acc_s);
        exponentiate(tile, at, acc_s, left == 1);
        wait_for<0>(acc_dk);
      } else {
        start_gradient<Config, Config::kHeadDim>(thread, ds, storage.q[stage], acc_dk);
        wait_for<0>(acc_dk);
      }
      cute::warpgroup_fence_operand(acc_s);
      storage.q_empty[stage].arrive();
    }
  }

  __device__ __forceinline__ void start_s(const Element* k, Scores& acc_s) const {
    storage.q_full[state.stage].wait(state.phase);
    start_scores<Config, Config::kHeadDim>(thread, k, storage.q[state.stage], acc_s, [](int) {});
  }

  // Recomputed in each step: as loop invariants the bounds of a mask would take a register for every row.
  __device__ __forceinline__ Coords mask_coords() const {
    int lane = thread;
    asm volatile("" : "+r"(lane));
    return {AccumulatorCoords<4>(lane)};
  }

  // P of the step from its complete scores. Releases K after the last ones.
  __device__ __forceinline__ void exponentiate(const BwdWorkTile& tile, const BwdStep<Config>& at, Scores& acc_s,
                                               bool is_last) const {
    if (is_last) storage.k_empty[kKeyTile].arrive();
    const TileCoords tile_coords{tile.batch, at.head, at.m_block * Config::kBlockM,
                                 tile.n_block * Config::kBlockN + kKeyTile * Config::kTileRows};
    const auto visibility = mask_of_step<Config>(launch, tile, at, kKeyTile);
    const RowValues lse_log2{storage.lse_log2[state.stage], coords};
    auto scores = transposed_row_col_view(acc_s);
    mask_scores<Config::kBlockM, Config::kTileRows>(scores, mask_coords(), visibility, tile_coords);
    exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
    if constexpr (Config::kPInSmem) {
      this->write_p(kKeyTile, acc_s);
    } else {
      finish_scores(acc_s);
    }
  }

  // Keeps the computation of these scores before the next wait; ptxas would sink it, and nothing would overlap the
  // product in flight. No stage is negative, but ptxas cannot know that, so this store, which never executes, depends
  // on all of them. A branch would make uniform values of the loop divergent.
  __device__ __forceinline__ void finish_scores(const Scores& acc) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < cute::size(acc); ++i) bits |= __float_as_uint(acc(i));
    asm volatile("{\n.reg .pred is_made;\nsetp.lt.s32 is_made, %2, 0;\n@is_made st.shared.u32 [%1], %0;\n}" ::"r"(bits),
                 "r"(cute::cast_smem_ptr_to_uint(storage.p[kKeyTile])), "r"(state.stage)
                 : "memory");
  }

  // dS of the step from its complete dP. Releases V after the last one.
  __device__ __forceinline__ void differentiate(const Scores& acc_s, Scores& acc_dp, bool is_last) const {
    if (is_last) storage.v_empty[kKeyTile].arrive();
    const RowValues softmax_d{storage.softmax_d[state.stage], coords};
    auto dp = transposed_row_col_view(acc_dp);
    subtract_softmax_d(dp, softmax_d);
    if constexpr (Config::kPInSmem) {
      Scores acc_p;
      this->read_p(kKeyTile, acc_p);
      multiply(acc_dp, acc_p);
    } else {
      multiply(acc_dp, acc_s);
      finish_scores(acc_dp);
    }
  }

  __device__ __forceinline__ static void multiply(Scores& acc_dp, const Scores& acc_p) {
#pragma unroll
    for (int i = 0; i < cute::size(acc_dp); ++i) acc_dp(i) *= acc_p(i);
  }
};

}  // namespace sm90
}  // namespace flash
