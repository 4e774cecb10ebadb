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
#include "kernels/common/dq_tile.h"
#include "kernels/common/dq_turns.h"
#include "kernels/sm90/bwd_dq.h"
#include "kernels/sm90/bwd_storage.h"
#include "kernels/sm90/gemm.h"
#include "kernels/tma/bulk_reduce.h"
#include "kernels/tma/swizzle.h"

namespace flash {
namespace sm90 {

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
      Config::kVariant == BwdVariant::kPlain && Config::kSplitsKeys && !Config::kHasDqGroup;
  using EarlyRowValues = std::conditional_t<kLoadsRowValues, LoadedRowValues, RowValues>;

  // From which dropout draws.
  struct StoredWords {
    const DropoutWords* rows;
    const DropoutWords* pairs;
    const Coords& coords;

    __device__ __forceinline__ DropoutWords row(int mi) const { return rows[coords.row(mi)]; }
    __device__ __forceinline__ DropoutWords column_pair(int ni) const { return pairs[coords.col(ni) / 2]; }
  };

  const BwdLaunch& launch;
  const Flash_bwd_params& params;
  Storage& storage;
  const KeyBlock& block;
  const int group;   // of the consumers
  const int thread;  // of the warpgroup
  const Visibility visibility;
  const RowWalk walk;
  const Coords coords;  // rows are queries of the row block, columns keys of this warpgroup
  RingIndex<Config::kStages> place;
  RingIndex<Config::kKvStages> kv_place;
  RingIndex<2> left_place;  // of dS
  RingIndex<2> dq_place;    // of the first dS whose dQ is to be computed

  AccDkv<Config::kDkCols> acc_dk;
  AccDkv<Config::kDvCols> acc_dv;

  __device__ __forceinline__ BwdMainloop(const BwdLaunch& launch_, Storage& storage_, const KeyBlock& block_,
                                         int group_, RingIndex<Config::kStages> place_,
                                         RingIndex<Config::kKvStages> kv_place_, RingIndex<2> left_place_)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        block(block_),
        group(group_),
        thread(threadIdx.x % 128),
        visibility{block_.seqlen_q, block_.seqlen_k, launch_.params.window},
        walk(row_walk(launch_.params, block_, Config::kBlockM, Config::kBlockN)),
        coords{AccumulatorCoords<4>(threadIdx.x % 128)},
        place(place_),
        kv_place(kv_place_),
        left_place(left_place_),
        dq_place(left_place_) {
    cute::clear(acc_dk);
    cute::clear(acc_dv);
  }

  // Which of the shares of keys and of columns of K, V and their gradients is this warpgroup's.
  __device__ __forceinline__ int key_share() const { return Config::kSplitsKeys ? group : 0; }
  __device__ __forceinline__ int column_share() const { return Config::kSplitsKeys ? 0 : group; }
  __device__ __forceinline__ int key_begin() const { return block.n_block * Config::kBlockN + 64 * key_share(); }

  // acc (64, N) = or += A B, both in shared memory: started, not waited for.
  template <class Mma, class SmemA, class SmemB, class Acc>
  __device__ __forceinline__ void start(Mma mma, const SmemA& a, const SmemB& b, Acc& acc) const {
    const auto slice = mma.get_slice(thread);
    start_gemm(mma, slice.partition_fragment_A(a), slice.partition_fragment_B(b), acc, true);
  }

  // kCols columns of this warpgroup's 64 rows in a tile of the block's keys.
  template <int kCols>
  __device__ __forceinline__ auto own_keys(Element* tile, int column_share) const {
    using namespace cute;
    return local_tile(make_tensor(make_smem_ptr(tile), typename Config::SmemLayoutKv{}), Shape<_64, Int<kCols>>{},
                      make_coord(key_share(), column_share));
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
                                 Shape<Int<kCols>, Int<Config::kBlockM>>{}, make_coord(column_share(), _0{}));
    start_gemm(mma, a, mma.get_slice(thread).partition_fragment_B(cols), acc, false);
  }

  // A slice of this warpgroup's share of dQ = dS K.
  __device__ __forceinline__ void start_dq(int slice, AccDq& acc_dq) const {
    using namespace cute;
    const auto ds = make_tensor(make_smem_ptr(storage.ds[group]), typename Config::SmemLayoutDs{});  // (M, N)
    const auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutKt{});        // (D, N)
    const auto cols = local_tile(k, Shape<Int<Config::kDqCols>, Int<Config::kBlockN>>{},
                                 make_coord(Config::dq_column_share(group, slice), _0{}));
    start(typename Config::MmaDq{}, ds, cols, acc_dq);
  }

  // dS^T of this warp's 16 keys, transposed, into rows of queries: a piece is 8 keys of one query, 8 pieces a matrix.
  // Rows that are 16 apart are swizzled alike. The wgmma that reads it is of the async proxy: a fence has to follow.
  template <class Values>
  __device__ __forceinline__ void write_ds(const Values& values, int buffer) const {
    constexpr int kChunk = Config::kChunkCols;
    const int lane = thread % 32, row = lane / 16 * 8 + lane % 8;
    const int key = 64 * key_share() + thread / 32 * 16 + lane / 8 % 2 * kPieceCols;
    Element* const first = storage.ds[buffer] + key / kChunk * Config::kBlockM * kChunk +
                           piece_place(kChunk, row, key % kChunk / kPieceCols);
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
  static constexpr uint32_t kConsumerBarrier = 1, kTokenBarrier = kConsumerBarrier + 3;

  // For consumers with the same keys, each of which has a dS of its own: puts it into shared memory and waits until it
  // is whole.
  template <class Values>
  __device__ __forceinline__ void exchange_ds(const Values& values) const {
    wait_for_warpgroup();  // the last dS has been read
    write_ds(values, group);
    fence_buffer();
    wait_for_warpgroup();
  }

  __device__ __forceinline__ void release(Barrier* empty) const { empty[place.stage].arrive(); }

  // One row block of one query head.
  __device__ __forceinline__ void step(const RowStep& at, int i) {
    using namespace cute;
    const int stage = place.stage;
    AccSdP acc_s, acc_dp;
    storage.q_full[stage].wait(place.phase);
    const RowValues lse_rows{storage.lse_log2[stage], coords};
    const EarlyRowValues lse_log2(lse_rows);
    start_scores<Config::kHeadDim>(storage.k[0], storage.q[stage], acc_s);
    storage.do_full[stage].wait(place.phase);
    start_scores<Config::kHeadDimV>(storage.v[0], storage.dout[stage], acc_dp);
    wait_for<1>(acc_s);
    differentiate<true>(at, false, lse_log2, acc_s, acc_dp);
    if constexpr (Config::kAlternatesDq) {
      finish_alternating_step(acc_dp, i);
    } else {
      finish_step(at, acc_dp);
    }
  }

  // S, which is complete, becomes P, and dP, which is under way, dS. kStartsDv: dV is under way then.
  template <bool kStartsDv, class LseRows>
  __device__ __forceinline__ void differentiate(const RowStep& at, bool is_interior, const LseRows& lse_log2,
                                                AccSdP& acc_s, AccSdP& acc_dp) {
    const int stage = place.stage;
    const ScorePlace score_place{block.batch, at.head, at.row_block * Config::kBlockM, key_begin()};
    auto scores = transposed_row_col_view(acc_s);  // ((2, M / 8), 2)
    auto dp = transposed_row_col_view(acc_dp);
    const RowValues softmax_d{storage.softmax_d[stage], coords};
    if constexpr (Config::kVariant == BwdVariant::kPlain) {
      if (!is_interior) mask_scores<Config::kBlockM, 64>(scores, coords, visibility, score_place);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      const EarlyRowValues softmax_d_of_rows(softmax_d);
      if constexpr (kStartsDv) start_dkv<Config::kDvCols>(convert<Element>(acc_s), storage.dout[stage], acc_dv);
      wait_for<kStartsDv>(acc_dp);
      differentiate_scores(scores, dp, softmax_d_of_rows);
    } else {
      wait_for<0>(acc_dp);
      const StoredWords words{storage.dropout_rows[stage], storage.dropout_pairs[stage] + 32 * key_share(), coords};
      differentiate_general<Config::kBlockM, 64, true>(params, visibility, score_place, coords, words, lse_log2,
                                                       softmax_d, scores, dp);
      if constexpr (kStartsDv) start_dkv<Config::kDvCols>(convert<Element>(acc_s), storage.dout[stage], acc_dv);
    }
  }

  // dK, and dQ of the step before if that is this consumer's; dV is under way.
  __device__ __forceinline__ void finish_alternating_step(const AccSdP& acc_ds, int i) {
    const auto ds = convert<Element>(acc_ds);
    leave_ds(ds, i == 0);
    start_dkv<Config::kDkCols>(ds, storage.q[place.stage], acc_dk);
    wait_for<0>(acc_dk);
    release_step(place.stage);
    place.advance();
    if (i > 0) take_dq();
  }

  // dQ of the next step, if it is this consumer's.
  __device__ __forceinline__ void take_dq() {
    if (dq_place.stage == group) {
      AccDq acc_dq;
      compute_dq<Config>(storage, dq_place, 0, thread, acc_dq);
      leave_dq<Config>(storage, dq_place, acc_dq, thread);
      __syncwarp();  // wgmma wants whole warps
    }
    dq_place.advance();
  }

  // dK and dQ; dV is under way. A slice of dQ is added while other products run.
  __device__ __forceinline__ void finish_step(const RowStep& at, const AccSdP& acc_ds) {
    const auto ds = convert<Element>(acc_ds);
    exchange_ds(ds);
    AccDq acc_dq;
    start_dq(0, acc_dq);
    start_dkv<Config::kDkCols>(ds, storage.q[place.stage], acc_dk);
    const int64_t tile = dq_tile_index(params, block, at, Config::kBlockM);
    const int seen = is_deterministic() ? peek_turn(params.dq_turns_ptr + tile) : 0;
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
    place.advance();
  }

  __device__ __forceinline__ bool is_deterministic() const { return params.dq_turns_ptr != nullptr; }

  // The bulk copy engine has read what this warp gave it to store.
  __device__ __forceinline__ void wait_for_own_stores() const {
    if (is_first_lane()) cute::tma_store_wait<0>();
    __syncwarp();
  }

  // dK and dV of the block of keys before this one have left the buffers of dS and dQ.
  __device__ __forceinline__ void wait_for_staged_gradients() const {
    wait_for_own_stores();
    if constexpr (Config::kHasDqGroup) {
      wait_for_warpgroup();
    } else {
      wait_for_consumers();
    }
  }

  // A slice of each warp's share. `seen`: the turn counter before the product.
  __device__ __forceinline__ void add_dq(const RowStep& at, int64_t tile, int slice, int seen, AccDq& acc_dq) {
    const int warp = 4 * group + thread / 32;
    float* const target = params.dq_accum_ptr + tile * Config::kDqTile + Config::dq_place(warp, slice);
    if (Config::kDqStaged > 0 && !is_deterministic()) {
      float* const staged = storage.dq + warp * Config::kDqStaged;
      wait_for_own_stores();  // the buffer has been read
      stage_dq(acc_dq, staged, thread % 32);
      fence_buffer();
      __syncwarp();
      if (is_first_lane()) reduce_bulk(target, staged, Config::kDqStaged);
    } else {
      if (is_deterministic() && slice == 0) wait_for_turn_at(at, tile, seen);
      reduce_dq<32>(acc_dq, target, thread % 32);
    }
    __syncwarp();  // wgmma wants whole warps
  }

  __device__ __forceinline__ void wait_for_turn_at(const RowStep& at, int64_t tile, int seen) const {
    wait_for_turn(params.dq_turns_ptr + tile,
                  dq_turn(visibility, at.row_block, block.n_block, Config::kBlockM, Config::kBlockN), seen);
  }

  __device__ __forceinline__ bool is_first_lane() const { return thread % 32 == 0; }

  // Additions from registers: tells pass_turns() that this warp has added in this step. A warp of its own passes the
  // turn, because that waits until memory has taken them.
  __device__ __forceinline__ void announce_additions() const {
    if (!is_deterministic()) return;
    __syncwarp();
    if (is_first_lane()) {
      storage.turn_passed[place.stage].wait(place.phase ^ 1);
      storage.turn_added[place.stage].arrive();
    }
    __syncwarp();
  }

  // The other consumer may turn to its scores. Both would otherwise do so at the same time, step after step, and leave
  // the tensor cores idle meanwhile, because they start together and get equal shares.
  __device__ __forceinline__ static void pass_token(int group) {
    cutlass::arch::NamedBarrier::arrive(Config::kConsumers, kTokenBarrier + 1 - group);
  }
  __device__ __forceinline__ void wait_for_token() const {
    cutlass::arch::NamedBarrier::sync(Config::kConsumers, kTokenBarrier + group);
  }

  // For whoever computes dQ, who has the fence: there it holds up nobody.
  template <class Values>
  __device__ __forceinline__ void leave_ds(const Values& ds, bool is_first) {
    storage.ds_empty[left_place.stage].wait(left_place.phase ^ 1);
    if (!Config::kStagesGradients && is_first) wait_for_staged_gradients();
    write_ds(ds, left_place.stage);
    storage.ds_full[left_place.stage].arrive();
    left_place.advance();
  }

  // A step whose rows see none of this consumer's keys.
  __device__ __forceinline__ void leave_zeros(bool is_first) {
    AccSdP zeros;
    cute::clear(zeros);
    storage.q_full[place.stage].wait(place.phase);
    storage.do_full[place.stage].wait(place.phase);
    wait_for_token();
    pass_token(group);
    leave_ds(convert<Element>(zeros), is_first);
    release(storage.do_empty);
    release(storage.q_empty);
    place.advance();
  }

  // The steps [begin, end) of the block, the first of them at `at`. S of a step is computed beside dK of the one
  // before.
  __device__ __forceinline__ void run_seen(RowStep at, int begin, int end) {
    using namespace cute;
    const RowRange interior = interior_rows(visibility, key_begin(), key_begin() + 64, Config::kBlockM);
    Element* const keys = storage.k[kv_place.stage];
    Element* const values = storage.v[kv_place.stage];
    AccSdP acc_s;
    storage.q_full[place.stage].wait(place.phase);
    start_scores<Config::kHeadDim>(keys, storage.q[place.stage], acc_s);
    wait_for<0>(acc_s);
    for (int i = begin; i < end; ++i) {
      const int stage = place.stage;
      AccSdP acc_dp;
      storage.do_full[stage].wait(place.phase);
      start_scores<Config::kHeadDimV>(values, storage.dout[stage], acc_dp);
      wait_for_token();
      differentiate<false>(at, at.row_block >= interior.begin && at.row_block < interior.end,
                           RowValues{storage.lse_log2[place.stage], coords}, acc_s, acc_dp);
      const auto p = convert<Element>(acc_s), ds = convert<Element>(acc_dp);
      pass_token(group);
      leave_ds(ds, i == 0);
      // Operands in registers hold the warp while other products run: nothing that could run meanwhile is left.
      start_dkv<Config::kDvCols>(p, storage.dout[stage], acc_dv);
      start_dkv<Config::kDkCols>(ds, storage.q[stage], acc_dk);
      place.advance();
      walk.advance(at);
      if (i + 1 < end) {
        AccSdP next;
        storage.q_full[place.stage].wait(place.phase);
        start_scores<Config::kHeadDim>(keys, storage.q[place.stage], next);
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
  __device__ __forceinline__ void run_beside_dq_group(int count) {
    const RowRange own = row_range(visibility, key_begin() / 64, Config::kBlockM, 64);
    const bool is_seen = own.end > own.begin;
    const int begin = is_seen ? (walk.rows.end - own.end) * walk.heads : count;
    const int end = is_seen ? count - (own.begin - walk.rows.begin) * walk.heads : count;
    for (int i = 0; i < begin; ++i) leave_zeros(i == 0);
    if (is_seen) run_seen({walk.first_head, own.end - 1}, begin, end);
    for (int i = end; i < count; ++i) leave_zeros(false);
    storage.kv_empty[kv_place.stage][group].arrive();
    if constexpr (!Config::kStagesGradients) wait_for_ds_readers();
  }

  // Whoever computes dQ has read all dS of this consumer.
  __device__ __forceinline__ void wait_for_ds_readers() const {
    RingIndex<2> next = left_place;
    for (int i = 0; i < 2; ++i) {
      storage.ds_empty[next.stage].wait(next.phase ^ 1);
      next.advance();
    }
  }

  // On return both consumers are done with shared memory; with a dQ group this one with its share.
  __device__ __forceinline__ void run() {
    const int count = walk.count();
    if (Config::kFreesKeysEarly && count == 0) return;
    const int part = Config::kHasDqGroup ? group : 0;
    storage.k_full[kv_place.stage][part].wait(kv_place.phase);
    storage.v_full[kv_place.stage][part].wait(kv_place.phase);
    if (count == 0) return;  // nothing was loaded
    if constexpr (Config::kHasDqGroup) {
      run_beside_dq_group(count);
    } else {
      RowStep at = walk.start();
      for (int i = 0; i < count; ++i) {
        step(at, i);
        walk.advance(at);
      }
      if constexpr (Config::kAlternatesDq) {
        take_dq();
        storage.kv_empty[0][0].arrive();
        wait_for_ds_readers();
        wait_for_dq_buffer<Config>(storage, left_place);
      } else {
        if constexpr (Config::kDqStaged > 0) wait_for_own_stores();  // the additions have left the buffer of dQ
        wait_for_consumers();
      }
    }
  }
};

}  // namespace sm90
}  // namespace flash
