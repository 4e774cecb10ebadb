// Shared memory of a consumer group of the wgmma forward: tiles, mbarriers, and who waits for whom at each.
#pragma once

#include <cutlass/arch/barrier.h>

#include "core/softcap_series.h"
#include "core/trip_count.h"
#include "kernels/common/mask.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/bias_boxes.h"
#include "kernels/sm90/fwd_config.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/pipeline_state.h"
#include "plan/sm90_smem.h"

namespace flash {
namespace sm90 {

using namespace tma;

// Named barrier of the whole thread block: after it the mbarriers are initialised.
constexpr uint32_t kBeginBarrier = 0;

// Not NamedBarrier::sync(): warp roles arrive by different instructions, which synccheck reports as divergence for an
// aligned barrier of the whole thread block.
template <class Config>
__device__ __forceinline__ void begin_together() {
  if constexpr (Config::kCluster > 1) {
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
    return;
  }
  constexpr uint32_t kBarrier = kBeginBarrier + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount;
  asm volatile("barrier.sync %0, %1;" ::"n"(kBarrier), "n"(Config::kThreads) : "memory");
}

// The same for a warp that does not wait for the others. With kCluster every warp arrives first, and may wait later.
template <class Config>
__device__ __forceinline__ void arrive_at_begin() {
  if constexpr (Config::kCluster > 1) {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");  // after fence_init()
    return;
  }
  constexpr uint32_t kBarrier = kBeginBarrier + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount;
  asm volatile("barrier.arrive %0, %1;" ::"n"(kBarrier), "n"(Config::kThreads) : "memory");
}

// For reads of 16 bytes at a time.
template <class T>
struct alignas(16) Slot {
  T value;
};

static_assert(sizeof(WorkTile) == plan::kWorkTileBytes, "plan and kernels agree");

// A work tile of e4m3 q and k. The scheduler reads their descales: between tiles consumers would wait for them.
struct ScaledTile : WorkTile {
  float score_scale_log2;  // factor of the scores: descales, softmax_scale, log2(e)
};
static_assert(sizeof(Slot<ScaledTile>) == sizeof(Slot<WorkTile>), "plan and kernels agree");

// A ring of V that two warps transpose. full: every lane of the load warp, plus the tile's bytes; empty: every lane of
// those warps. Plain loads read what plain stores clear, and racecheck does not see that a warp's lanes are ordered
// before one lane that arrives for all.
template <int kStages, int kBytes>
struct RawVRing {
  alignas(1024) char raw_v[kStages][kBytes];
  Barrier raw_v_full[kStages], raw_v_empty[kStages];

  __device__ __forceinline__ void init_raw_v_barriers(int reading_warps) {
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      raw_v_full[stage].init(32);
      raw_v_empty[stage].init(32 * reading_warps);
    }
  }
};
template <int kBytes>
struct RawVRing<0, kBytes> {
  __device__ __forceinline__ void init_raw_v_barriers(int) {}
};

template <class Config>
struct FwdStorage : BiasRing<Config::kTile.bias_stages * Config::kWarpGroups, 64>,
                    RawVRing<Config::kRawVStages, Config::kBlockN * Config::kHeadDimV> {
  using Element = typename Config::Element;
  using OutElement = typename Config::OutElement;
  using TripCount = typename Config::TripCount;
  using Order = typename Config::Order;

  alignas(1024) Element q[Config::kQStages][Config::kWarpGroups][Config::kSmemQ];
  alignas(1024) Element k[Config::kKvStages][Config::kSmemK];
  alignas(1024) Element v[Config::kKvStages][Config::kSmemV];
  alignas(Config::kSeparateOSmem ? 1024
                                 : 8) OutElement o[Config::kWarpGroups][Config::kSeparateOSmem ? Config::kSmemO : 1];

  // Random bits of the block's columns, in the same stage as its K (kPackedDropout). For lanes 4 g + t: fine bits of
  // pairs t, t + 4, t + 8, ..., then coarse bits of t, t + 8, ...
  static constexpr int kFineBits = Config::kBlockN / 8, kColBitVectors = (kFineBits + kFineBits / 2 + 3) / 4;
  uint4 col_bits[Config::kPackedDropout ? Config::kKvStages : 1][4][Config::kPackedDropout ? kColBitVectors : 1];

  // full: 1 arrival plus the tile's bytes; from pages, one arrival of each copying lane; o_full: one of each warp.
  // empty: one arrival of each warp that read the stage, in both thread blocks of a pair; q_empty: of the epilogue warp
  // where there is one; tile_empty, and k_empty with column bits: of each lane.
  Barrier k_full[Config::kKvStages], k_empty[Config::kKvStages];
  Barrier v_full[Config::kKvStages], v_empty[Config::kKvStages];
  Barrier pre_clear_full;  // V that the load warp clears in part has landed
  Barrier q_full[Config::kQStages][Config::kWarpGroups], q_empty[Config::kQStages][Config::kWarpGroups];
  Barrier o_full[Config::kQStages][Config::kWarpGroups];  // O staged over Q, for the epilogue warp
  // Work tiles from the scheduler warp to the group's other warps. Two slots: with one, ptxas has more live registers
  // in the consumers' loops and spills where there are three consumers. Consumers also wait for their trip counts;
  // producers and the epilogue warp need not.
  static constexpr int kTileSlots = 2;
  Barrier tile_full[kTileSlots], trip_count_full[kTileSlots], tile_empty[kTileSlots];
  using Tile = std::conditional_t<Config::kScaledTiles, ScaledTile, WorkTile>;
  Slot<Tile> tile[kTileSlots];  // an empty tile ends the kernel
  Slot<Order> order[kTileSlots];
  Slot<TripCount> steps[kTileSlots][Config::kWarpGroups];
  int split[kTileSlots];  // index of the KV split
  ShortSoftcapSeries short_series;

  // Called by one thread, before Barrier::fence_init(). A lane for each barrier would take longer: their addresses
  // would not be uniform, and ptxas makes that a loop over the lanes with a fence in every iteration.
  __device__ __forceinline__ void init_barriers(bool is_paged) {
    constexpr bool kHasBiasWarp = Config::kTile.bias_stages > 0;
    const int loading_warps =
        is_paged ? 3 : 1 + Config::kPackedDropout + Config::kHasStoreWarp + kHasBiasWarp + Config::kTransposeWarps;
    init_tile_barriers(is_paged);
    this->init_bias_barriers(4);
    this->init_raw_v_barriers(Config::kTransposeWarps);
#pragma unroll
    for (int stage = 0; stage < Config::kQStages; ++stage) {
#pragma unroll
      for (int group = 0; group < Config::kWarpGroups; ++group) {
        q_empty[stage][group].init(Config::kHasStoreWarp ? 1 : 4);
        if constexpr (Config::kHasStoreWarp) o_full[stage][group].init(4);
      }
    }
#pragma unroll
    for (int slot = 0; slot < kTileSlots; ++slot) {
      tile_full[slot].init(1);
      trip_count_full[slot].init(Config::kWarpGroups);
      tile_empty[slot].init(32 * (Config::kConsumerWarps + loading_warps));
    }
  }

  // Those through which the Q, K and V of a tile pass.
  __device__ __forceinline__ void init_tile_barriers(bool is_paged) {
#pragma unroll
    for (int stage = 0; stage < Config::kKvStages; ++stage) {
      k_full[stage].init(is_paged ? 32 : 1 + 32 * Config::kPackedDropout);
      v_full[stage].init(is_paged ? 32 : Config::kTransposeWarps > 0 ? Config::kTransposeWarps : 1);
      k_empty[stage].init((Config::kPackedDropout ? 32 : 1) * Config::kConsumerWarps * Config::kCluster);
      v_empty[stage].init(Config::kConsumerWarps * Config::kCluster);
    }
    pre_clear_full.init(1);
#pragma unroll
    for (int stage = 0; stage < Config::kQStages; ++stage) {
#pragma unroll
      for (int group = 0; group < Config::kWarpGroups; ++group) q_full[stage][group].init(1);
    }
  }
};

// A work tile as one consumer warpgroup sees it: its KV block order (at least one block) and the blocks to skip, fully
// masked for the warpgroup's rows. The first block is always computed.
template <class Config>
struct FwdWork {
  using TripCount = typename FwdStorage<Config>::TripCount;

  WorkTile tile;
  typename Config::Order order;
  TripCount steps;  // of the warpgroup's rows
  int split = 0;    // index of the KV split

  // Steps without the blocks skipped at the end.
  __device__ __forceinline__ int count() const { return Config::kNoMask ? order.count() : steps.count; }
  // First step after first_step() that may need a mask.
  __device__ __forceinline__ int masked_begin() const { return min(steps.skipped.begin, count()); }
  // The step computed after first_step(), if it is less than count().
  __device__ __forceinline__ int second() const { return steps.skipped.begin > 1 ? 1 : 1 + steps.skipped.left; }

  __device__ __forceinline__ bool exists() const { return !tile.empty(); }
};

// The trip count of warpgroup `group` of its consumer group.
template <class Config>
__device__ __forceinline__ auto trip_count_of(const WorkTile& tile, const typename Config::Order& order,
                                              const Window& window, int group) {
  if constexpr (Config::kCluster > 1) {
    typename Config::TripCount steps;
    steps.skipped.begin = steps.count = order.count();
    return steps;
  }
  const MaskOf<Config> mask{tile.seqlen_q, tile.seqlen_k, window};
  const int first_row = tile.row_begin + 64 * group, row_end = min(first_row + 64, tile.row_end);
  return Config::trip_count(mask, order, first_row, row_end);
}

// Work pipeline of a consumer group: the scheduler warp commits tiles, the other warps wait for and release them. The
// scheduler also computes the consumers' trip counts: between tiles every consumer instruction is on the critical path.
template <class Config>
struct WorkPipeline {
  FwdStorage<Config>& storage;
  PipelineState<FwdStorage<Config>::kTileSlots> state, last;

  __device__ __forceinline__ explicit WorkPipeline(FwdStorage<Config>& storage_) : storage(storage_) {}

  // Waits until all readers have released the previous work tile. Fetching the next one late keeps the tail balanced.
  __device__ __forceinline__ void acquire() const { storage.tile_empty[last.stage].wait(last.phase); }

  // complete(tile): what only consumers need.
  template <class Complete>
  __device__ __forceinline__ void commit(const WorkTile& tile, const typename Config::Order& order,
                                         const Window& window, int split, const Complete& complete) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      static_cast<WorkTile&>(storage.tile[state.stage].value) = tile;
      storage.order[state.stage].value = order;
      if constexpr (Config::kSplitKv) storage.split[state.stage] = split;
      storage.tile_full[state.stage].arrive();
      complete(storage.tile[state.stage].value);
    }
    if (lane < Config::kWarpGroups) {  // a lane for each warpgroup
      if constexpr (!Config::kNoMask) {
        storage.steps[state.stage][lane].value = trip_count_of<Config>(tile, order, window, lane);
      }
      storage.trip_count_full[state.stage].arrive();
    }
    __syncwarp();
    last = state;
    state.advance();
  }

  // For producer and epilogue warps: release as soon as the tile is read.
  __device__ __forceinline__ FwdWork<Config> wait_and_release() {
    const FwdWork<Config> work = wait();
    release();
    return work;
  }

  // The same without the release.
  __device__ __forceinline__ FwdWork<Config> wait() const {
    storage.tile_full[state.stage].wait(state.phase);
    return {storage.tile[state.stage].value, storage.order[state.stage].value};
  }

  // For the producer of K and V, before each step: with kFetchNextTileLate it releases with a few steps left to load.
  // Consumers wait for the next tile once all K of this one has landed, skipped blocks included, so the producer has
  // released by then. A producer of V alone would not have: some of its stages are returned later.
  static constexpr int kStepsBeforeRelease = 3;
  static_assert(kStepsBeforeRelease > 0, "the release comes before some step");

  __device__ __forceinline__ void release_early(const typename Config::Order& order, int step) {
    if (step == (Config::kFetchNextTileLate ? max(order.count() - kStepsBeforeRelease, 0) : 0)) release();
  }

  // Called by every lane: this warp permits the next tile to be fetched.
  __device__ __forceinline__ void release() {
    storage.tile_empty[state.stage].arrive();
    state.advance();
  }

  // For consumer warpgroup `group`, with its trip count.
  __device__ __forceinline__ FwdWork<Config> consumer_wait(int group) {
    storage.trip_count_full[state.stage].wait(state.phase);
    FwdWork<Config> work{storage.tile[state.stage].value, storage.order[state.stage].value,
                         storage.steps[state.stage][group].value};
    if constexpr (Config::kSplitKv) work.split = storage.split[state.stage];
    release();
    return work;
  }
};

}  // namespace sm90
}  // namespace flash
