// Kernel parameters of the wgmma forward.
#pragma once

#include <cuda.h>

#include "core/fast_div.h"
#include "params/flash.h"
#include "plan/tiles.h"
#include "plan/work_tile_order.h"

namespace flash {
namespace sm90 {

// What a thread block needs first comes first: constants arrive a cache line at a time, and each line that is not in
// the cache yet delays the first loads.
struct FwdLaunch {
  plan::WorkTileOrder order;
  FastDiv heads_of_batch;     // query heads of a sequence
  FastDiv group;              // query heads per K/V head
  FastDiv unmasked_blocks;    // max_unmasked_blocks()
  int page_box_rows;          // rows of a TMA box of paged K and V; 0: no boxes
  int tiles;                  // work tiles of all heads
  int short_tiles;            // of each head, upper bound: tiles that see few keys, candidates for tail tiles
  bool sort_varlen_tiles;     // tiles of a head are ordered by VarlenOrder, empty slots left out
  bool pairs_rows;            // of kDirect: paired_strip(); it fills padding, no other parameter's offset changes
  int* tile_count_semaphore;  // null: static schedule, equally many tiles per consumer group
  KvSplits splits;            // of each work tile; each split is a separate tile
  Flash_fwd_params params;
  CUtensorMap q_map, k_map, v_map, o_map;
  MaskParams mask;       // of kListed
  CUtensorMap bias_map;  // of kBiased
};

// Whether a work tile is one of several splits.
template <class Config>
__device__ __forceinline__ bool is_split_kv(const FwdLaunch& launch) {
  return Config::kSplitKv && launch.splits.count > 1;
}

// Whether the launch may overlap its neighbours by PDL (kernels/common/pdl.h).
template <class Config>
__host__ __device__ __forceinline__ bool overlaps_launches(const FwdLaunch& launch) {
  return Config::kVariant == plan::FwdVariant::kOneWave || (Config::kSplitKv && launch.splits.count > 1);
}

}  // namespace sm90
}  // namespace flash
