// The statistics warp of the wgmma backward: LSE, softmax_d, random bits of dropout and listed keys of each step.
#pragma once

#include "core/bwd_schedule.h"
#include "core/visible_range.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/mask.h"
#include "kernels/common/score_mod.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/tma/pipeline_state.h"

namespace flash {
namespace sm90 {

using namespace tma;

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

// LSE and softmax_d of a lane's rows in a step by list, 32 apart, and with `keys_of_tile` which keys of the work tile
// they see by ranges and window. No address and no branch depends on a load, so that all of them are on their way at
// once.
template <int kRows>
__device__ __forceinline__ void load_listed_rows(const Flash_bwd_params& params, const MaskParams& mask,
                                                 const BwdWorkTile& tile, const QStep& at, const float* lse,
                                                 const float* delta, float (&lse_log2)[kRows],
                                                 float (&softmax_d)[kRows], int first_key, bool keys_of_tile,
                                                 TileIntervals (&tile_keys)[kRows]) {
  const int first = at.m_block * 32 * kRows, lane = threadIdx.x % 32;
  const uint32_t* const seen = seen_rows_of(params, mask, tile, at.head) + first / kMaskWordKeys;
  const MaskFactors factors = factors_of(params, mask.factors, tile, at.head);
  uint32_t words[kRows];
  Intervals keys[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int row = min(first + 32 * j + lane, tile.seqlen_q - 1);
    lse_log2[j] = lse[row];
    softmax_d[j] = delta[row];
    words[j] = seen[j];
    keys[j] = {{0, 0}, {tile.seqlen_k, 0}};
    if (keys_of_tile && factors.query_ranges != nullptr) keys[j] = factors.keys_of(row);
  }
  if (keys_of_tile) {
    const ColBounds window = Visibility{tile.seqlen_q, tile.seqlen_k, params.window}.bounds(0);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      const int row = first + 32 * j + lane, end = min(window.key_end(row), tile.seqlen_k);
      tile_keys[j] = TileIntervals::of(keys[j], window.key_begin(row), end, first_key);
    }
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const bool valid = first + 32 * j + lane < tile.seqlen_q && (words[j] >> lane & 1u);
    lse_log2[j] = valid ? lse_or_inf(lse_log2[j]) * ScoreMod::kLog2e : INFINITY;
    softmax_d[j] = valid ? softmax_d[j] : 0.0f;
  }
}

// LSE and softmax_d of the rows of each step. Fully masked rows (by position, by list, or by an infinite LSE of either
// sign) and rows beyond the sequence get an LSE of +inf, which makes P 0. The global loads of a step are
// issued before the wait for its buffers. Waits for q_empty, do_empty; arrives on q_full, do_full.
template <class Config, class Launch, class Storage>
__device__ __forceinline__ void load_statistics(const Launch& launch, Storage& storage, const BwdWorkTile& tile,
                                                PipelineState<Config::kStages>& state) {
  const Flash_bwd_params& params = launch.params;
  constexpr int kRows = Config::kBlockM / 32;  // of each lane
  const int lane = threadIdx.x % 32;
  const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
  const int first_row = first_visible_row(mask_of<Config>(params, tile));
  BwdStep<Config> at = order.start();
  const int count = order.count();
  for (int i = 0; i < count; ++i) {
    const float* const lse = params.softmax_lse_ptr + lse_offset(params, tile.batch, at.head, tile.q_begin);
    const float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, at.head, tile.q_begin);
    float lse_log2[kRows], softmax_d[kRows];
    TileIntervals tile_keys[kRows];
    bool is_partial = false;
    if constexpr (Config::kListed) {
      if constexpr (Config::kPassesSteps) is_partial = !at.entry.has_whole_strips(Config::kBlockN / kMaskStrip);
      load_listed_rows(params, launch.mask, tile, at, lse, delta, lse_log2, softmax_d, tile.n_block * Config::kBlockN,
                       is_partial, tile_keys);
    } else {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int row = at.m_block * Config::kBlockM + 32 * j + lane;
        const bool valid = row >= first_row && row < tile.seqlen_q;
        lse_log2[j] = valid ? lse_or_inf(lse[row]) * ScoreMod::kLog2e : INFINITY;
        softmax_d[j] = valid ? delta[row] : 0.0f;
      }
    }
    storage.q_empty[state.stage].wait(state.phase ^ 1);
#pragma unroll
    for (int j = 0; j < kRows; ++j) storage.lse_log2[state.stage][32 * j + lane] = lse_log2[j];
    if constexpr (Config::kMayDrop) {
      if (params.has_dropout) store_dropout_bits<Config>(params, storage, tile, at, state.stage);
    }
    if constexpr (Config::kPassesSteps) {
      if (lane == 0) storage.steps[state.stage] = {at.head, at.entry};
      if (is_partial) {
#pragma unroll
        for (int j = 0; j < kRows; ++j) storage.tile_keys[state.stage][32 * j + lane] = tile_keys[j];
      }
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
