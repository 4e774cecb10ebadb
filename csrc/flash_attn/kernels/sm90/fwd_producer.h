// Roles of the producer warps of the wgmma forward: one schedules work tiles, one loads Q, K and V by TMA; paged K and
// V have a warp each (paged_loader.h).
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/visible_range.h"
#include "kernels/common/dropout.h"
#include "kernels/common/pdl.h"
#include "kernels/sm90/bias_warp.h"
#include "kernels/sm90/fwd_launch_params.h"
#include "kernels/sm90/fwd_storage.h"
#include "kernels/sm90/fwd_store.h"
#include "kernels/sm90/kv_block_order.h"
#include "kernels/sm90/varlen_tile_order.h"
#include "kernels/tma/clear_rows.h"
#include "kernels/tma/swizzle.h"
#include "kernels/tma/tensor_map.h"

namespace flash {
namespace sm90 {

using namespace tma;

// The first two producer warps of a consumer group; warps 2 and 3 have the roles that a kernel needs (FwdRoles).
enum ProducerWarp { kLoadWarp, kSchedulerWarp };

// By one thread, as the first thing it does: tensor maps are parameters of the launch, so that they may be fetched
// while the previous kernel still runs. Paged K and V are left out:
// without boxes they have no maps.
__device__ __forceinline__ void prefetch_tensor_maps(const FwdLaunch& launch, bool is_paged) {
  const auto prefetch = [](const CUtensorMap& map) {
    cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&map));
  };
  if (!is_paged) {
    prefetch(launch.k_map);
    prefetch(launch.v_map);
  }
  prefetch(launch.q_map);
  prefetch(launch.o_map);
}

// Which work tiles a consumer group gets.
template <class Config>
struct WorkTileScheduler {
  const FwdLaunch& launch;
  const VarlenOrder varlen;
  plan::WorkTileOrder order;
  int tiles;

  __device__ __forceinline__ explicit WorkTileScheduler(const FwdLaunch& launch_)
      : launch(launch_),
        varlen(launch_.params, Config::kBlockM, launch_.sort_varlen_tiles),
        order(launch_.order),
        tiles(launch_.tiles) {
    if (launch.sort_varlen_tiles) {
      const int tiles_per_head = varlen.count();
      order.set_tiles_per_head(tiles_per_head, plan::num_tail_tiles(tiles_per_head, launch.short_tiles));
      tiles = order.heads.divisor * tiles_per_head;
    }
  }

  __device__ __forceinline__ int splits() const { return Config::kSplitKv ? launch.splits.count : 1; }
  __device__ __forceinline__ int count() const { return tiles * splits(); }

  // First tile index of a consumer group. The two groups of a thread block take consecutive tiles. If there are no more
  // tiles than groups, all first groups get one before any second group does, so that tiles spread over all SMs.
  __device__ __forceinline__ int first(int consumer_group) const {
    const int blocks = static_cast<int>(gridDim.x);
    const bool one_each = count() <= blocks * Config::kConsumerGroups;
    return one_each ? consumer_group * blocks + static_cast<int>(blockIdx.x)
                    : static_cast<int>(blockIdx.x) * Config::kConsumerGroups + consumer_group;
  }

  __device__ __forceinline__ int split(int index) const { return index % splits(); }

  // Called by all lanes of the warp together.
  __device__ __forceinline__ WorkTile at(int index) const {
    const Flash_fwd_params& params = launch.params;
    const HeadBlock at = order.at(index / splits());
    if (params.is_varlen()) {
      return launch.sort_varlen_tiles ? varlen.at(at.head, at.block)
                                      : varlen_work_tile(params, Config::kBlockM, at.head, at.block);
    }
    const FastDiv& heads = launch.heads_of_batch;
    const int batch = heads.divide(at.head);
    return dense_work_tile(params, Config::kBlockM, batch, at.head - batch * heads.divisor, at.block);
  }

  // Next tile index, warp-uniform: the next stride, or with a semaphore whatever is left (dynamic scheduler).
  __device__ __forceinline__ int next(int index, int consumer_groups) const {
    if (launch.tile_count_semaphore == nullptr) return index + consumer_groups;
    wait_for_previous_kernel();  // run_prepare() clears the semaphore
    int fetched = 0;
    if (threadIdx.x % 32 == 0) fetched = atomicAdd(launch.tile_count_semaphore, 1);
    return consumer_groups + __shfl_sync(0xffffffffu, fetched, 0);
  }
};

// Fully masked rows: O = 0 and their LSE, by one warp, row by row. Partial O is cleared too: the combine kernel reads
// it before the LSE tells it which splits count.
template <class Config>
__device__ __forceinline__ void store_fully_masked(const FwdLaunch& launch, const WorkTile& tile, int split) {
  using Element = typename Config::OutElement;
  const Flash_fwd_params& params = launch.params;
  const bool is_split = is_split_kv<Config>(launch);
  const int lane = threadIdx.x % 32;
  static_assert(plan::kMaxWgmmaHeadDim <= 32 * kVectorCols, "a row has one 16-byte vector for each lane");
  const int64_t offset = lse_offset(tile, params) + (is_split ? split * launch.splits.rows : 0);
  if (is_split) {
    auto* const values = reinterpret_cast<float4*>(launch.splits.out_ptr + (offset + tile.row_begin) * params.d_v);
    const int count = (tile.row_end - tile.row_begin) * (params.d_v / 4);
    for (int i = lane; i < count; i += 32) values[i] = float4{};
  }
  auto* const out = static_cast<Element*>(params.o_ptr) + q_offset(tile, params.o_strides);
  for (int row = tile.row_begin; row < tile.row_end && !is_split; ++row) {
    if (kVectorCols * lane < params.d_v) {
      *reinterpret_cast<uint4*>(out + row * params.o_strides.row + kVectorCols * lane) = uint4{};
    }
  }
  const float lse = fully_masked_lse(params, tile);
  for (int row = tile.row_begin + lane; row < tile.row_end; row += 32) params.softmax_lse_ptr[offset + row] = lse;
}

__device__ __forceinline__ void complete_tile(const FwdLaunch&, WorkTile&) {}

// Scheduler warp; it finishes fully masked tiles itself. It chooses the first tile while another warp initialises the
// mbarriers and, if it reads no lengths for that, while the previous kernel still runs. So it calls begin_together()
// itself. Launch: FwdLaunch, or the launch struct of a kernel with more results or inputs, which overloads
// store_fully_masked() or complete_tile().
template <class Config, class Launch = FwdLaunch>
struct SchedulerWarp {
  const Launch& launch;
  FwdStorage<Config>& storage;
  const int consumer_group;

  __device__ __forceinline__ void run() const {
    constexpr bool kMayOverlap = Config::kSplitKv;
    const bool reads_lengths = launch.params.keys_packed();
    if (reads_lengths) wait_for_previous_kernel();
    WorkPipeline<Config> pipeline(storage);
    const int consumer_groups = gridDim.x * Config::kConsumerGroups;
    const WorkTileScheduler<Config> scheduler(launch);
    bool is_first = true;
    auto begin = [&] {
      if (!is_first) return;
      is_first = false;
      if (overlaps_launches<Config>(launch) && !reads_lengths) wait_for_previous_kernel();
      begin_together<Config>();
    };
    for (int index = scheduler.first(consumer_group); index < scheduler.count();
         index = scheduler.next(index, consumer_groups)) {
      const WorkTile tile = scheduler.at(index);
      if (tile.empty()) {
        if constexpr (kMayOverlap) begin();  // before the next fetch
        continue;
      }
      const int split = scheduler.split(index);
      const typename Config::Order order = kv_block_order<Config>(launch, tile, split, scheduler.splits());
      if constexpr (kMayOverlap) begin();  // before any store
      if (order.count() == 0) {
        store_fully_masked<Config>(launch, tile, split);
        continue;
      }
      if constexpr (!kMayOverlap) begin();
      pipeline.commit(tile, order, launch.params.window, split, [&](auto& slot) { complete_tile(launch, slot); });
      pipeline.acquire();
    }
    begin();
    pipeline.commit(WorkTile{}, typename Config::Order{}, Window{}, 0, [](auto&) {});
  }
};

// Column-bits warp: the random bits of dropout for the columns of every K block.
template <class Config>
struct ColumnBitsWarp {
  const FwdLaunch& launch;
  FwdStorage<Config>& storage;

  __device__ __forceinline__ void run() const {
    const Flash_fwd_params& params = launch.params;
    WorkPipeline<Config> pipeline(storage);
    PipelineState<Config::kKvStages> state;
    for (FwdWork<Config> work = pipeline.wait_and_release(); work.exists(); work = pipeline.wait_and_release()) {
      const DropoutMask mask(params, work.tile.batch, work.tile.head);
      for (int i = 0; i < work.order.count(); ++i) {
        const int first_col = block_to_load<Config>(work.order, i) * Config::kBlockN;
        storage.k_empty[state.stage].wait(state.phase ^ 1);
        for (int pair = threadIdx.x % 32; pair < Config::kBlockN / 2; pair += 32) {
          uint32_t* const bits = reinterpret_cast<uint32_t*>(storage.col_bits[state.stage][pair % 4]);
          const RandomBits of_pair = mask.column_pair(first_col + 2 * pair);
          bits[pair / 4] = of_pair.fine;
          if (pair / 4 % 2 == 0) bits[FwdStorage<Config>::kFineBits + pair / 8] = of_pair.coarse;
        }
        storage.k_full[state.stage].arrive();
        state.advance();
      }
    }
  }
};

// Epilogue warp. Waits for the next tile before it waits for this one's O, so that the scheduler never stalls on the
// epilogue.
template <class Config>
struct StoreWarp {
  const FwdLaunch& launch;
  FwdStorage<Config>& storage;

  __device__ __forceinline__ void run() const {
    WorkPipeline<Config> pipeline(storage);
    OutputStore<Config> output(launch, storage);
    for (WorkTile tile = pipeline.wait_and_release().tile; !tile.empty();) {
      const WorkTile next = pipeline.wait_and_release().tile;
      output.store(tile);
      tile = next;
    }
  }
};

// Load warp: Q, K and V. One lane issues; the whole warp runs the loop. If K and V are paged it also stores O.
template <class Config>
struct FwdProducer {
  using Storage = FwdStorage<Config>;
  using Element = typename Config::Element;
  static constexpr int kQBytes = Config::kSmemQ * static_cast<int>(sizeof(Element));

  const FwdLaunch& launch;
  Storage& storage;
  PipelineState<Config::kKvStages> k_state, v_state;
  PipelineState<Config::kRawVStages> raw_v_state;
  PipelineState<Config::kQStages> q_state;
  uint32_t pre_clear_phase = 0;  // of storage.pre_clear_full
  const bool issues;             // this lane issues TMA

  __device__ __forceinline__ FwdProducer(const FwdLaunch& launch_, Storage& storage_)
      : launch(launch_), storage(storage_), issues(threadIdx.x % 32 == 0) {}

  // Loads kRows rows from coordinate `row` on, atom by atom.
  template <int kRows, int kAtoms>
  __device__ __forceinline__ void load(const CUtensorMap& map, Barrier& full, Element* smem, const TmaRows& rows,
                                       int row, int head, cute::TMA::CacheHintSm90 hint) const {
#pragma unroll
    for (int atom = 0; atom < kAtoms; ++atom) {
      cute::SM90_TMA_LOAD_5D::copy(&map, &full.state, static_cast<uint64_t>(hint),
                                   smem + atom * kRows * Config::kAtomCols, atom * Config::kAtomCols, row + rows.shift,
                                   head, rows.outer, rows.origin);
    }
  }

  // One swizzle atom of a block, into both thread blocks of a pair. The other one loads the other atom.
  __device__ __forceinline__ void load_paired(const CUtensorMap& map, Barrier& full, Element* smem, const TmaRows& rows,
                                              int row, int head) const {
    const int atom = blockIdx.x % Config::kCluster;
    full.arrive_and_expect(Config::kCluster * Config::kBlockN * Config::kAtomCols * static_cast<int>(sizeof(Element)));
    cute::SM90_TMA_LOAD_MULTICAST_5D::copy(&map, &full.state, (1 << Config::kCluster) - 1,
                                           static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                           smem + atom * Config::kBlockN * Config::kAtomCols, atom * Config::kAtomCols,
                                           row + rows.shift, head, rows.outer, rows.origin);
  }

  // After the last load: shared memory must outlive the other thread block's arrivals.
  __device__ __forceinline__ void wait_for_other_thread_block() {
    if constexpr (Config::kCluster > 1) {
#pragma unroll 1
      for (int i = 0; i < Config::kKvStages; ++i, k_state.advance(), v_state.advance()) {
        storage.k_empty[k_state.stage].wait(k_state.phase ^ 1);
        storage.v_empty[v_state.stage].wait(v_state.phase ^ 1);
      }
    }
  }

  // Rows of a block of V to clear: a number of first rows, or the rows of keys that no query sees.
  using ClearedRows = std::conditional_t<Config::kListed, MarkedRows, int>;

  // Waits until all consumers have released the stage.
  template <int kAtoms, bool kClears = false, class State>
  __device__ __forceinline__ void load_kv(const CUtensorMap& map, Barrier* full, Barrier* empty, Element* smem,
                                          State& state, int n_block, const TmaRows& rows, int head,
                                          ClearedRows cleared = {}) {
    constexpr int kElements = Config::kBlockN * kAtoms * Config::kAtomCols;
    if constexpr (Config::kCluster > 1) {
      empty[state.stage].wait(state.phase ^ 1);
      if (issues)
        load_paired(map, full[state.stage], smem + state.stage * kElements, rows, n_block * Config::kBlockN, head);
      state.advance();
      return;
    }
    constexpr bool kEveryLane = kClears && Config::kRawVStages > 0;  // of raw V arrives (RawVRing)
    bool clears;
    if constexpr (Config::kListed) {
      clears = kClears && cleared.any();
    } else {
      clears = kClears && cleared > 0;
    }
    Barrier& tma_full = clears ? storage.pre_clear_full : full[state.stage];
    empty[state.stage].wait(state.phase ^ 1);
    if (issues) {
      if (kEveryLane && !clears) full[state.stage].arrive(31);  // for the other lanes
      tma_full.arrive_and_expect(kElements * static_cast<int>(sizeof(Element)));
      load<Config::kBlockN, kAtoms>(map, tma_full, smem + state.stage * kElements, rows, n_block * Config::kBlockN,
                                    head, cute::TMA::CacheHintSm90::EVICT_LAST);
    }
    if (clears) {
      tma_full.wait(pre_clear_phase);
      pre_clear_phase ^= 1;
      if constexpr (Config::kListed) {
        clear_rows<Config::kBlockN, kAtoms, Config::kAtomCols>(smem + state.stage * kElements, cleared);
      } else {
        clear_rows<Config::kBlockN, kAtoms, Config::kAtomCols>(smem + state.stage * kElements,
                                                               min(cleared, Config::kBlockN));
      }
      if (kEveryLane || issues) full[state.stage].arrive();
    }
    state.advance();
  }

  // Waits, for each warpgroup, until its O of the tile that last used this stage has been stored.
  __device__ __forceinline__ void load_q(const WorkTile& tile) {
    const Flash_fwd_params& params = launch.params;
    const TmaRows rows(params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
#pragma unroll
    for (int group = 0; group < Config::kWarpGroups; ++group) {
      storage.q_empty[q_state.stage][group].wait(q_state.phase ^ 1);
      load_q(tile, rows, group);
    }
    q_state.advance();
  }

  // The rows of one warpgroup.
  __device__ __forceinline__ void load_q(const WorkTile& tile, const TmaRows& rows, int group) const {
    if (!issues) return;
    Barrier& full = storage.q_full[q_state.stage][group];
    full.arrive_and_expect(kQBytes);
    load<64, Config::kAtoms>(launch.q_map, full, storage.q[q_state.stage][group], rows, tile.row_begin + 64 * group,
                             tile.head, cute::TMA::CacheHintSm90::EVICT_FIRST);
  }

  // A work tile being loaded.
  struct LoadWork {
    WorkTile tile;
    typename Config::Order order;
    TmaRows rows;
    int head_k;
  };

  template <class Pipeline>
  __device__ __forceinline__ LoadWork next_tile(Pipeline& pipeline) const {
    const Flash_fwd_params& params = launch.params;
    const FwdWork<Config> work = pipeline.wait();
    pipeline.release_early(work.order, 0);
    const WorkTile& tile = work.tile;
    return {tile, work.order, TmaRows(params.keys_packed(), tile.batch, tile.k_begin, tile.seqlen_k),
            launch.group.divide(tile.head)};
  }

  __device__ __forceinline__ void load_k(const LoadWork& work, int i) {
    load_kv<Config::kAtoms>(launch.k_map, storage.k_full, storage.k_empty, &storage.k[0][0], k_state,
                            block_to_load<Config>(work.order, i), work.rows, work.head_k);
  }

  // Keys before a window's first visible key, possibly NaN, share a block with visible ones: their V is cleared. For K
  // the mask suffices.
  __device__ __forceinline__ void load_v(const LoadWork& work, int i) {
    const int n_block = block_to_load<Config>(work.order, i);
    if constexpr (Config::kRawVStages > 0) {
      load_kv<Config::kAtoms, true>(launch.v_map, storage.raw_v_full, storage.raw_v_empty,
                                    reinterpret_cast<Element*>(storage.raw_v[0]), raw_v_state, n_block, work.rows,
                                    work.head_k, unseen_rows(work.tile, n_block));
    } else {
      load_kv<Config::kAtomsV, !Config::kNoMask>(launch.v_map, storage.v_full, storage.v_empty, &storage.v[0][0],
                                                 v_state, n_block, work.rows, work.head_k,
                                                 unseen_rows(work.tile, n_block));
    }
  }

  // The rows of a block of V whose keys no query of the sequence sees.
  __device__ __forceinline__ ClearedRows unseen_rows(const WorkTile& tile, int n_block) const {
    if constexpr (Config::kListed) {
      if (Config::kBiased && launch.mask.lists.entries == nullptr) return {};  // all are seen
      const uint32_t* const seen = seen_keys_of(launch.params, launch.mask, tile, tile.head, tile.segment);
      return {unseen_of_lane<Config::kBlockN>(seen, n_block * Config::kBlockN, tile.seqlen_k)};
    } else {
      const MaskOf<Config> visibility = mask_of<Config>(launch.params, tile);
      const int unmasked_begin_key = visibility.may_mask_left() ? first_visible_key(visibility) : 0;
      return unmasked_begin_key - n_block * Config::kBlockN;
    }
  }

  __device__ __forceinline__ void run() {
    WorkPipeline<Config> pipeline(storage);
    if (launch.params.is_paged()) {
      run_paged(pipeline);
    } else {
      run_unpaged(pipeline);
    }
  }

  // Q only: two more warps load paged K and V. O of a tile is stored after the next Q was issued.
  __device__ __forceinline__ void run_paged(WorkPipeline<Config>& pipeline) {
    OutputStore<Config> output(launch, storage);
    WorkTile last;
    for (WorkTile tile = pipeline.wait_and_release().tile; !tile.empty(); tile = pipeline.wait_and_release().tile) {
      load_q(tile);
      if (Config::kHasStoreWarp && !last.empty()) output.store(last);
      last = tile;
    }
    if (Config::kHasStoreWarp && !last.empty()) output.store(last);
  }

  // Loads V one block after K, in the order the consumers want them, across work tiles too.
  template <class Pipeline>
  __device__ __forceinline__ void run_unpaged(Pipeline& pipeline) {
    LoadWork work = next_tile(pipeline);
    if (!work.tile.empty()) {
      load_k(work, 0);
      load_q(work.tile);
    }
    while (!work.tile.empty()) {
      const int count = work.order.count();
      for (int i = 1; i < count; ++i) {
        pipeline.release_early(work.order, i);
        load_k(work, i);
        load_v(work, i - 1);
      }
      const LoadWork next = next_tile(pipeline);
      if (!next.tile.empty()) load_k(next, 0);
      // The next Q comes from global memory, so it is issued early. Its stage is free after the first step of this
      // tile: with few blocks the wait for it would delay V.
      const bool q_first = Config::kQStages == 2 && count > 2;
      if (q_first && !next.tile.empty()) load_q(next.tile);
      load_v(work, count - 1);
      if (!q_first && !next.tile.empty()) load_q(next.tile);
      work = next;
    }
  }
};

}  // namespace sm90
}  // namespace flash
