// The mainloop where the consumers of the wgmma backward split a step by role: consumer 0 computes S, P and dV,
// consumer 1 dP, dS and dK. P is handed over in the order of the registers, which both have alike; dS goes to shared
// memory, and each consumer computes half of the columns of dQ one step late. So nothing is computed twice, and while
// one consumer waits for its additions to dQ the other has products to compute.
#pragma once

#include <cute/tensor.hpp>

#include "core/bwd_schedule.h"
#include "kernels/common/differentiate.h"
#include "kernels/sm90/bwd_mainloop.h"
#include "kernels/sm90/bwd_named_barriers.h"
#include "kernels/sm90/bwd_storage.h"

namespace flash {
namespace sm90 {

// The numbers of the consumers. A template parameter: behind a branch at run time accumulators of both would be live.
enum class BwdRole { kP = 0, kDs = 1 };

template <class Config, BwdRole kRole>
struct BwdRoleMainloop : BwdMainloop<Config> {
  using Base = BwdMainloop<Config>;
  using Base::coords;
  using Base::order;
  using Base::params;
  using Base::state;  // of Q, dO and dS of the current step
  using Base::storage;
  using Base::thread;
  using Base::tile;
  using Base::visibility;
  using State = PipelineState<Config::kStages>;
  using Coords = typename Base::Coords;
  using typename Base::AccDq;
  using typename Base::AccSdP;
  using typename Base::Element;
  using typename Base::RowValues;
  template <int kCols>
  using AccDkv = typename Base::template AccDkv<kCols>;

  int64_t dq_tile = 0;  // of the next dQ to compute

  using Base::Base;

  // There is one buffer of P, so its phase is the parity of the step, as the stage of a ring of two is.
  __device__ __forceinline__ uint32_t p_phase() const { return state.stage; }

  __device__ __forceinline__ State previous_state() const {
    const int stage = state.stage ^ 1;
    return {stage, state.phase ^ stage};
  }

  // This thread's 16-byte vectors of P.
  __device__ __forceinline__ float4* p_vectors() const { return reinterpret_cast<float4*>(storage.p) + thread; }

  // Consumer 0: P of the step from its scores, for consumer 1 and, returned, for dV. Releases Q.
  __device__ __forceinline__ auto publish_p(const QStep& at, AccSdP& acc_s) const {
    using namespace cute;
    const TileCoords tile_coords{tile.batch, at.head, at.m_block * Config::kBlockM, this->key_begin()};
    const RowValues lse_log2{storage.lse_log2[state.stage], coords};
    auto scores = transposed_row_col_view(acc_s);
    if constexpr (!Config::kIsGeneral) {
      mask_scores<Config::kBlockM, 64>(scores, coords, visibility, tile_coords);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      this->release(storage.q_empty);
      store_p(acc_s);
    } else {
      const SmemRandomBits<Coords> bits{storage.dropout_row_bits[state.stage], storage.dropout_col_bits[state.stage],
                                        coords};
      AccSdP acc_handed;
      auto handed = transposed_row_col_view(acc_handed);
      exponentiate_general<Config::kBlockM, 64>(params, visibility, tile_coords, coords, bits, lse_log2, scores,
                                                handed);
      this->release(storage.q_empty);
      store_p(acc_handed);
    }
    return convert<Element>(acc_s);
  }

  __device__ __forceinline__ void store_p(const AccSdP& acc_p) const {
    storage.p_empty.wait(p_phase() ^ 1);
#pragma unroll
    for (int i = 0; i < decltype(cute::size(acc_p))::value; i += 4) {
      p_vectors()[i / 4 * 128] = make_float4(acc_p(i), acc_p(i + 1), acc_p(i + 2), acc_p(i + 3));
    }
    storage.p_full.arrive();
  }

  __device__ __forceinline__ void load_p(AccSdP& acc_p) const {
    storage.p_full.wait(p_phase());
#pragma unroll
    for (int i = 0; i < decltype(cute::size(acc_p))::value; i += 4) {
      const float4 vector = p_vectors()[i / 4 * 128];
      acc_p(i) = vector.x;
      acc_p(i + 1) = vector.y;
      acc_p(i + 2) = vector.z;
      acc_p(i + 3) = vector.w;
    }
    storage.p_empty.arrive();
  }

  // Consumer 1: dS of the step from dP, in shared memory for dQ and, returned, for dK. Releases dO.
  __device__ __forceinline__ auto publish_ds(AccSdP& acc_dp) const {
    using namespace cute;
    const RowValues softmax_d{storage.softmax_d[state.stage], coords};
    auto dp = transposed_row_col_view(acc_dp);
    AccSdP acc_p;
    const auto p = transposed_row_col_view(acc_p);
    if constexpr (!Config::kIsGeneral) {
      subtract_softmax_d(dp, softmax_d);
      this->release(storage.do_empty);
      load_p(acc_p);
#pragma unroll
      for (int i = 0; i < size(acc_dp); ++i) acc_dp(i) *= acc_p(i);
    } else {
      load_p(acc_p);
      differentiate_handed(params, p, dp, softmax_d);
      this->release(storage.do_empty);
    }
    const auto ds = convert<Element>(acc_dp);
    storage.ds_empty[state.stage].wait(state.phase ^ 1);
    this->write_ds(ds, state.stage);
    storage.ds_stored[state.stage].arrive();
    return ds;
  }

  // dV += P^T dO or dK += dS^T Q: `rows` and its barrier `empty`, of the current step. Beside it dQ of the previous
  // step, whose additions leave while the scores of the next step, start_next(), are in flight. Every branch ends with
  // no product in flight: ptxas serialises wgmma that are in flight where branches meet.
  template <int kCols, class Values, class StartNext>
  __device__ __forceinline__ void multiply(const Values& values, Element* rows, AccDkv<kCols>& acc, Barrier* empty,
                                           const QStep& at, bool has_previous, bool has_next, AccSdP& scores,
                                           const StartNext& start_next) {
    const int stage = state.stage;
    const State previous = previous_state();
    state.advance();
    AccDq acc_dq;
    int peeked = 0;
    if (has_previous) {
      peeked = peek(dq_tile);
      wait_for_ds(previous);
      this->start_dq(previous.stage, 0, acc_dq);
      this->template start_dkv<kCols>(values, rows, acc);
      if constexpr (Config::kDqSlices == 2) {
        wait_for<1>(acc_dq);
        reduce(at, 0, peeked, acc_dq);
        this->start_dq(previous.stage, 1, acc_dq);
      }
      wait_for<0>(acc_dq);
      cute::warpgroup_fence_operand(acc);
      storage.ds_empty[previous.stage].arrive();
    } else {
      this->template start_dkv<kCols>(values, rows, acc);
      wait_for<0>(acc);
    }
    empty[stage].arrive();
    const auto reduce_last_slice = [&] {
      if (!has_previous) return;
      reduce(at, Config::kDqSlices - 1, peeked, acc_dq);
      this->arrive_dq_added(previous);
      dq_tile += order.offset(at.head == order.first_head, 1, dq_tile_head_stride(params, Config::kBlockM), 1);
    };
    if (has_next) {
      start_next();
      reduce_last_slice();
      wait_for<0>(scores);
    } else {
      reduce_last_slice();
    }
  }

  __device__ __forceinline__ int peek(int64_t tile_index) const {
    return this->is_deterministic() ? dq_semaphore_peek(params.dq_semaphore_ptr + tile_index) : 0;
  }

  // Adds a slice of dQ of the step before `at`, of tile dq_tile.
  __device__ __forceinline__ void reduce(const QStep& at, int slice, int peeked, AccDq& acc_dq) {
    this->reduce_dq_slice(order.before(at), dq_tile, slice, peeked, acc_dq);
  }

  __device__ __forceinline__ void wait_for_ds(const State& step) const { storage.ds_full[step.stage].wait(step.phase); }

  // dQ of the last step, before `at`.
  __device__ __forceinline__ void finish_dq(const QStep& at) {
    const State last = previous_state();
    const int peeked = peek(dq_tile);
    AccDq acc_dq;
    wait_for_ds(last);
#pragma unroll
    for (int slice = 0; slice < Config::kDqSlices; ++slice) {
      this->start_dq(last.stage, slice, acc_dq);
      wait_for<0>(acc_dq);
      if (slice == Config::kDqSlices - 1) storage.ds_empty[last.stage].arrive();
      reduce(at, slice, peeked, acc_dq);
    }
    this->arrive_dq_added(last);
  }

  // `keys`, opaque: the descriptors of its k slices, kept in registers over the loop, would spill.
  __device__ __forceinline__ static Element* per_step(Element* keys) {
    int offset = 0;
    asm volatile("" : "+r"(offset));
    return keys + offset;
  }

  __device__ __forceinline__ void start_s(AccSdP& acc_s) const {
    storage.q_full[state.stage].wait(state.phase);
    this->template start_scores<Config::kHeadDim>(per_step(storage.k[0]), storage.q[state.stage], acc_s);
  }

  __device__ __forceinline__ void start_dp(AccSdP& acc_dp) const {
    storage.do_full[state.stage].wait(state.phase);
    this->template start_scores<Config::kHeadDimV>(per_step(storage.v[0]), storage.dout[state.stage], acc_dp);
  }

  __device__ __forceinline__ void run_p(int count) {
    AccSdP acc_s;
    start_s(acc_s);
    wait_for<0>(acc_s);
    QStep at = order.start();
    for (int i = 0; i < count; ++i) {
      const auto p = publish_p(at, acc_s);
      storage.do_full[state.stage].wait(state.phase);
      multiply<Config::kDvCols>(p, storage.dout[state.stage], this->acc_dv, storage.do_empty, at, i > 0, i + 1 < count,
                                acc_s, [&] { start_s(acc_s); });
      order.advance(at);
    }
    finish_dq(at);
  }

  __device__ __forceinline__ void run_ds(int count) {
    AccSdP acc_dp;
    start_dp(acc_dp);
    wait_for<0>(acc_dp);
    QStep at = order.start();
    for (int i = 0; i < count; ++i) {
      const auto ds = publish_ds(acc_dp);
      storage.q_full[state.stage].wait(state.phase);
      multiply<Config::kDkCols>(ds, storage.q[state.stage], this->acc_dk, storage.q_empty, at, i > 0, i + 1 < count,
                                acc_dp, [&] { start_dp(acc_dp); });
      order.advance(at);
    }
    finish_dq(at);
  }

  // On return the buffers of K and V, in which dK and dV are staged, have no readers left.
  __device__ __forceinline__ void run() {
    const int count = order.count();
    // Also of a work tile without rows: the phases have to be consumed.
    storage.k_full[0][0].wait(this->kv_state.phase);
    storage.v_full[0][0].wait(this->kv_state.phase);
    if (count == 0) return;
    dq_tile = dq_tile_index(params, tile, order.start(), Config::kBlockM);
    if constexpr (kRole == BwdRole::kP) {
      run_p(count);
    } else {
      run_ds(count);
    }
    wait_for_consumers<Config>();
  }
};

}  // namespace sm90
}  // namespace flash
