// What the host hands to the wgmma forward kernel.
#pragma once

#include <cuda.h>

#include "core/fast_div.h"
#include "params/flash.h"
#include "plan/work_tile_order.h"

namespace flash {
namespace sm90 {

struct FwdLaunch {
  Flash_fwd_params params;
  CUtensorMap q_map, k_map, v_map, o_map;
  int page_box_rows;       // of K and V in pages; 0: no boxes
  int tiles;               // row blocks of all heads
  int short_tiles;         // of each head that see few keys, at most: some of them come last of all
  bool sort_varlen_tiles;  // those of a head go by VarlenOrder, some of them not at all
  plan::WorkTileOrder order;
  FastDiv heads_of_batch;     // query heads of a sequence
  FastDiv unmasked_blocks;    // max_unmasked_blocks()
  FastDiv group;              // query heads of a K/V head
  int* tile_count_semaphore;  // null: as many tiles for each team
  KvSplits splits;            // of each row block, which are tiles of their own
};

// Whether a tile is a share of a row block's keys.
template <class Config>
__device__ __forceinline__ bool is_split_kv(const FwdLaunch& launch) {
  return Config::kSplitKv && launch.splits.count > 1;
}

// Whether the launch may overlap the kernels before and behind it (kernels/common/pdl.h).
template <class Config>
__host__ __device__ __forceinline__ bool overlaps_launches(const FwdLaunch& launch) {
  return Config::kVariant == FwdVariant::kOneWave || (Config::kSplitKv && launch.splits.count > 1);
}

}  // namespace sm90
}  // namespace flash
