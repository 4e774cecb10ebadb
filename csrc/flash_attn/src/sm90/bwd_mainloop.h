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
#include "sm90/tile_place.h"

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

  // From which dropout draws.
  struct StoredWords {
    const uint64_t* rows;
    const uint32_t* pairs;
    const Coords& coords;

    __device__ __forceinline__ uint64_t row(int mi) const { return rows[coords.row(mi)]; }
    __device__ __forceinline__ uint32_t column_pair(int ni) const { return pairs[coords.col(ni) / 2]; }
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
  uint32_t kv_phase;

  AccDkv<Config::kDkCols> acc_dk;
  AccDkv<Config::kDvCols> acc_dv;

  __device__ __forceinline__ BwdMainloop(const BwdLaunch& launch_, Storage& storage_, const KeyBlock& block_,
                                         int group_, RingIndex<Config::kStages> place_ = {}, uint32_t kv_phase_ = 0)
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
        kv_phase(kv_phase_) {
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
  __device__ __forceinline__ void start_dq(int buffer, int slice, AccDq& acc_dq) const {
    using namespace cute;
    const auto ds = make_tensor(make_smem_ptr(storage.ds[buffer]), typename Config::SmemLayoutDs{});  // (M, N)
    const auto k = make_tensor(make_smem_ptr(storage.k), typename Config::SmemLayoutKt{});            // (D, N)
    const int keys = Config::kKeepsDq ? group : 0;
    const auto rows = local_tile(ds, Shape<_64, Int<Config::kDqKeys>>{}, make_coord(Config::dq_row_share(group), keys));
    const auto cols = local_tile(k, Shape<Int<Config::kDqCols>, Int<Config::kDqKeys>>{},
                                 make_coord(Config::dq_column_share(group, slice), keys));
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

  // Waits for those whose dS this consumer reads.
  __device__ __forceinline__ void wait_for_sharers() const {
    if constexpr (Config::kKeepsDq) {
      wait_for_warpgroup();
    } else {
      wait_for_consumers();
    }
  }

  // Puts dS where all that need it find it, and waits until it is whole. Returns the buffer. Consumers with the same
  // keys do not wait for each other.
  template <class Values>
  __device__ __forceinline__ int exchange_ds(const Values& values, const RowStep& at, int i) const {
    if constexpr (Config::kFreesKeysEarly) {
      if (i == 0) wait_for_staged_gradients();
    }
    if constexpr (!Config::kSplitsKeys) wait_for_warpgroup();  // the last dS has been read
    const int buffer = Config::kSplitsKeys ? i % 2 : group;
    write_ds(values, buffer);
    if constexpr (Config::kSplitsKeys) {
      if (i > 0) complete_additions();
      wait_for_sharers();
      if (i > 0) pass_turn_of(walk.before(at));
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
    start_scores<Config::kHeadDim>(storage.k, storage.q[stage], acc_s);
    storage.do_full[stage].wait(place.phase);
    start_scores<Config::kHeadDimV>(storage.v, storage.dout[stage], acc_dp);
    const ScorePlace score_place{block.batch, at.head, at.row_block * Config::kBlockM, key_begin()};
    wait_for<1>(acc_s);
    auto scores = transposed_row_col_view(acc_s);  // ((2, M / 8), 2)
    auto dp = transposed_row_col_view(acc_dp);
    const RowValues lse_log2{storage.lse_log2[stage], coords}, softmax_d{storage.softmax_d[stage], coords};
    if constexpr (Config::kVariant == BwdVariant::kPlain) {
      mask_scores<Config::kBlockM, 64>(scores, coords, visibility, score_place);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      const auto p = convert<Element>(acc_s);
      start_dkv<Config::kDvCols>(p, storage.dout[stage], acc_dv);
      wait_for<1>(acc_dp);
      differentiate_scores(scores, dp, softmax_d);
      finish_step(at, acc_dp, i);
    } else {
      wait_for<0>(acc_dp);
      const StoredWords words{storage.dropout_rows[stage], storage.dropout_pairs[stage] + 32 * key_share(), coords};
      differentiate_general<Config::kBlockM, 64, true>(params, visibility, score_place, coords, words, lse_log2,
                                                       softmax_d, scores, dp);
      const auto p = convert<Element>(acc_s);
      start_dkv<Config::kDvCols>(p, storage.dout[stage], acc_dv);
      finish_step(at, acc_dp, i);
    }
  }

  // dK and dQ; dV is under way. A slice of dQ is added while other products run.
  __device__ __forceinline__ void finish_step(const RowStep& at, const AccSdP& acc_ds, int i) {
    const auto ds = convert<Element>(acc_ds);
    const int buffer = exchange_ds(ds, at, i);
    AccDq acc_dq;
    start_dq(buffer, 0, acc_dq);
    start_dkv<Config::kDkCols>(ds, storage.q[place.stage], acc_dk);
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
    } else {
      wait_for<0>(acc_dk);
      release(storage.q_empty);
    }
    if constexpr (!Config::kSplitsKeys) announce_additions();
    place.advance();
  }

  // Consumers with the same keys have no barrier behind which their turn could be passed: they add from registers.
  __device__ __forceinline__ bool stages_dq() const {
    return Config::kDqStaged > 0 && (Config::kSplitsKeys || !is_deterministic());
  }

  // With dQ in shared memory a thread block adds alone.
  __device__ __forceinline__ bool is_deterministic() const {
    return !Config::kKeepsDq && params.dq_turns_ptr != nullptr;
  }

  // The bulk copy engine has read what this warp gave it to store.
  __device__ __forceinline__ void wait_for_own_stores() const {
    if (is_first_lane()) cute::tma_store_wait<0>();
    __syncwarp();
  }

  // dK and dV of the block of keys before this one have left the buffers of dS and dQ.
  __device__ __forceinline__ void wait_for_staged_gradients() const {
    wait_for_own_stores();
    wait_for_sharers();
  }

  __device__ __forceinline__ BlockRange key_blocks_of(int row_block) const {
    const int row_begin = row_block * Config::kBlockM;
    return block_range(visibility, row_begin, min(row_begin + Config::kBlockM, block.seqlen_q), Config::kBlockN);
  }

  __device__ __forceinline__ bool is_last_consumer() const { return group == Config::kWarpGroups - 1; }

  // The floats of a tile of dQ in shared memory that this warp and the same one of the other consumer add to: 16 rows.
  __device__ __forceinline__ float* own_dq(int row_block) const {
    return storage.dq + row_block * Config::kDqTile + Config::dq_place(thread / 32, 0);
  }

  // Adds to dQ in shared memory, the consumers one after the other. The first one finds nothing there at the first
  // block of keys that the rows see; the last one sends dQ off at the last. The first one adds to the same rows again
  // two steps later at the earliest (see run()), when the last one has released a stage since.
  __device__ __forceinline__ void keep_dq(const RowStep& at, AccDq& acc_dq) const {
    const BlockRange keys = key_blocks_of(at.row_block);
    float* const own = own_dq(at.row_block);
    if (is_last_consumer()) storage.dq_added[place.stage].wait(place.phase);
    if (is_last_consumer() || block.n_block != keys.begin) add_staged_dq(acc_dq, own, thread % 32);
    if (is_last_consumer() && block.n_block == keys.end - 1) {
      send_dq(at, acc_dq);
    } else {
      stage_dq(acc_dq, own, thread % 32);
    }
    if (!is_last_consumer()) storage.dq_added[place.stage].arrive();
  }

  // 16 rows of dQ as Elements, through the place of this warp's floats.
  __device__ __forceinline__ void send_dq(const RowStep& at, AccDq& acc_dq) const {
    using namespace cute;
    static_assert(Config::kHeadDim == Config::kChunkCols && Config::kBlockM == 64, "rows of 128 bytes, 16 of them");
    const int lane = thread % 32;
#pragma unroll
    for (int i = 0; i < size(acc_dq); ++i) acc_dq(i) *= params.scale_softmax;
    const auto values = convert<Element>(acc_dq);
    const auto pairs = recast<uint32_t>(values);
    Element* const rows = reinterpret_cast<Element*>(own_dq(at.row_block));
    __syncwarp();  // all lanes have read their floats
#pragma unroll
    for (int i = 0; i < size(pairs); i += 4) {
      Element* const piece = rows + piece_place(Config::kHeadDim, lane % 16, i / 2 + lane / 16);
      SM90_U32x4_STSM_N::copy(pairs(i), pairs(i + 1), pairs(i + 2), pairs(i + 3), *reinterpret_cast<uint128_t*>(piece));
    }
    tma_store_fence();
    __syncwarp();
    if (is_first_lane()) {
      SM90_TMA_STORE_5D::copy(&launch.dq_map, rows, 0, at.row_block * Config::kBlockM + thread / 32 * 16, at.head,
                              block.batch, 0);
      tma_store_arrive();
    }
    __syncwarp();
  }

  // At the first block of keys of a head: dQ of the head before has left shared memory, and that of rows that see no
  // keys is 0.
  __device__ __forceinline__ void start_head() const {
    wait_for_own_stores();
    wait_for_consumers();
    if (!is_last_consumer()) return;
    const int row_blocks = (block.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
    for (int row_block = 0; row_block < row_blocks; ++row_block) {
      if (key_blocks_of(row_block).count() > 0) continue;
      AccDq zeros;
      cute::clear(zeros);
      send_dq({block.head_k, row_block}, zeros);
    }
  }

  // A slice of each warp's share. `seen`: the turn counter before the product.
  __device__ __forceinline__ void add_dq(const RowStep& at, int64_t tile, int slice, int seen, AccDq& acc_dq) const {
    const int warp = 4 * group + thread / 32;
    float* const target = params.dq_accum_ptr + tile * Config::kDqTile + Config::dq_place(warp, slice);
    if constexpr (Config::kKeepsDq) {
      keep_dq(at, acc_dq);
    } else if (stages_dq()) {
      float* const staged = storage.dq + warp * Config::kDqStaged;
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

  // Staged additions of a step are complete behind the barrier of the next one, which hides the way to memory: there
  // one thread passes the turn. Each warp waits for its own before the barrier.
  __device__ __forceinline__ void complete_additions() const {
    if (!is_deterministic()) return;
    if (is_first_lane()) wait_for_additions();
    __syncwarp();
  }

  __device__ __forceinline__ void pass_turn_of(const RowStep& at) const {
    if (!is_deterministic()) return;
    if (group == 0 && thread == 0) {
      pass_turn(params.dq_turns_ptr + dq_tile_index(params, block, at, Config::kBlockM));
    }
    __syncwarp();
  }

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

  // On return both consumers are done with shared memory; with dQ there, this one with its share of the rest.
  __device__ __forceinline__ void run() {
    const int count = walk.count();
    if (count == 0) return;
    const int part = Config::kKeepsDq ? group : 0;
    storage.k_full[part].wait(kv_phase);
    storage.v_full[part].wait(kv_phase);
    RowStep at = walk.start(), last = at;
    for (int i = 0; i < count; ++i) {
      step(at, i);
      last = at;
      walk.advance(at);
    }
    if constexpr (Config::kFreesKeysEarly) storage.kv_empty[part].arrive();
    if constexpr (Config::kSplitsKeys) complete_additions();
    if constexpr (Config::kDqStaged > 0) wait_for_own_stores();  // the additions have left the buffer of dQ
    wait_for_sharers();
    if (Config::kKeepsDq && count == 1) wait_for_consumers();  // the next step may have the same rows
    if constexpr (Config::kSplitsKeys) pass_turn_of(last);
  }
};

}  // namespace sm90
}  // namespace flash
