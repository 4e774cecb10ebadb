// The producers of the dQ kernel: the load warp, and the dropout warp. Both visit the n_blocks of a work tile.
#pragma once

#include "core/block_range.h"
#include "core/visible_range.h"
#include "kernels/common/dropout.h"
#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bwd_tile_loader.h"
#include "kernels/sm90/bwd_two_pass/storage.h"
#include "kernels/sm90/bwd_work_queue.h"

namespace flash {
namespace sm90 {

// The n_blocks that a work tile's rows see, in descending order, or by list.
template <class Config>
__device__ __forceinline__ auto visited_n_blocks(const Flash_bwd_params& params, const MaskParams& mask,
                                                 const WorkTile& tile) {
  if constexpr (Config::kListed) {
    return block_list(mask.lists, list_index(params, mask, tile, Config::kDqBlockM));
  } else {
    return block_range(mask_of<Config>(params, tile), tile.row_begin, tile.row_end, Config::kDqBlockN);
  }
}

// visit(n_block, is_first).
template <class Visit>
__device__ __forceinline__ void for_each_visited(const BlockRange& n_blocks, const Visit& visit) {
  for (int n_block = n_blocks.end - 1; n_block >= n_blocks.begin; --n_block) {
    const bool is_first = n_block == n_blocks.end - 1;
    visit(n_block, is_first);
  }
}
template <class Visit>
__device__ __forceinline__ void for_each_visited(const BlockList& n_blocks, const Visit& visit) {
  for (int i = 0; i < n_blocks.count(); ++i) visit(n_blocks.at(i).block(), i == 0);
}

template <class Config, class Visit>
__device__ __forceinline__ void for_each_row_tile(const BwdTwoPassLaunch& launch, DqStorage<Config>& storage,
                                                  const Visit& visit) {
  for_each_index(storage, launch.num_tiles, [&](int index) {
    const WorkTile tile = work_tile_at(launch.params, Config::kDqBlockM, index);
    if (!tile.empty()) visit(tile);
  });
}

template <class Config>
struct DqLoader : BwdTileLoader<Config> {
  using BwdTileLoader<Config>::is_elected;
  using Hint = cute::TMA::CacheHintSm90;

  const BwdTwoPassLaunch& launch;
  DqStorage<Config>& storage;
  PipelineState<Config::kDqStages> k_state;
  PipelineState<Config::kDqVStages> v_state;
  uint32_t tile_phase = 0;

  __device__ __forceinline__ DqLoader(const BwdTwoPassLaunch& launch_, DqStorage<Config>& storage_)
      : BwdTileLoader<Config>(storage_.pre_clear_full), launch(launch_), storage(storage_) {}

  __device__ __forceinline__ void run_all() {
    announce_work_tiles(
        storage, launch.num_tiles, is_elected,
        [&](bool is_first, int index) { return fetch_index(launch.tile_count_semaphore, is_first, index); },
        [&](int index) {
          const WorkTile tile = work_tile_at(launch.params, Config::kDqBlockM, index);
          if (!tile.empty()) run(tile);
        });
  }

  __device__ __forceinline__ void run(const WorkTile& tile) {
    const auto n_blocks = visited_n_blocks<Config>(launch.params, launch.mask, tile);
    if (n_blocks.count() == 0) return;
    const bool is_varlen = launch.params.is_varlen();
    const TmaRows k_rows(is_varlen, tile.batch, tile.k_begin, tile.seqlen_k);
    const TmaRows q_rows(is_varlen, tile.batch, tile.q_begin, tile.seqlen_q);
    const int first_key = first_visible_key(mask_of<Config>(launch.params, tile));
    const int head_k = tile.head / launch.params.h_h_k_ratio;
    for_each_visited(n_blocks, [&](int n_block, bool is_first) {
      const auto masked_keys = masked_keys_of(tile, n_block * Config::kDqBlockN, first_key);
      load_k(k_rows, n_block * Config::kDqBlockN, masked_keys, head_k);
      if (is_first) {
        load_rows<Config::kHeadDim>(launch.q_map, storage.q_full, storage.q_empty, storage.q, q_rows, tile);
      }
      load_v(k_rows, n_block * Config::kDqBlockN, masked_keys, head_k);
      if (is_first) {
        load_rows<Config::kHeadDimV>(launch.do_map, storage.do_full, storage.do_empty, storage.dout, q_rows, tile);
      }
    });
    tile_phase ^= 1;
  }

  // As load() takes them: the keys before first_key, or with lists those that no query of the head sees.
  __device__ __forceinline__ auto masked_keys_of(const WorkTile& tile, int key, int first_key) const {
    if constexpr (Config::kListed) {
      const uint32_t* const seen = seen_keys_of(launch.params, launch.mask, tile, tile.head, tile.segment);
      return MarkedRows{unseen_of_lane<Config::kDqBlockN>(seen, key, tile.seqlen_k)};
    } else {
      return first_key;
    }
  }

  template <class Masked>
  __device__ __forceinline__ void load_k(const TmaRows& k_rows, int key, Masked masked_keys, int head_k) {
    const int stage = k_state.stage;
    storage.k_empty[stage].wait(k_state.phase ^ 1);
    this->template load<Config::kDqBlockN, Config::kHeadDim>(launch.k_map, storage.k_full[stage], storage.k[stage],
                                                             k_rows, key, masked_keys, head_k, Hint::EVICT_LAST);
    k_state.advance();
  }

  template <class Masked>
  __device__ __forceinline__ void load_v(const TmaRows& k_rows, int key, Masked masked_keys, int head_k) {
#pragma unroll
    for (int part = 0; part < Config::kVParts; ++part) {
      const int stage = v_state.stage;
      storage.v_empty[stage].wait(v_state.phase ^ 1);
      this->template load<Config::kDqBlockN, Config::kVPartCols>(launch.v_map, storage.v_full[stage], storage.v[stage],
                                                                 k_rows, key, masked_keys, head_k, Hint::EVICT_LAST,
                                                                 part * Config::kVPartCols);
      v_state.advance();
    }
  }

  // Q or dO of both consumers. Fully masked rows may hold anything: no other row's dQ depends on them.
  template <int kCols, int kSmemTile>
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, Barrier (&full)[2], Barrier (&empty)[2],
                                            typename Config::Element (&tiles)[2][kSmemTile], const TmaRows& q_rows,
                                            const WorkTile& tile) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      empty[group].wait(tile_phase ^ 1);
      this->template load<Config::kBlockM, kCols>(map, full[group], tiles[group], q_rows,
                                                  tile.row_begin + group * Config::kBlockM, 0, tile.head,
                                                  Hint::EVICT_FIRST);
    }
  }
};

// The dropout warp: the random bits of the pairs of columns of each K block.
template <class Config>
__device__ __forceinline__ void store_column_bits(const BwdTwoPassLaunch& launch, DqStorage<Config>& storage,
                                                  const WorkTile& tile, PipelineState<Config::kDqStages>& state) {
  static_assert(Config::kDqBlockN == 64, "a pair of columns for each lane");
  const Flash_bwd_params& params = launch.params;
  const auto n_blocks = visited_n_blocks<Config>(params, launch.mask, tile);
  const int lane = threadIdx.x % 32;
  DropoutMask mask;
  if (params.has_dropout) mask = DropoutMask(params, tile.batch, tile.head);
  for_each_visited(n_blocks, [&](int n_block, bool) {
    storage.k_empty[state.stage].wait(state.phase ^ 1);
    if (params.has_dropout) {
      storage.dropout_col_bits[state.stage][lane] = mask.column_pair(n_block * Config::kDqBlockN + 2 * lane);
    }
    storage.k_full[state.stage].arrive();
    state.advance();
  });
}

}  // namespace sm90
}  // namespace flash
