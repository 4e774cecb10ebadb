// The producer warps of the wgmma backward: one loads K, V, Q and dO by TMA, one the LSE and softmax_d of the rows, and
// with 64-key tiles in deterministic mode one releases the dQ semaphores.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/bwd_schedule.h"
#include "core/unmasked.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/dq_semaphore.h"
#include "kernels/common/score_mod.h"
#include "kernels/sm90/bwd_storage.h"
#include "kernels/tma/clear_rows.h"
#include "kernels/tma/tensor_map.h"

namespace flash {
namespace sm90 {

using namespace tma;

// The load warp. One lane issues the TMA copies; all lanes run the loop.
template <class Config>
struct BwdLoader {
  using Element = typename Config::Element;

  const BwdLaunch& launch;
  BwdStorage<Config>& storage;
  const bool issues;  // this lane
  PipelineState<Config::kStages> state;
  PipelineState<Config::kKvStages> kv_state;
  bool is_first = true;
  uint32_t landed_phase = 0;

  __device__ __forceinline__ BwdLoader(const BwdLaunch& launch_, BwdStorage<Config>& storage_)
      : launch(launch_), storage(storage_), issues(threadIdx.x % 32 == 0) {}

  // Loads rows [row, row + kRows) of kCols columns into a tile of kTileRows rows, one TMA box per swizzle atom. Rows
  // before `first` are fully masked and become zeros: 0 * NaN from them would be NaN in the MMA.
  template <int kRows, int kCols, int kTileRows = kRows>
  __device__ __forceinline__ void load(const CUtensorMap& map, Barrier& full, Element* smem, const TmaRows& rows,
                                       int row, int first, int head, cute::TMA::CacheHintSm90 hint) {
    constexpr int kAtoms = kCols / Config::kAtomCols;
    const bool clears = first > row;
    Barrier& landed = clears ? storage.landed : full;
    if (issues) {
      landed.arrive_and_expect(kRows * kCols * static_cast<int>(sizeof(Element)));
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        cute::SM90_TMA_LOAD_5D::copy(&map, &landed.state, static_cast<uint64_t>(hint),
                                     smem + atom * kTileRows * Config::kAtomCols, atom * Config::kAtomCols,
                                     row + rows.shift, head, rows.outer, rows.origin);
      }
    }
    if (!clears) return;
    landed.wait(landed_phase);
    landed_phase ^= 1;
    clear_rows<kTileRows, kAtoms, Config::kAtomCols>(smem, min(first - row, kRows));
    if (issues) full.arrive();
  }

  // The next work tile index, the same in all lanes. Dynamic scheduler: in deterministic mode also the first index is
  // fetched from the semaphore, so that every thread block that the dQ semaphore waits for has started or is done.
  __device__ __forceinline__ int fetch(bool first, int index) const {
    int* const semaphore = launch.tile_count_semaphore;
    const bool is_ordered = launch.params.dq_semaphore_ptr != nullptr;
    if (first && (semaphore == nullptr || !is_ordered)) return blockIdx.x;
    if (semaphore == nullptr) return index + gridDim.x;
    const int begin = is_ordered ? 0 : gridDim.x;
    const int fetched = issues ? atomicAdd(semaphore, 1) : 0;
    return begin + __shfl_sync(0xffffffffu, fetched, 0);
  }

  // Fetches, announces (work_full) and loads the work tiles of this thread block.
  __device__ __forceinline__ void run_all() {
    PipelineState<2> slot;
    int index = fetch(true, 0);
    while (true) {
      storage.work_empty[slot.stage].wait(slot.phase ^ 1);
      if (issues) {
        storage.work[slot.stage] = index;
        storage.work_full[slot.stage].arrive();
      }
      __syncwarp();
      slot.advance();
      if (index >= launch.grid.blocks) return;
      const BwdWorkTile block = bwd_work_tile_at(launch.params, Config::kBlockN, index, launch.grid);
      if (!block.empty(Config::kBlockN)) run(block);
      index = fetch(false, index);
    }
  }

  // Prefetches K and V into the L2 cache while the previous work tile still uses their only buffer.
  __device__ __forceinline__ void prefetch_keys(const TmaRows& keys, int row, int head) const {
    if (!issues) return;
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += Config::kAtomCols) {
      for (int first = 0; first < Config::kBlockN; first += Config::kBlockN / Config::kKeyParts) {
        for (const CUtensorMap* map : {&launch.k_map, &launch.v_map}) {
          if (map == &launch.v_map && col >= Config::kHeadDimV) continue;
          cute::SM90_TMA_LOAD_5D::PREFETCH::copy(map, col, row + first + keys.shift, head, keys.outer, keys.origin);
        }
      }
    }
  }

  __device__ __forceinline__ void load_keys(const TmaRows& keys, int row, int first_key, int head) {
    constexpr auto kHint = cute::TMA::CacheHintSm90::EVICT_FIRST;
    constexpr int kRows = Config::kBlockN / Config::kKeyParts;
    const int stage = kv_state.stage;
#pragma unroll
    for (int i = 0; i < Config::kKeyParts; ++i) {
      const int first = i * kRows, offset = first * Config::kAtomCols;
      storage.kv_empty[stage][i].wait(kv_state.phase ^ 1);
      load<kRows, Config::kHeadDim, Config::kBlockN>(launch.k_map, storage.k_full[stage][i], storage.k[stage] + offset,
                                                     keys, row + first, first_key, head, kHint);
      load<kRows, Config::kHeadDimV, Config::kBlockN>(launch.v_map, storage.v_full[stage][i], storage.v[stage] + offset,
                                                      keys, row + first, first_key, head, kHint);
    }
  }

  __device__ __forceinline__ void run(const BwdWorkTile& block) {
    using cute::TMA::CacheHintSm90;
    const Flash_bwd_params& params = launch.params;
    const bool is_varlen = params.is_varlen();
    const TmaRows keys(is_varlen, block.batch, block.k_begin, block.seqlen_k);
    const TmaRows queries(is_varlen, block.batch, block.q_begin, block.seqlen_q);
    const Visibility visibility{block.seqlen_q, block.seqlen_k, params.window};
    const int first_row = first_unmasked_row(visibility);
    const QBlockOrder order = q_block_order(params, block, Config::kBlockM, Config::kBlockN);
    const int count = order.count();
    if (count == 0) {
      // Nothing to load, but dK and dV may be staged in the buffers of K and V: this phase of kv_empty and k_full must
      // take place all the same. Without it consumers could release kv_empty again before this warp has seen the
      // previous phase, whose parity would then have wrapped around.
      if constexpr (!Config::kFreesKeysEarly) {
        storage.kv_empty[0][0].wait(kv_state.phase ^ 1);
        if (issues) {
          storage.k_full[0][0].arrive();
          storage.v_full[0][0].arrive();
        }
        kv_state.advance();
      }
      return;
    }
    QStep at = order.start();
    const int key = block.n_block * Config::kBlockN;
    if (!is_first && Config::kKvStages == 1) prefetch_keys(keys, key, block.head_k);
    is_first = false;
    for (int i = 0; i < count; ++i) {
      const int stage = state.stage, row = at.row_block * Config::kBlockM;
      storage.q_empty[stage].wait(state.phase ^ 1);
      load<Config::kBlockM, Config::kHeadDim>(launch.q_map, storage.q_full[stage], storage.q[stage], queries, row,
                                              first_row, at.head, CacheHintSm90::EVICT_LAST);
      storage.do_empty[stage].wait(state.phase ^ 1);
      load<Config::kBlockM, Config::kHeadDimV>(launch.do_map, storage.do_full[stage], storage.dout[stage], queries, row,
                                               first_row, at.head, CacheHintSm90::EVICT_LAST);
      if (i == 0) load_keys(keys, key, first_unmasked_key(visibility), block.head_k);
      state.advance();
      order.advance(at);
    }
    kv_state.advance();
  }
};

// The other warps' side of BwdLoader::run_all(): visit(BwdWorkTile) for each work tile that is not empty.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_work_tile(const BwdLaunch& launch, BwdStorage<Config>& storage,
                                                   const Visit& visit) {
  PipelineState<2> slot;
  while (true) {
    storage.work_full[slot.stage].wait(slot.phase);
    const int index = __shfl_sync(0xffffffffu, storage.work[slot.stage], 0);
    storage.work_empty[slot.stage].arrive();
    slot.advance();
    if (index >= launch.grid.blocks) return;
    const BwdWorkTile block = bwd_work_tile_at(launch.params, Config::kBlockN, index, launch.grid);
    if (!block.empty(Config::kBlockN)) visit(block);
  }
}

// The random bits from which a step computes its dropout mask, by one warp.
template <class Config>
__device__ __forceinline__ void store_dropout_bits(const Flash_bwd_params& params, BwdStorage<Config>& storage,
                                                   const BwdWorkTile& block, const QStep& at, int stage) {
  const DropoutStream stream = DropoutMask(params.dropout, block.batch, at.head).stream;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = lane; row < Config::kBlockM; row += 32) {
    storage.dropout_row_bits[stage][row] = dropout_row(stream, at.row_block * Config::kBlockM + row);
  }
#pragma unroll
  for (int pair = lane; pair < Config::kBlockN / 2; pair += 32) {
    storage.dropout_col_bits[stage][pair] = dropout_column_pair(stream, block.n_block * (Config::kBlockN / 2) + pair);
  }
}

// The statistics warp: LSE and softmax_d of the rows of each step. Fully masked rows (by position, or by an infinite
// LSE of either sign) and rows beyond the sequence get an LSE of +inf, which makes P 0. The global loads of a step are
// issued before the wait for its buffers. Waits for q_empty, do_empty; arrives on q_full, do_full.
template <class Config>
__device__ __forceinline__ void load_statistics(const Flash_bwd_params& params, BwdStorage<Config>& storage,
                                                const BwdWorkTile& block, PipelineState<Config::kStages>& state) {
  constexpr int kRows = Config::kBlockM / 32;  // of each lane
  const int lane = threadIdx.x % 32;
  const QBlockOrder order = q_block_order(params, block, Config::kBlockM, Config::kBlockN);
  const int first_row = first_unmasked_row({block.seqlen_q, block.seqlen_k, params.window});
  QStep at = order.start();
  const int count = order.count();
  for (int i = 0; i < count; ++i) {
    const float* const lse = params.softmax_lse_ptr + lse_offset(params, block.batch, at.head, block.q_begin);
    const float* const delta = params.softmax_d_ptr + softmax_d_offset(params, block.batch, at.head, block.q_begin);
    float lse_log2[kRows], softmax_d[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = at.row_block * Config::kBlockM + 32 * j + lane;
      const bool valid = row >= first_row && row < block.seqlen_q;
      lse_log2[j] = valid ? lse_or_inf(lse[row]) * ScoreMod::kLog2e : INFINITY;
      softmax_d[j] = valid ? delta[row] : 0.0f;
    }
    storage.q_empty[state.stage].wait(state.phase ^ 1);
#pragma unroll
    for (int j = 0; j < kRows; ++j) storage.lse_log2[state.stage][32 * j + lane] = lse_log2[j];
    if constexpr (Config::kVariant != BwdVariant::kPlain) {
      if (params.has_dropout) store_dropout_bits(params, storage, block, at, state.stage);
    }
    storage.q_full[state.stage].arrive();
    storage.do_empty[state.stage].wait(state.phase ^ 1);
#pragma unroll
    for (int j = 0; j < kRows; ++j) storage.softmax_d[state.stage][32 * j + lane] = softmax_d[j];
    storage.do_full[state.stage].arrive();
    state.advance();
    order.advance(at);
  }
}

// The semaphore warp (deterministic mode, reductions from registers): releases the dQ semaphore of a tile when all
// consumer warps have reduced into it. Waits for dq_added, arrives on dq_released.
template <class Config>
__device__ __forceinline__ void release_dq_semaphores(const Flash_bwd_params& params, BwdStorage<Config>& storage,
                                                      const BwdWorkTile& block, PipelineState<Config::kStages>& state) {
  if (params.dq_semaphore_ptr == nullptr) return;
  const QBlockOrder order = q_block_order(params, block, Config::kBlockM, Config::kBlockN);
  QStep at = order.start();
  const int count = order.count();
  for (int i = 0; i < count; ++i) {
    storage.dq_added[state.stage].wait(state.phase);
    if (threadIdx.x % 32 == 0) {
      dq_semaphore_release(params.dq_semaphore_ptr + dq_tile_index(params, block, at, Config::kBlockM));
      storage.dq_released[state.stage].arrive();
    }
    __syncwarp();
    state.advance();
    order.advance(at);
  }
}

}  // namespace sm90
}  // namespace flash
