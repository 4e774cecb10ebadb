// A warp group of the decode kernel: its step of an n_block, and its barriers.
#pragma once

#include "kernels/decode/config.h"
#include "kernels/sm80/warp_ops.h"
#include "plan/decode_plan.h"

namespace flash {
namespace decode {

// Named barriers other than __syncthreads().
enum NamedBarrier : int { kFirstGroupBarrier = 1 };  // + warp group, for Config::kGroupThreads threads; or + group pair

template <class Config>
__device__ __forceinline__ void sync_group() {
  if constexpr (Config::kGroupWarps == 1) {
    __syncwarp();
  } else {
    sync_named(kFirstGroupBarrier + threadIdx.x / Config::kGroupThreads, Config::kGroupThreads);
  }
}

// The step of this thread's warp group, and the thread's copies. If a tile has a pair of K/V heads, two warp groups
// have the same keys, one of each head, and copy both steps together: a copy then reads neighbouring rows of both
// heads, twice as many consecutive bytes.
template <class Config>
struct GroupStep {
  static_assert(!Config::kMayPairHeads || (Config::kGroups == 4 && Config::kRowsPerIteration % 2 == 0),
                "as written here");

  const int stages;  // of a ring
  const int kept_pair_bit;

  __device__ __forceinline__ explicit GroupStep(const Flash_kvcache_params& params)
      : stages(params.stages), kept_pair_bit(params.tile_heads - 1) {}

  // 1: the tile has two heads.
  __device__ __forceinline__ int pair_bit() const { return Config::kMayPairHeads ? kept_pair_bit : 0; }
  __device__ __forceinline__ static int group() { return threadIdx.x / Config::kGroupThreads; }
  __device__ __forceinline__ int head() const { return group() & pair_bit(); }  // of the tile
  // The group's first key, counted within the n_block.
  __device__ __forceinline__ int first_key() const { return (group() >> pair_bit()) * Config::kStep; }

  // The head of the tile, and the row of an iteration, that this thread copies.
  __device__ __forceinline__ int copy_head() const { return copy_slot() & pair_bit(); }
  __device__ __forceinline__ int copy_row() const {
    return (head() * Config::kRowsPerIteration + copy_slot()) >> pair_bit();
  }

  // Offset from this group's stage to that of the group whose rows this thread copies.
  __device__ __forceinline__ int copy_offset() const {
    return (copy_head() - head()) * stages * Config::kStageElements;
  }

  __device__ __forceinline__ int next_stage(int stage) const { return stage + 1 == stages ? 0 : stage + 1; }

  // Until this thread's copies of the oldest step in flight have landed.
  __device__ __forceinline__ void wait_for_oldest_copies() const {
    constexpr int kUsualStages = plan::kv_residency(Config::kTile, 228 * 1024, 227 * 1024).stages;  // sm_90
    if (stages == kUsualStages) {
      wait_for_copies_but(kUsualStages - 1);
    } else {
      wait_for_copies_but(stages - 1);
    }
  }

  // Synchronises all threads that copy into the group's stages.
  __device__ __forceinline__ void sync_copies() const {
    if constexpr (Config::kMayPairHeads && Config::kEightBit) {  // without branches; it reserves all 16 barriers
      return sync_named(kFirstGroupBarrier + (group() >> pair_bit()), Config::kGroupThreads << pair_bit());
    }
    if (pair_bit() == 0) return sync_group<Config>();
    if (threadIdx.x < Config::kThreads / 2) {  // constants: for a number in a register it would reserve all 16 barriers
      sync_named(kFirstGroupBarrier, Config::kThreads / 2);
    } else {
      sync_named(kFirstGroupBarrier + 1, Config::kThreads / 2);
    }
  }

 private:
  __device__ __forceinline__ static int copy_slot() { return threadIdx.x % 32 / Config::kLanesPerRow; }
};

}  // namespace decode
}  // namespace flash
