// The producer warps of the wgmma backward: one loads K, V, Q and dO by TMA, one the LSE and softmax_d of the rows.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/bwd_schedule.h"
#include "core/unmasked.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/mask.h"
#include "kernels/common/score_mod.h"
#include "kernels/sm90/bwd_storage.h"
#include "kernels/tma/clear_rows.h"
#include "kernels/tma/tensor_map.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

using namespace tma;

// The load warp. One lane issues the TMA copies; all lanes run the loop.
template <class Config>
struct BwdLoader {
  using Element = typename Config::Element;

  const BwdLaunch& launch;
  BwdStorage<Config>& storage;
  const bool is_elected;  // this lane
  PipelineState<Config::kStages> state;
  PipelineState<Config::kKvStages> kv_state;
  bool is_first = true;
  uint32_t pre_clear_phase = 0;

  __device__ __forceinline__ BwdLoader(const BwdLaunch& launch_, BwdStorage<Config>& storage_)
      : launch(launch_), storage(storage_), is_elected(threadIdx.x % 32 == 0) {}

  // Loads rows [row, row + kRows) of kCols columns into a tile of kTileRows rows, one TMA box per swizzle atom. Rows
  // before `first` are fully masked and become zeros: 0 * NaN from them would be NaN in the MMA.
  template <int kRows, int kCols, int kTileRows = kRows>
  __device__ __forceinline__ void load(const CUtensorMap& map, Barrier& full, Element* smem, const TmaRows& rows,
                                       int row, int first, int head, cute::TMA::CacheHintSm90 hint) {
    constexpr int kAtoms = kCols / Config::kAtomCols;
    const bool has_masked_rows = first > row;
    Barrier& tma_full = has_masked_rows ? storage.pre_clear_full : full;
    if (is_elected) {
      tma_full.arrive_and_expect(kRows * kCols * static_cast<int>(sizeof(Element)));
      load_tile<kAtoms, Config::kAtomCols, kTileRows>(map, tma_full, smem, rows, row, head, hint);
    }
    if (!has_masked_rows) return;
    tma_full.wait(pre_clear_phase);
    pre_clear_phase ^= 1;
    clear_rows<kTileRows, kAtoms, Config::kAtomCols>(smem, min(first - row, kRows));
    if (is_elected) full.arrive();
  }

  // The next work tile index, the same in all lanes. Dynamic scheduler: in deterministic mode also the first index is
  // fetched from the semaphore, so that every thread block that the dQ semaphore waits for has started or is done.
  __device__ __forceinline__ int fetch(bool first, int index) const {
    int* const semaphore = launch.tile_count_semaphore;
    const bool is_deterministic = launch.params.dq_semaphore_ptr != nullptr;
    if (first && (semaphore == nullptr || !is_deterministic)) return blockIdx.x;
    if (semaphore == nullptr) return index + gridDim.x;
    const int begin = is_deterministic ? 0 : gridDim.x;
    const int fetched = is_elected ? atomicAdd(semaphore, 1) : 0;
    return begin + __shfl_sync(0xffffffffu, fetched, 0);
  }

  // Fetches, announces (work_full) and loads the work tiles of this thread block.
  __device__ __forceinline__ void run_all() {
    PipelineState<2> work_state;
    int index = fetch(true, 0);
    while (true) {
      storage.work_empty[work_state.stage].wait(work_state.phase ^ 1);
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

  // Prefetches K and V into the L2 cache while the previous work tile still uses their only buffer.
  __device__ __forceinline__ void prefetch_kv(const TmaRows& k_rows, int row, int head) const {
    if (!is_elected) return;
#pragma unroll
    for (int col = 0; col < Config::kHeadDim; col += Config::kAtomCols) {
      for (int first = 0; first < Config::kBlockN; first += Config::kBlockN / Config::kKvParts) {
        for (const CUtensorMap* map : {&launch.k_map, &launch.v_map}) {
          cute::SM90_TMA_LOAD_5D::PREFETCH::copy(map, col, row + first + k_rows.shift, head, k_rows.outer,
                                                 k_rows.origin);
        }
      }
    }
  }

  __device__ __forceinline__ void load_kv(const TmaRows& k_rows, int row, int first_key, int head) {
    constexpr auto kHint = cute::TMA::CacheHintSm90::EVICT_FIRST;
    constexpr int kRows = Config::kBlockN / Config::kKvParts;
    const int stage = kv_state.stage;
#pragma unroll
    for (int i = 0; i < Config::kKvParts; ++i) {
      const int first = i * kRows, offset = first * Config::kAtomCols;
      storage.kv_empty[stage][i].wait(kv_state.phase ^ 1);
      load<kRows, Config::kHeadDim, Config::kBlockN>(launch.k_map, storage.k_full[stage][i], storage.k[stage] + offset,
                                                     k_rows, row + first, first_key, head, kHint);
      load<kRows, Config::kHeadDim, Config::kBlockN>(launch.v_map, storage.v_full[stage][i], storage.v[stage] + offset,
                                                     k_rows, row + first, first_key, head, kHint);
    }
  }

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    using cute::TMA::CacheHintSm90;
    const Flash_bwd_params& params = launch.params;
    const bool is_varlen = params.is_varlen();
    const TmaRows k_rows(is_varlen, tile.batch, tile.k_begin, tile.seqlen_k);
    const TmaRows q_rows(is_varlen, tile.batch, tile.q_begin, tile.seqlen_q);
    const MaskOf<Config> visibility = mask_of<Config>(params, tile);
    const int first_row = first_unmasked_row(visibility);
    const QBlockOrder order = q_block_order<Config>(params, tile);
    const int count = order.count();
    if (count == 0) return;
    QStep at = order.start();
    const int key = tile.n_block * Config::kBlockN;
    if (!is_first && Config::kKvStages == 1) prefetch_kv(k_rows, key, tile.head_k);
    is_first = false;
    for (int i = 0; i < count; ++i) {
      const int stage = state.stage, row = at.m_block * Config::kBlockM;
      storage.q_empty[stage].wait(state.phase ^ 1);
      load<Config::kBlockM, Config::kHeadDim>(launch.q_map, storage.q_full[stage], storage.q[stage], q_rows, row,
                                              first_row, at.head, CacheHintSm90::EVICT_LAST);
      storage.do_empty[stage].wait(state.phase ^ 1);
      load<Config::kBlockM, Config::kHeadDim>(launch.do_map, storage.do_full[stage], storage.dout[stage], q_rows, row,
                                              first_row, at.head, CacheHintSm90::EVICT_LAST);
      if (i == 0) load_kv(k_rows, key, first_unmasked_key(visibility), tile.head_k);
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

// The random bits from which a step computes its dropout mask, by one warp.
template <class Config, class Storage>
__device__ __forceinline__ void store_dropout_bits(const Flash_bwd_params& params, Storage& storage,
                                                   const BwdWorkTile& tile, const QStep& at, int stage) {
  const DropoutMask mask(params, tile.batch, at.head);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int row = lane; row < Config::kBlockM; row += 32) {
    storage.dropout_row_bits[stage][row] = mask.row(at.m_block * Config::kBlockM + row);
  }
#pragma unroll
  for (int pair = lane; pair < Config::kBlockN / 2; pair += 32) {
    storage.dropout_col_bits[stage][pair] = mask.column_pair(tile.n_block * Config::kBlockN + 2 * pair);
  }
}

// The statistics warp: LSE and softmax_d of the rows of each step. Fully masked rows (by position, or by an infinite
// LSE of either sign) and rows beyond the sequence get an LSE of +inf, which makes P 0. The global loads of a step are
// issued before the wait for its buffers. Waits for q_empty, do_empty; arrives on q_full, do_full.
template <class Config, class Storage>
__device__ __forceinline__ void load_statistics(const Flash_bwd_params& params, Storage& storage,
                                                const BwdWorkTile& tile, PipelineState<Config::kStages>& state) {
  constexpr int kRows = Config::kBlockM / 32;  // of each lane
  const int lane = threadIdx.x % 32;
  const QBlockOrder order = q_block_order<Config>(params, tile);
  const int first_row = first_unmasked_row(mask_of<Config>(params, tile));
  QStep at = order.start();
  const int count = order.count();
  for (int i = 0; i < count; ++i) {
    const float* const lse = params.softmax_lse_ptr + lse_offset(params, tile.batch, at.head, tile.q_begin);
    const float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, at.head, tile.q_begin);
    float lse_log2[kRows], softmax_d[kRows];
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = at.m_block * Config::kBlockM + 32 * j + lane;
      const bool valid = row >= first_row && row < tile.seqlen_q;
      lse_log2[j] = valid ? lse_or_inf(lse[row]) * ScoreMod::kLog2e : INFINITY;
      softmax_d[j] = valid ? delta[row] : 0.0f;
    }
    storage.q_empty[state.stage].wait(state.phase ^ 1);
#pragma unroll
    for (int j = 0; j < kRows; ++j) storage.lse_log2[state.stage][32 * j + lane] = lse_log2[j];
    if constexpr (Config::kIsGeneral) {
      if (params.has_dropout) store_dropout_bits<Config>(params, storage, tile, at, state.stage);
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

}  // namespace sm90
}  // namespace flash
