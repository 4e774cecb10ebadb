// Shared memory of a team of the wgmma forward: tiles, barriers, and who waits for whom at each of them.
#pragma once

#include "common/sequence.h"
#include "sm90/barrier.h"
#include "sm90/fwd_config.h"
#include "sm90/ring.h"

namespace flash {
namespace sm90 {

template <class Config>
struct FwdStorage {
  using Element = typename Config::Element;

  alignas(1024) Element q[Config::kQStages][Config::kWarpGroups][Config::kSmemQ];
  alignas(1024) Element k[Config::kKvStages][Config::kSmemKv];
  alignas(1024) Element v[Config::kKvStages][Config::kSmemKv];

  // full: 1 arrival and the bytes of the tile; from pages, one of each lane that copied. empty: one arrival of each
  // warp that read it; of tile_empty, of each lane.
  Barrier k_full[Config::kKvStages], k_empty[Config::kKvStages];
  Barrier v_full[Config::kKvStages], v_empty[Config::kKvStages];
  Barrier q_full[Config::kQStages][Config::kWarpGroups], q_empty[Config::kQStages][Config::kWarpGroups];
  // The row block that the scheduler hands to the loading warps and to the consumers.
  Barrier tile_full, tile_empty;
  RowBlock tile;  // an empty block says that there are no more

  // By one thread, before Barrier::fence_init().
  __device__ __forceinline__ void init_barriers(bool is_paged) {
    const int loading_warps = is_paged ? 3 : 1;
    for (int i = 0; i < Config::kKvStages; ++i) {
      k_full[i].init(is_paged ? 32 : 1);
      v_full[i].init(is_paged ? 32 : 1);
      k_empty[i].init(Config::kConsumerWarps);
      v_empty[i].init(Config::kConsumerWarps);
    }
    for (int i = 0; i < Config::kQStages; ++i) {
      for (int group = 0; group < Config::kWarpGroups; ++group) {
        q_full[i][group].init(1);
        q_empty[i][group].init(4);
      }
    }
    tile_full.init(1);
    tile_empty.init(32 * (Config::kConsumerWarps + loading_warps));
  }
};

// The row blocks of a team, one after the other: its scheduler warp pushes, its other warps take.
template <class Config>
struct TileQueue {
  FwdStorage<Config>& storage;
  uint32_t phase = 0;

  __device__ __forceinline__ explicit TileQueue(FwdStorage<Config>& storage_) : storage(storage_) {}

  // Waits until everybody has taken the last block.
  __device__ __forceinline__ void wait_until_taken() const { storage.tile_empty.wait(phase ^ 1); }

  __device__ __forceinline__ void push(const RowBlock& block) {
    if (threadIdx.x % 32 == 0) {
      storage.tile = block;
      storage.tile_full.arrive();
    }
    __syncwarp();
    phase ^= 1;
  }

  // Every lane says for itself that it has read.
  __device__ __forceinline__ RowBlock take() {
    storage.tile_full.wait(phase);
    phase ^= 1;
    const RowBlock block = storage.tile;
    storage.tile_empty.arrive();
    return block;
  }
};

}  // namespace sm90
}  // namespace flash
