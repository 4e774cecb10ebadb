// Shared memory of a team of the wgmma forward: tiles, barriers, and who waits for whom at each of them.
#pragma once

#include <cutlass/arch/barrier.h>

#include "core/softcap_series.h"
#include "core/trip_count.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/fwd_config.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/pipeline_state.h"

namespace flash {
namespace sm90 {

using namespace tma;

// Named barrier of all warps of a thread block: behind it the barriers below are initialised.
constexpr uint32_t kBeginBarrier = 0;

// Not NamedBarrier::sync(): the roles come here by instructions of their own, which synccheck takes for divergence
// where the barrier is an aligned one of the whole thread block.
template <class Config>
__device__ __forceinline__ void begin_together() {
  constexpr uint32_t kBarrier = kBeginBarrier + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount;
  asm volatile("barrier.sync %0, %1;" ::"n"(kBarrier), "n"(Config::kThreads) : "memory");
}

// Read 16 bytes at a time.
template <class T>
struct alignas(16) Slot {
  T value;
};

template <class Config>
struct FwdStorage {
  using Element = typename Config::Element;

  alignas(1024) Element q[Config::kQStages][Config::kWarpGroups][Config::kSmemQ];
  alignas(1024) Element k[Config::kKvStages][Config::kSmemK];
  alignas(1024) Element v[Config::kKvStages][Config::kSmemV];
  alignas(Config::kSeparateOSmem ? 1024
                                 : 8) Element o[Config::kWarpGroups][Config::kSeparateOSmem ? Config::kSmemO : 1];

  // With dropout the words of the columns of a block of keys, beside its K: for the lanes 4 g + t the fine words of the
  // pairs t, t + 4, t + 8, ..., then the coarse ones of t, t + 8, ...
  static constexpr int kFineBits = Config::kBlockN / 8, kColBitVectors = (kFineBits + kFineBits / 2 + 3) / 4;
  uint4 col_bits[Config::kPackedDropout ? Config::kKvStages : 1][4][Config::kPackedDropout ? kColBitVectors : 1];

  // full: 1 arrival and the bytes of the tile; from pages, one of each lane that copied; of o_full one of each warp.
  // empty: one arrival of each warp that read it, of q_empty of the one that stores where there is one; of tile_empty,
  // and of k_empty with words of columns, of each lane.
  Barrier k_full[Config::kKvStages], k_empty[Config::kKvStages];
  Barrier v_full[Config::kKvStages], v_empty[Config::kKvStages];
  Barrier v_landed;  // of V that the loading warp clears in part, for itself
  Barrier q_full[Config::kQStages][Config::kWarpGroups], q_empty[Config::kQStages][Config::kWarpGroups];
  Barrier o_full[Config::kQStages][Config::kWarpGroups];  // O in the place of Q, for the warp that stores it
  // The row block that the scheduler hands to the other warps of its team, in two slots by turns: with one, ptxas has
  // more live registers in the consumers' loops, and spills where there are three. Consumers wait for their steps as
  // well; who loads or stores need not.
  static constexpr int kTileSlots = 2;
  Barrier tile_full[kTileSlots], trip_count_full[kTileSlots], tile_empty[kTileSlots];
  Slot<WorkTile> tile[kTileSlots];  // an empty block says that there are no more
  Slot<KvBlockOrder> order[kTileSlots];
  Slot<WarpgroupTripCount> steps[kTileSlots][Config::kWarpGroups];
  int split[kTileSlots];  // of the keys
  ShortSoftcapSeries short_series;

  // By one warp, each lane a few of them, before Barrier::fence_init().
  __device__ __forceinline__ void init_barriers(bool is_paged) {
    const int lane = threadIdx.x % 32, group = lane % Config::kWarpGroups;
    const int loading_warps = is_paged ? 3 : 1 + Config::kPackedDropout + Config::kHasStoreWarp;
    if (lane < Config::kKvStages) {
      k_full[lane].init(is_paged ? 32 : 1 + 32 * Config::kPackedDropout);
      v_full[lane].init(is_paged ? 32 : 1);
      k_empty[lane].init((Config::kPackedDropout ? 32 : 1) * Config::kConsumerWarps);
      v_empty[lane].init(Config::kConsumerWarps);
    }
    if (lane == 0) v_landed.init(1);
    if (lane < Config::kQStages * Config::kWarpGroups) {
      q_full[lane / Config::kWarpGroups][group].init(1);
      q_empty[lane / Config::kWarpGroups][group].init(Config::kHasStoreWarp ? 1 : 4);
      if constexpr (Config::kHasStoreWarp) o_full[lane / Config::kWarpGroups][group].init(4);
    }
    if (lane < kTileSlots) {
      tile_full[lane].init(1);
      trip_count_full[lane].init(Config::kWarpGroups);
      tile_empty[lane].init(32 * (Config::kConsumerWarps + loading_warps));
    }
  }
};

// A row block as a consumer warpgroup sees it: the key blocks that the row block visits, at least one, and which of
// them no row of the warpgroup sees. Those it lets pass; the first of the walk it computes all the same.
template <class Config>
struct FwdWork {
  WorkTile block;
  KvBlockOrder order;
  WarpgroupTripCount steps;  // of the warpgroup's rows
  int split = 0;             // of the keys

  // While they pass, V of the block before them is not given back; nor of the last one while the next Q is waited for.
  static_assert((Config::kWarpGroups - 1) * ((63 + Config::kBlockN) / Config::kBlockN) + Config::kIssueNextQkEarly <=
                    Config::kKvStages,
                "the rows of other warpgroups hide no more blocks than there are buffers");

  // The walk but for what is hidden at its end.
  __device__ __forceinline__ int count() const { return Config::kNoMask ? order.count() : steps.count; }
  // The first step after first_step() that may need a mask.
  __device__ __forceinline__ int masked_begin() const { return min(steps.skipped.begin, count()); }
  // The step that is computed after first_step(), if it is less than count().
  __device__ __forceinline__ int second() const { return steps.skipped.begin > 1 ? 1 : 1 + steps.skipped.left; }

  __device__ __forceinline__ bool exists() const { return !block.empty(); }
  __device__ __forceinline__ Visibility visibility(const Window& window) const {
    return {block.seqlen_q, block.seqlen_k, window};
  }
};

// The row blocks of a team, one after the other: its scheduler warp pushes, its other warps take. The scheduler also
// works out what the consumers visit, on whose way from one row block to the next every instruction counts.
template <class Config>
struct WorkPipeline {
  FwdStorage<Config>& storage;
  PipelineState<FwdStorage<Config>::kTileSlots> state, last;

  __device__ __forceinline__ explicit WorkPipeline(FwdStorage<Config>& storage_) : storage(storage_) {}

  // Waits until everybody has let go of the last block. Whoever chooses earlier leaves less to share out at the end.
  __device__ __forceinline__ void acquire() const { storage.tile_empty[last.stage].wait(last.phase); }

  __device__ __forceinline__ void commit(const WorkTile& block, const KvBlockOrder& order, const Window& window,
                                         int split) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      storage.tile[state.stage].value = block;
      storage.order[state.stage].value = order;
      if constexpr (Config::kSplitKv) storage.split[state.stage] = split;
      storage.tile_full[state.stage].arrive();
    }
    if (lane < Config::kWarpGroups) {  // each for one of them
      if constexpr (!Config::kNoMask) {
        const Visibility visibility{block.seqlen_q, block.seqlen_k, window};
        const int first_row = block.row_begin + 64 * lane, row_end = min(first_row + 64, block.row_end);
        storage.steps[state.stage][lane].value =
            warpgroup_trip_count(visibility, order, first_row, row_end, Config::kBlockN);
      }
      storage.trip_count_full[state.stage].arrive();
    }
    __syncwarp();
    last = state;
    state.advance();
  }

  // For those who load or store, as soon as the row block is known.
  __device__ __forceinline__ FwdWork<Config> wait_and_release() {
    const FwdWork<Config> tile = wait();
    release();
    return tile;
  }

  // The same, without letting go.
  __device__ __forceinline__ FwdWork<Config> wait() const {
    storage.tile_full[state.stage].wait(state.phase);
    return {storage.tile[state.stage].value, storage.order[state.stage].value};
  }

  // For the one who loads K and V, before each step: with kFetchNextTileLate it lets go with a few steps left to load.
  // Consumers ask for the next row block when all K of this one has landed, whatever they let pass, so it has let go by
  // then. Who loads only V would not have: some of its buffers come back later.
  static constexpr int kStepsBeforeRelease = 3;
  static_assert(kStepsBeforeRelease > 0, "there is a step before which to let go");

  __device__ __forceinline__ void release_early(const KvBlockOrder& order, int step) {
    if (step == (Config::kFetchNextTileLate ? max(order.count() - kStepsBeforeRelease, 0) : 0)) release();
  }

  // The next row block may be drawn as far as it is up to this lane: all of them say it.
  __device__ __forceinline__ void release() {
    storage.tile_empty[state.stage].arrive();
    state.advance();
  }

  // For a group of the consumers, with its steps.
  __device__ __forceinline__ FwdWork<Config> consumer_wait(int group) {
    storage.trip_count_full[state.stage].wait(state.phase);
    FwdWork<Config> tile{storage.tile[state.stage].value, storage.order[state.stage].value,
                         storage.steps[state.stage][group].value};
    if constexpr (Config::kSplitKv) tile.split = storage.split[state.stage];
    release();
    return tile;
  }
};

}  // namespace sm90
}  // namespace flash
