// The computing side of the wgmma backward: one warpgroup with 64 keys of the block, which meet every row block that
// sees them, for all query heads of their K/V head, and all columns of dK and dV or half of them. These stay in
// registers over the whole loop; dQ is reduced into fp32 tiles in global memory, or left to others. Gradients by
// recomputation from the LSE: Dao et al. 2022, appendix B.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/bwd_schedule.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/dq_semaphore.h"
#include "kernels/common/dq_tile.h"
#include "kernels/sm90/bwd_dq.h"
#include "kernels/sm90/bwd_storage.h"
#include "kernels/sm90/gemm.h"
#include "kernels/tma/bulk_reduce.h"
#include "kernels/tma/swizzle.h"

namespace flash {
namespace sm90 {

using namespace tma;

template <class Config>
struct BwdMainloop {
  using Element = typename Config::Element;
  using Storage = BwdStorage<Config>;
  template <class Mma, int kCols>
  using Accumulator = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::Int<kCols>>{}));
  using AccSdP = Accumulator<typename Config::MmaSdP, Config::kBlockM>;  // ((2, 2, M / 8), 1, 1)
  template <int kCols>
  using AccDkv = Accumulator<typename Config::template MmaDkv<kCols>, kCols>;  // ((2, 2, columns / 8), 1, 1)
  using AccDq = Accumulator<typename Config::MmaDq, Config::kDqCols>;          // a slice
  // P^T and dS^T as A operands: the registers of their accumulators.
  using LayoutP =
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Int<Config::kBlockM / 16>>>;
  using Coords = TransposedCoords<AccumulatorCoords<4>>;

  // A statistic of the rows of this thread, which are neighbours in pairs.
  struct RowValues {
    const float* rows;
    const Coords& coords;

    __device__ __forceinline__ float2 pair(int mi) const {
      return *reinterpret_cast<const float2*>(rows + coords.row(mi));
    }
  };

  // The same in registers, loaded before a product of two operands in shared memory begins, which leaves nothing of its
  // bandwidth to others.
  struct LoadedRowValues {
    static constexpr int kRows = Config::kBlockM / 4;
    float2 pairs[kRows / 2];

    __device__ __forceinline__ explicit LoadedRowValues(const RowValues& values) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) pairs[i] = values.pair(2 * i);
    }
    __device__ __forceinline__ float2 pair(int mi) const { return pairs[mi / 2]; }
  };
  static constexpr bool kLoadsRowValues =
      Config::kVariant == BwdVariant::kPlain && Config::kSplitsKeys && !Config::kHasDqWarpgroup;
  using EarlyRowValues = std::conditional_t<kLoadsRowValues, LoadedRowValues, RowValues>;

  // From which dropout draws.
  struct StoredBits {
    const RandomBits* rows;
    const RandomBits* pairs;
    const Coords& coords;

    __device__ __forceinline__ RandomBits row(int mi) const { return rows[coords.row(mi)]; }
    __device__ __forceinline__ RandomBits column_pair(int ni) const { return pairs[coords.col(ni) / 2]; }
  };

  const BwdLaunch& launch;
  const Flash_bwd_params& params;
  Storage& storage;
  const BwdWorkTile& block;
  const int group;   // of the consumers
  const int thread;  // of the warpgroup
  const Visibility visibility;
  const QBlockOrder order;
  const Coords coords;  // rows are queries of the row block, columns keys of this warpgroup
  PipelineState<Config::kStages> state;
  PipelineState<Config::kKvStages> kv_state;
  PipelineState<2> ds_state;   // of dS
  PipelineState<2> dq_offset;  // of the first dS whose dQ is to be computed

  AccDkv<Config::kDkCols> acc_dk;
  AccDkv<Config::kDvCols> acc_dv;

  __device__ __forceinline__ BwdMainloop(const BwdLaunch& launch_, Storage& storage_, const BwdWorkTile& block_,
                                         int group_, PipelineState<Config::kStages> state_,
                                         PipelineState<Config::kKvStages> kv_state_, PipelineState<2> ds_state_)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        block(block_),
        group(group_),
        thread(threadIdx.x % 128),
        visibility{block_.seqlen_q, block_.seqlen_k, launch_.params.window},
        order(q_block_order(launch_.params, block_, Config::kBlockM, Config::kBlockN)),
        coords{AccumulatorCoords<4>(threadIdx.x % 128)},
        state(state_),
        kv_state(kv_state_),
        ds_state(ds_state_),
        dq_offset(ds_state_) {
    cute::clear(acc_dk);
    cute::clear(acc_dv);
  }

  // Which of the shares of keys and of columns of K, V and their gradients is this warpgroup's.
  __device__ __forceinline__ int key_half() const { return Config::kSplitsKeys ? group : 0; }
  __device__ __forceinline__ int column_half() const { return Config::kSplitsKeys ? 0 : group; }
  __device__ __forceinline__ int key_begin() const { return block.n_block * Config::kBlockN + 64 * key_half(); }

  // acc (64, N) = or += A B, both in shared memory: started, not waited for.
  template <class Mma, class SmemA, class SmemB, class Acc>
  __device__ __forceinline__ void start(Mma mma, const SmemA& a, const SmemB& b, Acc& acc) const {
    const auto slice = mma.get_slice(thread);
    start_gemm(mma, slice.partition_fragment_A(a), slice.partition_fragment_B(b), acc, true);
  }

  // kCols columns of this warpgroup's 64 rows in a tile of the block's keys.
  template <int kCols>
  __device__ __forceinline__ auto own_keys(Element* tile, int column_half) const {
    using namespace cute;
    return local_tile(make_tensor(make_smem_ptr(tile), typename Config::SmemLayoutKv{}), Shape<_64, Int<kCols>>{},
                      make_coord(key_half(), column_half));
  }

  // S^T or dP^T of the row block in `tile`, whose head dim is kCols.
  template <int kCols>
  __device__ __forceinline__ void start_scores(Element* keys, Element* tile, AccSdP& acc) const {
    using namespace cute;
    const auto rows = local_tile(make_tensor(make_smem_ptr(tile), typename Config::SmemLayoutQ{}),
                                 Shape<Int<Config::kBlockM>, Int<kCols>>{}, make_coord(_0{}, _0{}));
    start(typename Config::MmaSdP{}, own_keys<kCols>(keys, 0), rows, acc);
  }

  // dV += P^T dO or dK += dS^T Q, this warpgroup's columns.
  template <int kCols, class Values>
  __device__ __forceinline__ void start_dkv(const Values& values, Element* tile, AccDkv<kCols>& acc) const {
    using namespace cute;
    typename Config::template MmaDkv<kCols> mma;
    const auto a = make_tensor(values.data(), LayoutP{});
    const auto cols = local_tile(make_tensor(make_smem_ptr(tile), typename Config::SmemLayoutQt{}),  // (D, M)
                                 Shape<Int<kCols>, Int<Config::kBlockM>>{}, make_coord(column_half(), _0{}));
    start_gemm(mma, a, mma.get_slice(thread).partition_fragment_B(cols), acc, false);
  }

  // A slice of this warpgroup's share of dQ = dS K.
  __device__ __forceinline__ void start_dq(int slice, AccDq& acc_dq) const {
    using namespace cute;
    const auto ds = make_tensor(make_smem_ptr(storage.ds[group]), typename Config::SmemLayoutDs{});  // (M, N)
    const auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutKt{});        // (D, N)
    const auto cols = local_tile(k, Shape<Int<Config::kDqCols>, Int<Config::kBlockN>>{},
                                 make_coord(Config::dq_column_slice(group, slice), _0{}));
    start(typename Config::MmaDq{}, ds, cols, acc_dq);
  }

  // dS^T of this warp's 16 keys, transposed, into rows of queries: a piece is 8 keys of one query, 8 pieces a matrix.
  // Rows that are 16 apart are swizzled alike. The wgmma that reads it is of the async proxy: a fence has to follow.
  template <class Values>
  __device__ __forceinline__ void write_ds(const Values& values, int buffer) const {
    constexpr int kChunk = Config::kAtomCols;
    const int lane = thread % 32, row = lane / 16 * 8 + lane % 8;
    const int key = 64 * key_half() + thread / 32 * 16 + lane / 8 % 2 * kVectorCols;
    Element* const first = storage.ds[buffer] + key / kChunk * Config::kBlockM * kChunk +
                           swizzle_offset(kChunk, row, key % kChunk / kVectorCols);
    const auto pairs = cute::recast<uint32_t>(values);  // of queries; then keys 8 apart, then queries 8 apart
#pragma unroll
    for (int i = 0; i < decltype(cute::size(pairs))::value; i += 4) {
      cute::SM90_U16x8_STSM_T::copy(pairs(i), pairs(i + 1), pairs(i + 2), pairs(i + 3),
                                    *reinterpret_cast<cute::uint128_t*>(first + i / 4 * 16 * kChunk));
    }
  }

  __device__ __forceinline__ static void wait_for_consumers() {
    cutlass::arch::NamedBarrier::sync(Config::kConsumers, kConsumerBarrier);
  }
  __device__ __forceinline__ void wait_for_warpgroup() const {
    cutlass::arch::NamedBarrier::sync(128, kConsumerBarrier + 1 + group);
  }
  // 0 is __syncthreads(); one of each consumer follows, then its token.
  static constexpr uint32_t kConsumerBarrier = 1, kOrderBarrier = kConsumerBarrier + 3;

  // For consumers with the same keys, each of which has a dS of its own: puts it into shared memory and waits until it
  // is whole.
  template <class Values>
  __device__ __forceinline__ void exchange_ds(const Values& values) const {
    wait_for_warpgroup();  // the last dS has been read
    write_ds(values, group);
    fence_buffer();
    wait_for_warpgroup();
  }

  __device__ __forceinline__ void release(Barrier* empty) const { empty[state.stage].arrive(); }

  // One row block of one query head.
  __device__ __forceinline__ void step(const QStep& at, int i) {
    using namespace cute;
    const int stage = state.stage;
    AccSdP acc_s, acc_dp;
    storage.q_full[stage].wait(state.phase);
    const RowValues lse_rows{storage.lse_log2[stage], coords};
    const EarlyRowValues lse_log2(lse_rows);
    start_scores<Config::kHeadDim>(storage.k[0], storage.q[stage], acc_s);
    storage.do_full[stage].wait(state.phase);
    start_scores<Config::kHeadDimV>(storage.v[0], storage.dout[stage], acc_dp);
    wait_for<1>(acc_s);
    differentiate<true>(at, false, lse_log2, acc_s, acc_dp);
    if constexpr (Config::kAlternateDq) {
      finish_alternating_step(acc_dp, i);
    } else {
      finish_step(at, acc_dp);
    }
  }

  // S, which is complete, becomes P, and dP, which is under way, dS. kStartsDv: dV is under way then.
  template <bool kStartsDv, class LseRows>
  __device__ __forceinline__ void differentiate(const QStep& at, bool is_unmasked, const LseRows& lse_log2,
                                                AccSdP& acc_s, AccSdP& acc_dp) {
    const int stage = state.stage;
    const TileCoords tile_coords{block.batch, at.head, at.row_block * Config::kBlockM, key_begin()};
    auto scores = transposed_row_col_view(acc_s);  // ((2, M / 8), 2)
    auto dp = transposed_row_col_view(acc_dp);
    const RowValues softmax_d{storage.softmax_d[stage], coords};
    if constexpr (Config::kVariant == BwdVariant::kPlain) {
      if (!is_unmasked) mask_scores<Config::kBlockM, 64>(scores, coords, visibility, tile_coords);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      const EarlyRowValues softmax_d_of_rows(softmax_d);
      if constexpr (kStartsDv) start_dkv<Config::kDvCols>(convert<Element>(acc_s), storage.dout[stage], acc_dv);
      wait_for<kStartsDv>(acc_dp);
      differentiate_scores(scores, dp, softmax_d_of_rows);
    } else {
      wait_for<0>(acc_dp);
      const StoredBits bits{storage.dropout_row_bits[stage], storage.dropout_col_bits[stage] + 32 * key_half(), coords};
      differentiate_general<Config::kBlockM, 64, true>(params, visibility, tile_coords, coords, bits, lse_log2,
                                                       softmax_d, scores, dp);
      if constexpr (kStartsDv) start_dkv<Config::kDvCols>(convert<Element>(acc_s), storage.dout[stage], acc_dv);
    }
  }

  // dK, and dQ of the step before if that is this consumer's; dV is under way.
  __device__ __forceinline__ void finish_alternating_step(const AccSdP& acc_ds, int i) {
    const auto ds = convert<Element>(acc_ds);
    store_ds(ds, i == 0);
    start_dkv<Config::kDkCols>(ds, storage.q[state.stage], acc_dk);
    wait_for<0>(acc_dk);
    release_step(state.stage);
    state.advance();
    if (i > 0) compute_own_dq();
  }

  // dQ of the next step, if it is this consumer's.
  __device__ __forceinline__ void compute_own_dq() {
    if (dq_offset.stage == group) {
      AccDq acc_dq;
      compute_dq<Config>(storage, dq_offset, 0, thread, acc_dq);
      stage_dq_tile<Config>(storage, dq_offset, acc_dq, thread);
      __syncwarp();  // wgmma wants whole warps
    }
    dq_offset.advance();
  }

  // dK and dQ; dV is under way. A slice of dQ is added while other products run.
  __device__ __forceinline__ void finish_step(const QStep& at, const AccSdP& acc_ds) {
    const auto ds = convert<Element>(acc_ds);
    exchange_ds(ds);
    AccDq acc_dq;
    start_dq(0, acc_dq);
    start_dkv<Config::kDkCols>(ds, storage.q[state.stage], acc_dk);
    const int64_t tile = dq_tile_index(params, block, at, Config::kBlockM);
    const int seen = is_deterministic() ? dq_semaphore_peek(params.dq_semaphore_ptr + tile) : 0;
    wait_for<1>(acc_dq);
    cute::warpgroup_fence_operand(acc_dv);
    release(storage.do_empty);
    add_dq(at, tile, 0, seen, acc_dq);
    if constexpr (Config::kDqSlices == 2) {
      start_dq(1, acc_dq);
      wait_for<1>(acc_dk);
      release(storage.q_empty);
      wait_for<0>(acc_dq);
      add_dq(at, tile, 1, seen, acc_dq);
    } else {
      wait_for<0>(acc_dk);
      release(storage.q_empty);
    }
    announce_additions();
    state.advance();
  }

  __device__ __forceinline__ bool is_deterministic() const { return params.dq_semaphore_ptr != nullptr; }

  // The bulk copy engine has read what this warp gave it to store.
  __device__ __forceinline__ void wait_for_own_stores() const {
    if (is_first_lane()) cute::tma_store_wait<0>();
    __syncwarp();
  }

  // dK and dV of the block of keys before this one have left the buffers of dS and dQ.
  __device__ __forceinline__ void wait_for_staged_gradients() const {
    wait_for_own_stores();
    if constexpr (Config::kHasDqWarpgroup) {
      wait_for_warpgroup();
    } else {
      wait_for_consumers();
    }
  }

  // A slice of each warp's share. `seen`: the turn counter before the product.
  __device__ __forceinline__ void add_dq(const QStep& at, int64_t tile, int slice, int seen, AccDq& acc_dq) {
    const int warp = 4 * group + thread / 32;
    float* const target = params.dq_accum_ptr + tile * Config::kDqTile + Config::dq_offset(warp, slice);
    if (Config::kDqStaged > 0 && !is_deterministic()) {
      float* const staged = storage.dq + warp * Config::kDqStaged;
      wait_for_own_stores();  // the buffer has been read
      stage_dq(acc_dq, staged, thread % 32);
      fence_buffer();
      __syncwarp();
      if (is_first_lane()) reduce_bulk(target, staged, Config::kDqStaged);
    } else {
      if (is_deterministic() && slice == 0) wait_for_dq_semaphore(at, tile, seen);
      reduce_dq<32>(acc_dq, target, thread % 32);
    }
    __syncwarp();  // wgmma wants whole warps
  }

  __device__ __forceinline__ void wait_for_dq_semaphore(const QStep& at, int64_t tile, int seen) const {
    dq_semaphore_wait(params.dq_semaphore_ptr + tile,
                      dq_semaphore_value(visibility, at.row_block, block.n_block, Config::kBlockM, Config::kBlockN),
                      seen);
  }

  __device__ __forceinline__ bool is_first_lane() const { return thread % 32 == 0; }

  // Additions from registers: tells release_dq_semaphores() that this warp has added in this step. A warp of its own
  // passes the turn, because that waits until memory has taken them.
  __device__ __forceinline__ void announce_additions() const {
    if (!is_deterministic()) return;
    __syncwarp();
    if (is_first_lane()) {
      storage.dq_released[state.stage].wait(state.phase ^ 1);
      storage.dq_added[state.stage].arrive();
    }
    __syncwarp();
  }

  // The other consumer may turn to its scores. Both would otherwise do so at the same time, step after step, and leave
  // the tensor cores idle meanwhile, because they start together and get equal shares.
  __device__ __forceinline__ static void arrive_at_order_barrier(int group) {
    cutlass::arch::NamedBarrier::arrive(Config::kConsumers, kOrderBarrier + 1 - group);
  }
  __device__ __forceinline__ void wait_for_order_barrier() const {
    cutlass::arch::NamedBarrier::sync(Config::kConsumers, kOrderBarrier + group);
  }

  // For whoever computes dQ, who has the fence: there it holds up nobody.
  template <class Values>
  __device__ __forceinline__ void store_ds(const Values& ds, bool is_first) {
    storage.ds_empty[ds_state.stage].wait(ds_state.phase ^ 1);
    if (!Config::kStagesGradients && is_first) wait_for_staged_gradients();
    write_ds(ds, ds_state.stage);
    storage.ds_full[ds_state.stage].arrive();
    ds_state.advance();
  }

  // A step whose rows see none of this consumer's keys.
  __device__ __forceinline__ void store_zero_ds(bool is_first) {
    AccSdP zeros;
    cute::clear(zeros);
    storage.q_full[state.stage].wait(state.phase);
    storage.do_full[state.stage].wait(state.phase);
    wait_for_order_barrier();
    arrive_at_order_barrier(group);
    store_ds(convert<Element>(zeros), is_first);
    release(storage.do_empty);
    release(storage.q_empty);
    state.advance();
  }

  // The steps [begin, end) of the block, the first of them at `at`. S of a step is computed beside dK of the one
  // before.
  __device__ __forceinline__ void run_seen(QStep at, int begin, int end) {
    using namespace cute;
    const RowRange unmasked = unmasked_rows(visibility, key_begin(), key_begin() + 64, Config::kBlockM);
    Element* const keys = storage.k[kv_state.stage];
    Element* const values = storage.v[kv_state.stage];
    AccSdP acc_s;
    storage.q_full[state.stage].wait(state.phase);
    start_scores<Config::kHeadDim>(keys, storage.q[state.stage], acc_s);
    wait_for<0>(acc_s);
    for (int i = begin; i < end; ++i) {
      const int stage = state.stage;
      AccSdP acc_dp;
      storage.do_full[stage].wait(state.phase);
      start_scores<Config::kHeadDimV>(values, storage.dout[stage], acc_dp);
      wait_for_order_barrier();
      differentiate<false>(at, at.row_block >= unmasked.begin && at.row_block < unmasked.end,
                           RowValues{storage.lse_log2[state.stage], coords}, acc_s, acc_dp);
      const auto p = convert<Element>(acc_s), ds = convert<Element>(acc_dp);
      arrive_at_order_barrier(group);
      store_ds(ds, i == 0);
      // Operands in registers hold the warp while other products run: nothing that could run meanwhile is left.
      start_dkv<Config::kDvCols>(p, storage.dout[stage], acc_dv);
      start_dkv<Config::kDkCols>(ds, storage.q[stage], acc_dk);
      state.advance();
      order.advance(at);
      if (i + 1 < end) {
        AccSdP next;
        storage.q_full[state.stage].wait(state.phase);
        start_scores<Config::kHeadDim>(keys, storage.q[state.stage], next);
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

  // dV and dK are complete.
  __device__ __forceinline__ void release_step(int stage) {
    cute::warpgroup_fence_operand(acc_dv);
    storage.do_empty[stage].arrive();
    storage.q_empty[stage].arrive();
  }

  // With a dQ group. Steps of rows that see none of this consumer's keys come first and last.
  __device__ __forceinline__ void run_beside_dq_warpgroup(int count) {
    const RowRange own = row_range(visibility, key_begin() / 64, Config::kBlockM, 64);
    const bool is_seen = own.end > own.begin;
    const int begin = is_seen ? (order.rows.end - own.end) * order.heads : count;
    const int end = is_seen ? count - (own.begin - order.rows.begin) * order.heads : count;
    for (int i = 0; i < begin; ++i) store_zero_ds(i == 0);
    if (is_seen) run_seen({order.first_head, own.end - 1}, begin, end);
    for (int i = end; i < count; ++i) store_zero_ds(false);
    storage.kv_empty[kv_state.stage][group].arrive();
    if constexpr (!Config::kStagesGradients) wait_for_ds_readers();
  }

  // Whoever computes dQ has read all dS of this consumer.
  __device__ __forceinline__ void wait_for_ds_readers() const {
    PipelineState<2> next = ds_state;
    for (int i = 0; i < 2; ++i) {
      storage.ds_empty[next.stage].wait(next.phase ^ 1);
      next.advance();
    }
  }

  // On return both consumers are done with shared memory; with a dQ group this one with its share.
  __device__ __forceinline__ void run() {
    const int count = order.count();
    if (Config::kFreesKeysEarly && count == 0) return;
    const int part = Config::kHasDqWarpgroup ? group : 0;
    storage.k_full[kv_state.stage][part].wait(kv_state.phase);
    storage.v_full[kv_state.stage][part].wait(kv_state.phase);
    if (count == 0) return;  // nothing was loaded
    if constexpr (Config::kHasDqWarpgroup) {
      run_beside_dq_warpgroup(count);
    } else {
      QStep at = order.start();
      for (int i = 0; i < count; ++i) {
        step(at, i);
        order.advance(at);
      }
      if constexpr (Config::kAlternateDq) {
        compute_own_dq();
        storage.kv_empty[0][0].arrive();
        wait_for_ds_readers();
        wait_for_dq_buffer<Config>(storage, ds_state);
      } else {
        if constexpr (Config::kDqStaged > 0) wait_for_own_stores();  // the additions have left the buffer of dQ
        wait_for_consumers();
      }
    }
  }
};

}  // namespace sm90
}  // namespace flash
