// The mainloop of a consumer warpgroup of the one-pass wgmma backward: 64 keys of the n_block against every m_block
// that sees them, for all query heads of the K/V head. dK and dV accumulate in registers over the whole loop. dQ is
// computed here or by the dQ warpgroup, and DqReduceWarp adds it to fp32 tiles in global memory. P is recomputed from
// the LSE: Dao et al. 2022, appendix B.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/bwd_schedule.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/dq_semaphore.h"
#include "kernels/common/dq_tile.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bwd_one_pass/biases.h"
#include "kernels/sm90/bwd_one_pass/dq_product.h"
#include "kernels/sm90/bwd_one_pass/named_barriers.h"
#include "kernels/sm90/bwd_one_pass/storage.h"
#include "kernels/sm90/bwd_row_values.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/sm90/gemm.h"
#include "kernels/tma/bulk_reduce.h"

namespace flash {
namespace sm90 {

using namespace tma;

template <class Config>
struct BwdMainloop {
  using Element = typename Config::Element;
  using Storage = BwdStorage<Config>;
  template <class Mma, int kCols>
  using Accumulator = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::Int<kCols>>{}));
  using AccSdP = Accumulator<typename Config::MmaSdP, Config::kBlockM>;   // ((2, 2, M / 8), 1, 1)
  using AccDkv = Accumulator<typename Config::MmaDkv, Config::kHeadDim>;  // ((2, 2, columns / 8), 1, 1)
  using AccDq = decltype(cute::partition_fragment_C(
      typename Config::MmaDq{}, cute::Shape<cute::Int<Config::kBlockM>, cute::Int<Config::kHeadDim>>{}));
  // P^T and dS^T as A operands: the layout of their accumulator registers.
  using LayoutP =
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<Config::kBlockM / 16>>>;
  using Coords = TransposedCoords<AccumulatorCoords<4>>;

  using Seen = std::conditional_t<Config::kListed, SeenLines<Config::kBlockM / 32>, typename Config::Nothing>;
  using Visit = BwdVisit<Config>;
  using Box = typename Config::template IfBiased<TransposedBox<Config::kBlockM / 4>>;
  using RowValues = SmemRowValues<Coords>;
  static constexpr bool kRowValuesInRegs =
      !Config::kIsGeneral && !Config::kHasDqWarpgroup && !Config::kBiased && !Config::kIsTall;
  using EarlyRowValues =
      std::conditional_t<kRowValuesInRegs, RegisterRowValues<Coords, Config::kBlockM / 4>, RowValues>;

  const BwdLaunch& launch;
  const Flash_bwd_params& params;
  Storage& storage;
  const BwdWorkTile& tile;
  const int group;   // of the consumers
  const int thread;  // of the warpgroup
  const MaskOf<Config> visibility;
  const BwdSteps<Config> order;
  const Coords coords;  // rows: queries of the m_block; columns: this warpgroup's keys
  PipelineState<Config::kStages> state;
  PipelineState<Config::kKStages> kv_state;  // of K; and of V, if that has as many
  PipelineState<2> ds_state;                 // of the next dS to store
  PipelineState<2> dq_state;                 // of the next dS whose dQ is to be computed
  typename Config::template IfBiased<PipelineState<2>> bias_state;
  typename Config::template IfBiased<QStep> last_step{};  // without a dQ warpgroup: the step of dq_state

  AccDkv acc_dk, acc_dv;

  __device__ __forceinline__ BwdMainloop(const BwdLaunch& launch_, Storage& storage_, const BwdWorkTile& tile_,
                                         int group_, PipelineState<Config::kStages> state_,
                                         PipelineState<Config::kKStages> kv_state_, PipelineState<2> ds_state_)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        tile(tile_),
        group(group_),
        thread(threadIdx.x % 128),
        visibility(mask_of<Config>(launch_.params, tile_)),
        order(bwd_steps<Config>(launch_.params, launch_.mask, tile_)),
        coords{AccumulatorCoords<4>(threadIdx.x % 128)},
        state(state_),
        kv_state(kv_state_),
        ds_state(ds_state_),
        dq_state(ds_state_) {
    cute::clear(acc_dk);
    cute::clear(acc_dv);
  }

  __device__ __forceinline__ int key_begin() const { return tile.n_block * Config::kBlockN + 64 * group; }

  // Issues acc (64, N) = A B, both in shared memory; does not wait.
  template <class Mma, class SmemA, class SmemB, class Acc>
  __device__ __forceinline__ void start(Mma mma, const SmemA& a, const SmemB& b, Acc& acc) const {
    const auto slice = mma.get_slice(thread);
    start_gemm(mma, slice.partition_fragment_A(a), slice.partition_fragment_B(b), acc, true);
  }

  // The view of this warpgroup's 64 keys in a tile of kBlockN keys.
  __device__ __forceinline__ auto local_kv(Element* smem_tile) const {
    using namespace cute;
    return local_tile(make_tensor(make_smem_ptr(smem_tile), typename Config::SmemLayoutKv{}),
                      Shape<_64, Int<Config::kHeadDim>>{}, make_coord(group, _0{}));
  }

  // S^T = K Q^T or dP^T = V dO^T; `rows` is Q or dO of the m_block.
  __device__ __forceinline__ void start_scores(Element* keys, Element* rows, AccSdP& acc) const {
    using namespace cute;
    start(typename Config::MmaSdP{}, local_kv(keys), make_tensor(make_smem_ptr(rows), typename Config::SmemLayoutQ{}),
          acc);
  }

  // dV += P^T dO or dK += dS^T Q.
  template <class Values>
  __device__ __forceinline__ void start_dkv(const Values& values, Element* rows, AccDkv& acc) const {
    using namespace cute;
    typename Config::MmaDkv mma;
    const auto a = make_tensor(values.data(), LayoutP{});
    const auto cols = make_tensor(make_smem_ptr(rows), typename Config::SmemLayoutQt{});  // (D, M)
    start_gemm(mma, a, mma.get_slice(thread).partition_fragment_B(cols), acc, false);
  }

  // One m_block of one query head, without a dQ warpgroup; the visit that it was.
  __device__ __forceinline__ Visit step(const Visit& given, int i) {
    using namespace cute;
    const int stage = state.stage;
    AccSdP acc_s, acc_dp;
    storage.q_full[stage].wait(state.phase);
    const Visit at = visit_at(given);
    const RowValues lse_rows{storage.lse_log2[stage], coords};
    const EarlyRowValues lse_log2(lse_rows);
    start_scores(storage.k[Config::k_stage(kv_state)], storage.q[stage], acc_s);
    storage.do_full[stage].wait(state.phase);
    start_scores(storage.v[Config::v_stage(kv_state)], storage.dout[stage], acc_dp);
    const Seen seen = seen_at(at);
    Box box = box_of_step(*this);
    wait_for<1>(acc_s);
    constexpr bool kStartsDv = !Config::kIsTall;  // registers do not hold dP and P in two precisions
    differentiate<kStartsDv>(at, Config::kListed && is_whole(at), seen, box, lse_log2, acc_s, acc_dp);
    const auto p = convert<Element>(acc_s), ds = convert<Element>(acc_dp);
    store_ds(ds, i == 0);
    finish_step(*this, at, acc_dp);
    if constexpr (!kStartsDv) start_dkv(p, storage.dout[stage], acc_dv);
    start_dkv(ds, storage.q[stage], acc_dk);
    wait_for<0>(acc_dk);
    return at;
  }

  // kPassesSteps: the step whose Q has landed. Shuffled, so that ptxas sees uniform branches.
  __device__ __forceinline__ Visit visit_at(const Visit& given) const {
    if constexpr (Config::kPassesSteps) {
      const auto passed = storage.steps[state.stage];
      const BlockEntry entry{__shfl_sync(0xffffffffu, passed.entry.bits, 0)};
      return {{__shfl_sync(0xffffffffu, passed.head, 0), entry.block()}, entry};
    } else {
      return given;
    }
  }

  // kListed: whether every query of the step sees all keys of this consumer.
  __device__ __forceinline__ bool is_whole(const Visit& at) const {
    if constexpr (Config::kListed) {
      return at.entry.strip(group) == BlockClass::kWhole;
    } else {
      return false;
    }
  }

  // kListed: what this warp sees of a step's scores, unless that is all.
  __device__ __forceinline__ Seen seen_at(const Visit& at) const {
    if constexpr (Config::kListed) {
      if (is_whole(at)) return {};
      return seen_by_keys(factors_of(params, launch.mask.factors, tile, at.head), storage.tile_keys[state.stage],
                          visibility, at.m_block * Config::kBlockM, key_begin() + thread / 32 * 16,
                          tile.n_block * Config::kBlockN);
    } else {
      return {};
    }
  }

  __device__ __forceinline__ decltype(auto) mask_at(const Visit& at) const {
    if constexpr (Config::kListed) {
      return mask_of_step<Config>(launch, tile, at, group);
    } else {
      return (visibility);  // a reference
    }
  }

  // On entry S is complete and dP in flight; on exit acc_s holds P and acc_dp holds dS. kStartsDv: starts dV += P^T dO
  // before it waits for dP.
  template <bool kStartsDv, class LseRows>
  __device__ __forceinline__ void differentiate(const Visit& at, bool is_unmasked, const Seen& seen, Box& box,
                                                const LseRows& lse_log2, AccSdP& acc_s, AccSdP& acc_dp) {
    const int stage = state.stage;
    const TileCoords tile_coords{tile.batch, at.head, at.m_block * Config::kBlockM, key_begin()};
    auto scores = transposed_row_col_view(acc_s);  // ((2, M / 8), 2)
    auto dp = transposed_row_col_view(acc_dp);
    const RowValues softmax_d{storage.softmax_d[stage], coords};
    const SmemRandomBits<Coords> bits{storage.dropout_row_bits[stage], storage.dropout_col_bits[stage] + 32 * group,
                                      coords};
    if constexpr (Config::kBiased) {
      exponentiate_biased(*this, at.head, tile_coords, is_unmasked, seen, box, lse_log2, scores);
      if constexpr (Config::kMayDrop) {
        if (params.has_dropout) mark_dropped(params, coords, bits, scores);
      }
      const EarlyRowValues softmax_d_of_rows(softmax_d);
      if constexpr (kStartsDv) start_dkv(convert_p(acc_s), storage.dout[stage], acc_dv);
      wait_for<kStartsDv>(acc_dp);
      differentiate_biased(*this, scores, dp, softmax_d_of_rows);
    } else if constexpr (Config::kListed && !Config::kListedPlain) {
      const int diagonal = alibi_diagonal(params, tile.batch, visibility, tile_coords.row_begin);
      if (params.has_score_mod) {
        ScoreMod(params, tile.batch, at.head).apply(scores, coords, diagonal, tile_coords.key_begin);
        flash::add_biases_of(mask_at(at), tile_coords, diagonal, coords, scores);
      }
      if (!is_unmasked) hide_unseen(scores, seen);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      if (params.has_dropout) mark_dropped(params, coords, bits, scores);
      const EarlyRowValues softmax_d_of_rows(softmax_d);
      if constexpr (kStartsDv) start_dkv(convert_p(acc_s), storage.dout[stage], acc_dv);
      wait_for<kStartsDv>(acc_dp);
      const RowValues lse_rows{storage.lse_log2[stage], coords};
      differentiate_marked(params, visibility, tile_coords, coords, lse_rows, softmax_d_of_rows, scores, dp);
    } else if constexpr (!Config::kIsGeneral) {
      if constexpr (Config::kListedPlain) {
        if (!is_unmasked) hide_unseen(scores, seen);
      } else {
        if (!is_unmasked) mask_scores<Config::kBlockM, 64>(scores, coords, mask_at(at), tile_coords);
      }
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      const EarlyRowValues softmax_d_of_rows(softmax_d);
      if constexpr (kStartsDv) start_dkv(convert<Element>(acc_s), storage.dout[stage], acc_dv);
      wait_for<kStartsDv>(acc_dp);
      differentiate_scores(scores, dp, softmax_d_of_rows);
    } else {
      wait_for<0>(acc_dp);
      differentiate_general<Config::kBlockM, 64, true>(params, mask_at(at), tile_coords, coords, bits, lse_log2,
                                                       softmax_d, scores, dp);
      if constexpr (kStartsDv) start_dkv(convert<Element>(acc_s), storage.dout[stage], acc_dv);
    }
  }

  // P as the operand of dV: without dropped elements.
  __device__ __forceinline__ static auto convert_p(const AccSdP& acc_p) {
    if constexpr (Config::kListed && Config::kMayDrop) {
      return convert_relu<Element>(acc_p);
    } else {
      return convert<Element>(acc_p);
    }
  }

  __device__ __forceinline__ QStep own_dq_step() const {
    if constexpr (Config::kBiased) return last_step;
    return {};  // nothing depends on it
  }

  // dQ of the step of dq_state: consumer 0 computes those in stage 0, consumer 1 those in stage 1.
  __device__ __forceinline__ void compute_own_dq() {
    if (dq_state.stage == group) {
      AccDq acc_dq;
      compute_dq<Config>(storage, dq_state, Config::k_stage(kv_state), thread, {launch, tile, own_dq_step()}, acc_dq);
      stage_dq_tile<Config>(storage, dq_state, acc_dq, thread);
      __syncwarp();  // wgmma needs converged warps
    }
    dq_state.advance();
  }

  // Waits until this warp's TMA stores and bulk reductions have read their shared memory.
  __device__ __forceinline__ void wait_for_tma_stores() const {
    if (is_first_lane()) cute::tma_store_wait<0>();
    __syncwarp();
  }

  // Waits until the previous work tile's dK and dV have been read from the buffers of dS and dQ in which they are
  // staged: by this consumer's stores if there is a dQ warpgroup, since each consumer then stages in its own rows;
  // otherwise by both consumers'.
  __device__ __forceinline__ void wait_for_dkv_stores() const {
    wait_for_tma_stores();
    if constexpr (Config::kHasDqWarpgroup) {
      wait_for_warpgroup(group);
    } else {
      wait_for_consumers<Config>();
    }
    if constexpr (Config::kEarlyK) storage.kv_empty[Config::k_stage(kv_state) ^ 1][0].arrive();
  }

  __device__ __forceinline__ bool is_first_lane() const { return thread % 32 == 0; }

  // Stores dS for the warpgroup that computes dQ: waits for ds_empty, arrives on ds_full. The proxy fence is in
  // compute_dq(), where it stalls no consumer.
  template <class Values>
  __device__ __forceinline__ void store_ds(const Values& ds, bool is_first) {
    storage.ds_empty[ds_state.stage].wait(ds_state.phase ^ 1);
    if (!Config::kSeparateDkvSmem && is_first) wait_for_dkv_stores();
    write_ds<Config>(ds, storage.ds[ds_state.stage], group, thread);
    storage.ds_full[ds_state.stage].arrive();
    ds_state.advance();
  }

  // A step whose rows see no key of this consumer's 64: waits and arrives like every other step, up to the release.
  __device__ __forceinline__ void store_zero_ds(bool is_first) {
    AccSdP zeros;
    cute::clear(zeros);
    storage.q_full[state.stage].wait(state.phase);
    storage.do_full[state.stage].wait(state.phase);
    if constexpr (Config::kHasDqWarpgroup) {
      wait_for_order_barrier<Config>(group);
      arrive_at_order_barrier<Config>(group);
    }
    store_ds(convert<Element>(zeros), is_first);
  }

  // Steps [begin, end) of the work tile, the first of them at `at`. S of the next step is in flight together with dK of
  // this one.
  __device__ __forceinline__ void run_visible(Visit at, int begin, int end) {
    using namespace cute;
    const RowRange unmasked =
        Config::kListed ? RowRange{} : unmasked_rows(visibility, key_begin(), key_begin() + 64, Config::kBlockM);
    Element* const keys = storage.k[kv_state.stage];
    Element* const values = storage.v[Config::v_stage(kv_state)];
    AccSdP acc_s;
    storage.q_full[state.stage].wait(state.phase);
    start_scores(keys, storage.q[state.stage], acc_s);
    wait_for<0>(acc_s);
    for (int i = begin; i < end; ++i) {
      const int stage = state.stage;
      at = visit_at(at);
      AccSdP acc_dp;
      storage.do_full[stage].wait(state.phase);
      start_scores(values, storage.dout[stage], acc_dp);
      const Seen seen = seen_at(at);
      Box box = box_of_step(*this);
      wait_for_order_barrier<Config>(group);
      const bool is_unmasked =
          Config::kListed ? is_whole(at) : at.m_block >= unmasked.begin && at.m_block < unmasked.end;
      differentiate<false>(at, is_unmasked, seen, box, RowValues{storage.lse_log2[state.stage], coords}, acc_s, acc_dp);
      const auto p = convert_p(acc_s), ds = convert<Element>(acc_dp);
      arrive_at_order_barrier<Config>(group);
      store_ds(ds, i == 0);
      finish_step(*this, at, acc_dp);
      // wgmma with A in registers blocks the warp while earlier ones run, so everything else has been issued before.
      start_dkv(p, storage.dout[stage], acc_dv);
      start_dkv(ds, storage.q[stage], acc_dk);
      state.advance();
      if constexpr (!Config::kPassesSteps) order.advance(at);
      if (i + 1 < end) {
        AccSdP next;
        storage.q_full[state.stage].wait(state.phase);
        start_scores(keys, storage.q[state.stage], next);
        wait_for<1>(acc_dk);
        release_step(stage);
        wait_for<0>(next);
        copy(next, acc_s);
      } else {
        wait_for<0>(acc_dk);
        release_step(stage);
      }
    }
  }

  // dV and dK of the step are complete: releases its stages of dO and Q.
  __device__ __forceinline__ void release_step(int stage) {
    cute::warpgroup_fence_operand(acc_dv);
    storage.do_empty[stage].arrive();
    storage.q_empty[stage].arrive();
  }

  // With a dQ warpgroup. Steps whose rows see no key of this consumer are the first and the last ones.
  __device__ __forceinline__ void run_with_dq_warpgroup(int count) {
    if constexpr (Config::kListed) {
      run_visible({}, 0, count);
    } else {
      run_visible_range(count);
    }
    storage.kv_empty[kv_state.stage][group].arrive();
    if constexpr (!Config::kSeparateDkvSmem) wait_for_ds_readers();
  }

  __device__ __forceinline__ void run_visible_range(int count) {
    const RowRange visible = row_range(visibility, key_begin() / 64, Config::kBlockM, 64);
    const bool is_visible = visible.end > visible.begin;
    const int begin = is_visible ? (order.rows.end - visible.end) * order.heads : count;
    const int end = is_visible ? count - (visible.begin - order.rows.begin) * order.heads : count;
    for (int i = 0; i < begin; ++i) skip_step(i == 0);
    if (is_visible) run_visible({order.first_head, visible.end - 1}, begin, end);
    for (int i = end; i < count; ++i) skip_step(false);
  }

  __device__ __forceinline__ void skip_step(bool is_first) {
    store_zero_ds(is_first);
    release_step(state.stage);
    state.advance();
  }

  // Without a dQ warpgroup. With kIsTall a consumer skips the products of steps whose rows see none of its keys: with
  // 64 rows a step that was not faster.
  __device__ __forceinline__ void run_alternating(int count) {
    const RowRange visible =
        Config::kIsTall ? row_range(visibility, key_begin() / 64, Config::kBlockM, 64) : RowRange{};
    Visit at{};
    if constexpr (!Config::kPassesSteps) at = order.start();
    for (int i = 0; i < count; ++i) {
      if (!Config::kIsTall || (at.m_block >= visible.begin && at.m_block < visible.end)) {
        at = step(at, i);
      } else {
        store_zero_ds(i == 0);
      }
      release_step(state.stage);
      if (Config::kEarlyK && i + 1 == count) storage.v_empty.arrive();
      state.advance();
      if (i > 0) compute_own_dq();
      if constexpr (Config::kBiased) last_step = at;
      if constexpr (!Config::kPassesSteps) order.advance(at);
    }
    compute_own_dq();
    if constexpr (!Config::kEarlyK) storage.kv_empty[Config::k_stage(kv_state)][0].arrive();
    wait_for_ds_readers();
    if constexpr (!Config::kEarlyK && !Config::kDsHoldsDkv) wait_for_dq_buffer<Config>(storage, ds_state);
  }

  // Waits until the warpgroup that computes dQ has read all dS of this consumer.
  __device__ __forceinline__ void wait_for_ds_readers() const {
    PipelineState<2> next = ds_state;
    for (int i = 0; i < 2; ++i) {
      storage.ds_empty[next.stage].wait(next.phase ^ 1);
      next.advance();
    }
  }

  // On return nobody reads the buffers in which dK and dV are staged: those of both consumers, or with a dQ warpgroup
  // this consumer's rows.
  __device__ __forceinline__ void run() {
    const int count = order.count();
    if (count == 0) return;
    const int part = Config::kHasDqWarpgroup ? group : 0;
    storage.k_full[kv_state.stage][part].wait(kv_state.phase);
    storage.v_full[Config::v_stage(kv_state)][part].wait(Config::v_phase(kv_state));
    if constexpr (Config::kHasDqWarpgroup) {
      run_with_dq_warpgroup(count);
    } else {
      run_alternating(count);
    }
  }
};

}  // namespace sm90
}  // namespace flash
