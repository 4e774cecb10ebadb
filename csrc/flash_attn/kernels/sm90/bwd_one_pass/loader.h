// The load warp of the one-pass wgmma backward: K, V, Q and dO by TMA.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/bwd_schedule.h"
#include "core/visible_range.h"
#include "kernels/common/mask.h"
#include "kernels/common/pdl.h"
#include "kernels/sm90/bwd_one_pass/bands.h"
#include "kernels/sm90/bwd_one_pass/storage.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/tma/clear_rows.h"
#include "kernels/tma/tensor_map.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

using namespace tma;

// One lane issues the TMA copies; all lanes run the loop. Not on BwdTileLoader and bwd_work_queue.h, which do the same:
// ptxas then orders the load warp otherwise.
template <class Config>
struct BwdLoader {
  using Element = typename Config::Element;

  const BwdLaunch& launch;
  BwdStorage<Config>& storage;
  const bool is_elected;  // this lane
  PipelineState<Config::kStages> state;
  PipelineState<Config::kKStages> kv_state;
  typename Config::template IfBiased<PipelineState<2>> bias_state;
  bool is_first = true;
  uint32_t pre_clear_phase = 0;

  __device__ __forceinline__ BwdLoader(const BwdLaunch& launch_, BwdStorage<Config>& storage_)
      : launch(launch_), storage(storage_), is_elected(threadIdx.x % 32 == 0) {}

  // Loads rows [row, row + kRows) of kCols columns into a tile of kTileRows rows, one TMA box per swizzle atom. Fully
  // masked rows, those before `masked` or those it marks, become zeros: 0 * NaN from them would be NaN in the MMA.
  template <int kRows, int kCols, int kTileRows = kRows>
  __device__ __forceinline__ void load(const CUtensorMap& map, Barrier& full, Element* smem, const TmaRows& rows,
                                       int row, MaskedRows<Config> masked, int head, cute::TMA::CacheHintSm90 hint) {
    constexpr int kAtoms = kCols / Config::kAtomCols;
    bool has_masked_rows;
    if constexpr (Config::kListed) {  // not overloads: they change how ptxas orders the load warp
      has_masked_rows = masked.any();
    } else {
      has_masked_rows = masked > row;
    }
    Barrier& tma_full = has_masked_rows ? storage.pre_clear_full : full;
    if (is_elected) {
      tma_full.arrive_and_expect(kRows * kCols * static_cast<int>(sizeof(Element)));
      load_tile<kAtoms, Config::kAtomCols, kTileRows>(map, tma_full, smem, rows, row, head, hint);
    }
    if (!has_masked_rows) return;
    tma_full.wait(pre_clear_phase);
    pre_clear_phase ^= 1;
    if constexpr (Config::kListed) {
      clear_rows<kTileRows, kAtoms, Config::kAtomCols>(smem, masked);
    } else {
      clear_rows<kTileRows, kAtoms, Config::kAtomCols>(smem, min(masked - row, kRows));
    }
    if (is_elected) full.arrive();
  }

  // The next work tile index, the same in all lanes. Dynamic scheduler: in deterministic mode and in bands also the
  // first index is fetched from the semaphore, so that every thread block whose work is waited for has started.
  __device__ __forceinline__ int fetch(bool first, int index) const {
    int* const semaphore = launch.tile_count_semaphore;
    bool fetches_first = launch.params.dq_semaphore_ptr != nullptr;
    if constexpr (Config::kMayHaveBands) fetches_first |= launch.preparing_shares > 0;
    if (first && (semaphore == nullptr || !fetches_first)) return blockIdx.x;
    if (semaphore == nullptr) return index + gridDim.x;
    wait_for_previous_kernel();  // softmax_d_kernel() clears the semaphore
    const int begin = fetches_first ? 0 : gridDim.x;
    const int fetched = is_elected ? atomicAdd(semaphore, 1) : 0;
    return begin + __shfl_sync(0xffffffffu, fetched, 0);
  }

  // Fetches, announces (work_full) and loads the work tiles of this thread block, each once its band is prepared.
  __device__ __forceinline__ void run_all() {
    PipelineState<2> work_state;
    int index = fetch(true, 0), waited_for = -1;
    while (true) {
      storage.work_empty[work_state.stage].wait(work_state.phase ^ 1);
      if constexpr (Config::kMayHaveBands) {
        if (launch.preparing_shares > 0 && index < launch.grid.blocks) {
          wait_until_prepared<Config>(launch, index, waited_for);
        }
      }
      if (is_elected) {
        storage.work[work_state.stage] = index;
        storage.work_full[work_state.stage].arrive();
      }
      __syncwarp();
      work_state.advance();
      if (index >= launch.grid.blocks) return;
      const BwdWorkTile tile = bwd_work_tile_at(launch.params, Config::kBlockN, index, launch.grid);
      if (!tile.empty(Config::kBlockN)) run(tile);
      index = fetch(false, index);
    }
  }

  // Prefetches what the previous work tile still uses the only buffer of, V and maybe K, into the L2 cache.
  __device__ __forceinline__ void prefetch_kv(const TmaRows& k_rows, int row, int head) const {
    if (!is_elected) return;
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += Config::kAtomCols) {
      for (int first = 0; first < Config::kBlockN; first += Config::kBlockN / Config::kKvParts) {
        for (const CUtensorMap* map : {&launch.k_map, &launch.v_map}) {
          if (Config::kEarlyK && map == &launch.k_map) continue;
          cute::SM90_TMA_LOAD_5D::PREFETCH::copy(map, col, row + first + k_rows.shift, head, k_rows.outer,
                                                 k_rows.origin);
        }
      }
    }
  }

  __device__ __forceinline__ void load_kv(const TmaRows& k_rows, const BwdWorkTile& tile, const BwdSteps<Config>& order,
                                          int row, int first_key, int head) {
    constexpr auto kHint = cute::TMA::CacheHintSm90::EVICT_FIRST;
    constexpr int kRows = Config::kBlockN / Config::kKvParts;
    const int stage = kv_state.stage;
#pragma unroll
    for (int i = 0; i < Config::kKvParts; ++i) {
      const int first = i * kRows, offset = first * Config::kAtomCols;
      const MaskedRows<Config> masked = masked_keys_of<Config, kRows>(launch, tile, order, row + first, first_key);
      if constexpr (Config::kEarlyK) {
        storage.v_empty.wait(stage ^ 1);
        load<kRows, Config::kHeadDim>(launch.v_map, storage.v_full[0][i], storage.v[0], k_rows, row, masked, head,
                                      kHint);
        continue;
      }
      storage.kv_empty[stage][i].wait(kv_state.phase ^ 1);
      load<kRows, Config::kHeadDim, Config::kBlockN>(launch.k_map, storage.k_full[stage][i], storage.k[stage] + offset,
                                                     k_rows, row + first, masked, head, kHint);
      load<kRows, Config::kHeadDim, Config::kBlockN>(launch.v_map, storage.v_full[stage][i], storage.v[stage] + offset,
                                                     k_rows, row + first, masked, head, kHint);
    }
  }

  // kEarlyK: loads K of the next work tile during the last steps of this one. The first work tile releases the second
  // buffer, which is still unused, so that buffer's barrier has completed one phase more.
  __device__ __forceinline__ void load_early_k(const TmaRows& k_rows, int row, int first_key, int head) {
    const int stage = kv_state.stage;
    storage.kv_empty[stage][0].wait(kv_state.phase ^ 1 ^ stage);
    load<Config::kBlockN, Config::kHeadDim>(launch.k_map, storage.k_full[stage][0], storage.k[stage], k_rows, row,
                                            first_key, head, cute::TMA::CacheHintSm90::EVICT_FIRST);
  }

  __device__ __forceinline__ auto bias_boxes_of(const BwdWorkTile& tile) const {
    if constexpr (Config::kBiased) {
      return BiasBoxes(launch.bias_map, launch.mask.bias, launch.params.is_varlen(), tile.batch, tile.q_begin,
                       tile.seqlen_q, 0);
    } else {
      return typename Config::Nothing();
    }
  }

  // attn_bias of a step, a box for each consumer: of its keys, or fp32 of half of them.
  __device__ __forceinline__ void load_bias(BiasBoxes& boxes, const BwdWorkTile& tile, const QStep& at) {
    if (!launch.mask.bias.loads_boxes) return;
    boxes.set_head(launch.mask.bias, at.head);
    for (int col = 0; col < 64; col += boxes.cols()) {
      Barrier& full = storage.bias_full[bias_state.stage];
      storage.bias_empty[bias_state.stage].wait(bias_state.phase ^ 1);
      if (is_elected) {
        full.arrive_and_expect(2 * boxes.bytes(Config::kBlockM));
        for (int group = 0; group < 2; ++group) {
          boxes.load(full, storage.bias[bias_state.stage] + group * Config::kBlockM * kBiasBoxBytes,
                     at.m_block * Config::kBlockM, tile.n_block * Config::kBlockN + 64 * group + col);
        }
      }
      bias_state.advance();
    }
  }

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    constexpr auto kHint = Config::kRowsHint;
    const Flash_bwd_params& params = launch.params;
    const bool is_varlen = params.is_varlen();
    const TmaRows k_rows(is_varlen, tile.batch, tile.k_begin, tile.seqlen_k);
    const TmaRows q_rows(is_varlen, tile.batch, tile.q_begin, tile.seqlen_q);
    const MaskOf<Config> visibility = mask_of<Config>(params, tile);
    const int first_row = first_visible_row(visibility);
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    const int count = order.count();
    if (count == 0) return;
    BwdStep<Config> at = order.start();
    const int key = tile.n_block * Config::kBlockN;
    if (!is_first && Config::kVStages == 1) prefetch_kv(k_rows, key, tile.head_k);
    if constexpr (Config::kEarlyK) load_early_k(k_rows, key, first_visible_key(visibility), tile.head_k);
    is_first = false;
    typename Config::template IfBiased<BiasBoxes> boxes = bias_boxes_of(tile);
    for (int i = 0; i < count; ++i) {
      const int stage = state.stage, row = at.m_block * Config::kBlockM;
      const MaskedRows<Config> masked_queries = masked_queries_of<Config>(launch, tile, at, row, first_row);
      storage.q_empty[stage].wait(state.phase ^ 1);
      load<Config::kBlockM, Config::kHeadDim>(launch.q_map, storage.q_full[stage], storage.q[stage], q_rows, row,
                                              masked_queries, at.head, kHint);
      storage.do_empty[stage].wait(state.phase ^ 1);
      load<Config::kBlockM, Config::kHeadDim>(launch.do_map, storage.do_full[stage], storage.dout[stage], q_rows, row,
                                              masked_queries, at.head, kHint);
      if (i == 0) load_kv(k_rows, tile, order, key, first_visible_key(visibility), tile.head_k);
      if constexpr (Config::kBiased) load_bias(boxes, tile, at);
      state.advance();
      order.advance(at);
    }
    kv_state.advance();
  }
};

// The counterpart of BwdLoader::run_all() in the other warps: visit(BwdWorkTile) for each work tile that is not empty.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_work_tile(const BwdLaunch& launch, BwdStorage<Config>& storage,
                                                   const Visit& visit) {
  PipelineState<2> work_state;
  while (true) {
    storage.work_full[work_state.stage].wait(work_state.phase);
    const int index = __shfl_sync(0xffffffffu, storage.work[work_state.stage], 0);
    storage.work_empty[work_state.stage].arrive();
    work_state.advance();
    if (index >= launch.grid.blocks) return;
    const BwdWorkTile tile = bwd_work_tile_at(launch.params, Config::kBlockN, index, launch.grid);
    if (!tile.empty(Config::kBlockN)) visit(tile);
  }
}

}  // namespace sm90
}  // namespace flash
