// The computing side of the wgmma backward: one warpgroup with 64 keys of the block, which meet every row block that
// sees them, for all query heads of their K/V head, and all columns of dK and dV or half of them. These stay in
// registers over the whole loop; dQ is reduced into fp32 tiles in global memory. Gradients by recomputation from the
// LSE: Dao et al. 2022, appendix B.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "common/bwd_schedule.h"
#include "common/differentiate.h"
#include "common/dq_tile.h"
#include "common/dq_turns.h"
#include "sm90/bulk_reduce.h"
#include "sm90/bwd_storage.h"
#include "sm90/gemm.h"

namespace flash {
namespace sm90 {

template <class Config>
struct BwdMainloop {
  using Element = typename Config::Element;
  using Storage = BwdStorage<Config>;
  template <class Mma, int kCols>
  using Accumulator = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::Int<kCols>>{}));
  using AccSdP = Accumulator<typename Config::MmaSdP, Config::kBlockM>;   // ((2, 2, M / 8), 1, 1)
  using AccDkv = Accumulator<typename Config::MmaDkv, Config::kDkvCols>;  // ((2, 2, columns / 8), 1, 1)
  using AccDq = Accumulator<typename Config::MmaDq, Config::kDqCols>;     // a slice
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

  const Flash_bwd_params& params;
  Storage& storage;
  const KeyBlock& block;
  const int group;   // of the consumers
  const int thread;  // of the warpgroup
  const Visibility visibility;
  const RowWalk walk;
  const Coords coords;  // rows are queries of the row block, columns keys of this warpgroup
  RingIndex<Config::kStages> place;

  AccDkv acc_dk, acc_dv;

  __device__ __forceinline__ BwdMainloop(const Flash_bwd_params& params_, Storage& storage_, const KeyBlock& block_,
                                         int group_)
      : params(params_),
        storage(storage_),
        block(block_),
        group(group_),
        thread(threadIdx.x % 128),
        visibility{block_.seqlen_q, block_.seqlen_k, params_.window},
        walk(row_walk(params_, block_, Config::kBlockM, Config::kBlockN)),
        coords{AccumulatorCoords<4>(threadIdx.x % 128)} {
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

  // S^T or dP^T of the row block in `tile`.
  __device__ __forceinline__ void start_scores(Element* keys, Element* tile, AccSdP& acc) const {
    using namespace cute;
    start(typename Config::MmaSdP{}, own_keys<Config::kHeadDim>(keys, 0),
          make_tensor(make_smem_ptr(tile), typename Config::SmemLayoutQ{}), acc);
  }

  // dV += P^T dO or dK += dS^T Q, this warpgroup's columns.
  template <class Values>
  __device__ __forceinline__ void start_dkv(const Values& values, Element* tile, AccDkv& acc) const {
    using namespace cute;
    typename Config::MmaDkv mma;
    const auto a = make_tensor(values.data(), LayoutP{});
    const auto cols =
        local_tile(make_tensor(make_smem_ptr(tile), typename Config::SmemLayoutQt{}),  // (D, M)
                   Shape<Int<Config::kDkvCols>, Int<Config::kBlockM>>{}, make_coord(column_share(), _0{}));
    start_gemm(mma, a, mma.get_slice(thread).partition_fragment_B(cols), acc, false);
  }

  // A slice of this warpgroup's share of dQ = dS K.
  __device__ __forceinline__ void start_dq(int buffer, int slice, AccDq& acc_dq) const {
    using namespace cute;
    const auto ds = make_tensor(make_smem_ptr(storage.ds[buffer]), typename Config::SmemLayoutDs{});  // (M, N)
    const auto k = make_tensor(make_smem_ptr(storage.k), typename Config::SmemLayoutKt{});            // (D, N)
    const auto rows = local_tile(ds, Shape<_64, Int<Config::kBlockN>>{}, make_coord(Config::dq_row_share(group), _0{}));
    const auto cols = local_tile(k, Shape<Int<Config::kDqCols>, Int<Config::kBlockN>>{},
                                 make_coord(Config::dq_column_share(group, slice), _0{}));
    start(typename Config::MmaDq{}, rows, cols, acc_dq);
  }

  template <class Values>
  __device__ __forceinline__ void write_ds(const Values& values, int buffer) const {
    using namespace cute;
    using Store = Copy_Atom<SM90_U16x8_STSM_T, Element>;
    auto ds = local_tile(make_tensor(make_smem_ptr(storage.ds[buffer]), typename Config::SmemLayoutDst{}),
                         Shape<_64, Int<Config::kBlockM>>{}, make_coord(key_share(), _0{}));
    const auto store = make_tiled_copy_C(Store{}, typename Config::MmaSdP{}).get_thread_slice(thread);
    copy(Store{}, store.retile_S(values), store.partition_D(ds));
    tma_store_fence();  // the wgmma that reads it is of the async proxy
  }

  __device__ __forceinline__ static void wait_for_consumers() {
    cutlass::arch::NamedBarrier::sync(Config::kConsumers, kConsumerBarrier);
  }
  __device__ __forceinline__ void wait_for_warpgroup() const {
    cutlass::arch::NamedBarrier::sync(128, kConsumerBarrier + 1 + group);
  }
  static constexpr uint32_t kConsumerBarrier = 1;  // 0 is __syncthreads()

  // Puts dS where all that need it find it, and waits until it is whole. Returns the buffer. Consumers with the same
  // keys do not wait for each other.
  template <class Values>
  __device__ __forceinline__ int exchange_ds(const Values& values, int i) const {
    if constexpr (!Config::kSplitsKeys) wait_for_warpgroup();  // the last dS has been read
    const int buffer = Config::kSplitsKeys ? i % 2 : group;
    write_ds(values, buffer);
    if (Config::kDqStaged > 0 && i > 0) announce_additions(i - 1);
    if constexpr (Config::kSplitsKeys) {
      wait_for_consumers();
    } else {
      wait_for_warpgroup();
    }
    return buffer;
  }

  __device__ __forceinline__ void release(Barrier* empty) const { empty[place.stage].arrive(); }

  // One row block of one query head.
  __device__ __forceinline__ void step(const RowStep& at, int i) {
    using namespace cute;
    const int stage = place.stage;
    AccSdP acc_s, acc_dp;
    storage.q_full[stage].wait(place.phase);
    start_scores(storage.k, storage.q[stage], acc_s);
    storage.do_full[stage].wait(place.phase);
    start_scores(storage.v, storage.dout[stage], acc_dp);
    const ScorePlace score_place{block.batch, at.head, at.row_block * Config::kBlockM, key_begin()};
    wait_for<1>(acc_s);
    auto scores = transposed_row_col_view(acc_s);  // ((2, M / 8), 2)
    auto dp = transposed_row_col_view(acc_dp);
    const RowValues lse_log2{storage.lse_log2[stage], coords}, softmax_d{storage.softmax_d[stage], coords};
    if constexpr (Config::kVariant == BwdVariant::kPlain) {
      mask_scores<Config::kBlockM, 64>(scores, coords, visibility, score_place);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      const auto p = convert<Element>(acc_s);
      start_dkv(p, storage.dout[stage], acc_dv);
      wait_for<1>(acc_dp);
      differentiate_scores(scores, dp, softmax_d);
      finish_step(at, acc_dp, i);
    } else {
      wait_for<0>(acc_dp);
      differentiate_general<Config::kBlockM, 64, true>(params, visibility, score_place, coords, lse_log2, softmax_d,
                                                       scores, dp);
      const auto p = convert<Element>(acc_s);
      start_dkv(p, storage.dout[stage], acc_dv);
      finish_step(at, acc_dp, i);
    }
  }

  // dK and dQ; dV is under way. A slice of dQ is added while other products run.
  __device__ __forceinline__ void finish_step(const RowStep& at, const AccSdP& acc_ds, int i) {
    const auto ds = convert<Element>(acc_ds);
    const int buffer = exchange_ds(ds, i);
    AccDq acc_dq;
    start_dq(buffer, 0, acc_dq);
    start_dkv(ds, storage.q[place.stage], acc_dk);
    const int64_t tile = dq_tile_index(params, block, at, Config::kBlockM);
    const int seen = is_deterministic() ? peek_turn(params.dq_turns_ptr + tile) : 0;
    wait_for<1>(acc_dq);
    cute::warpgroup_fence_operand(acc_dv);
    release(storage.do_empty);
    add_dq(at, tile, 0, seen, acc_dq);
    if constexpr (Config::kDqSlices == 2) {
      start_dq(buffer, 1, acc_dq);
      wait_for<1>(acc_dk);
      release(storage.q_empty);
      wait_for<0>(acc_dq);
      add_dq(at, tile, 1, seen, acc_dq);
      announce_additions(i);
    } else {
      wait_for<0>(acc_dk);
      release(storage.q_empty);
    }
    place.advance();
  }

  __device__ __forceinline__ bool is_deterministic() const { return params.dq_turns_ptr != nullptr; }

  // A slice of each warp's share. `seen`: the turn counter before the product.
  __device__ __forceinline__ void add_dq(const RowStep& at, int64_t tile, int slice, int seen,
                                         const AccDq& acc_dq) const {
    const int warp = 4 * group + thread / 32;
    float* const target = params.dq_accum_ptr + tile * Config::kDqTile + Config::dq_place(warp, slice);
    if constexpr (Config::kDqStaged > 0) {
      float* const staged = storage.dq[warp];
      if (is_first_lane()) cute::tma_store_wait<0>();  // the buffer has been read
      __syncwarp();
      stage_dq(acc_dq, staged, thread % 32);
      fence_buffer();
      __syncwarp();
      if (is_first_lane()) {
        if (is_deterministic()) {
          wait_for_turn_at(at, tile, seen);
          fence_before_additions();
        }
        reduce_bulk(target, staged, Config::kDqStaged);
      }
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

  // Deterministic: tells pass_turns() that this warp has added in step i (the bulk copy engine: that it is done). A
  // warp of its own passes the turn, because that waits until memory has taken all additions.
  __device__ __forceinline__ void announce_additions(int i) const {
    if (!is_deterministic()) return;
    __syncwarp();
    if (is_first_lane()) {
      if (Config::kDqStaged > 0) wait_for_additions();
      storage.turn_passed[i % 2].wait((i / 2 % 2) ^ 1);
      storage.turn_added[i % 2].arrive();
    }
    __syncwarp();
  }

  // On return both consumers are done with shared memory.
  __device__ __forceinline__ void run() {
    const int count = walk.count();
    if (count == 0) return;
    storage.k_full.wait(0);
    storage.v_full.wait(0);
    RowStep at = walk.start();
    for (int i = 0; i < count; ++i) {
      step(at, i);
      walk.advance(at);
    }
    if (Config::kDqStaged > 0) announce_additions(count - 1);
    wait_for_consumers();
  }
};

}  // namespace sm90
}  // namespace flash
