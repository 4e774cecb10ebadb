// Order of a packed batch's work tiles: longest first.
#pragma once

#include "kernels/common/sequence.h"
#include "plan/work_tile_order.h"

namespace flash {
namespace sm90 {

// Tiles that see the most keys first, whatever their sequence, then tiles of rows outside any sequence: the last tiles
// handed out are short. Held by a warp, one sequence a lane, so that lengths are read once.
struct VarlenOrder {
  static constexpr int kSequences = plan::kSortedSequences;
  static constexpr unsigned kAllLanes = 0xffffffffu;

  const Flash_fwd_params& params;
  const int block_m;
  const bool grows;    // a tile sees block_m keys fewer than the next one of its sequence; otherwise the same number
  WorkTile sequence;   // this lane's
  int tiles = 0;       // of that sequence
  int key_blocks = 0;  // keys that its last tile sees, in multiples of block_m
  int leading = 0;     // tiles before the first sequence
  int total = 0;       // tiles of a head
  int in_sequences = 0;

  __device__ __forceinline__ VarlenOrder(const Flash_fwd_params& params_, int block_m_, bool enabled)
      : params(params_), block_m(block_m_), grows(params_.window.may_mask_right()) {
    if (!enabled) return;
    const int lane = threadIdx.x % 32;
    if (lane < params.b) {
      sequence = varlen_segment(params, lane + 1);
      tiles = m_blocks(sequence.seqlen_q);
      key_blocks = m_blocks(sequence.seqlen_k);
    }
    in_sequences = __reduce_add_sync(kAllLanes, tiles);
    leading = m_blocks(begin_of(1));
    total = in_sequences + leading + m_blocks(params.seqlen_q - begin_of(params.b + 1));
  }

  __device__ __forceinline__ int m_blocks(int rows) const { return (rows + block_m - 1) / block_m; }
  __device__ __forceinline__ int begin_of(int segment) const { return params.varlen.segments_q[segment]; }

  // Tiles of all sequences that see at least `keys` multiples of block_m keys.
  __device__ __forceinline__ int at_least(int keys) const {
    return __reduce_add_sync(kAllLanes, grows                ? clamp(key_blocks - keys + 1, 0, tiles)
                                        : key_blocks >= keys ? tiles
                                                             : 0);
  }

  // Tiles of a head.
  __device__ __forceinline__ int count() const { return total; }

  // The tile of rank `rank` < count().
  __device__ __forceinline__ WorkTile at(int head, int rank) const {
    if (rank >= in_sequences) return without_sequence(head, rank - in_sequences);
    int low = __reduce_min_sync(kAllLanes, grows ? key_blocks - tiles : key_blocks);
    int high = __reduce_max_sync(kAllLanes, key_blocks) + 1;
    while (high - low > 1) {  // at_least(low) > rank >= at_least(high)
      const int middle = low + (high - low) / 2;
      (at_least(middle) > rank ? low : high) = middle;
    }
    const int index = rank - at_least(high);
    const int equal = grows ? low <= key_blocks && low > key_blocks - tiles : low == key_blocks ? tiles : 0;
    int end = equal;  // prefix sum over lanes of tiles that see equally many keys
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int others = __shfl_up_sync(kAllLanes, end, distance);
      if (threadIdx.x % 32 >= distance) end += others;
    }
    const int owner = __ffs(__ballot_sync(kAllLanes, index < end)) - 1;
    WorkTile tile;
    tile.batch = owner;
    tile.segment = owner + 1;
    tile.head = head;
    tile.q_begin = __shfl_sync(kAllLanes, sequence.q_begin, owner);
    tile.seqlen_q = __shfl_sync(kAllLanes, sequence.seqlen_q, owner);
    tile.k_begin = __shfl_sync(kAllLanes, sequence.k_begin, owner);
    tile.seqlen_k = __shfl_sync(kAllLanes, sequence.seqlen_k, owner);
    set_rows(tile, block_m, __shfl_sync(kAllLanes, grows ? key_blocks - low : index - (end - equal), owner));
    return tile;
  }

  __device__ __forceinline__ WorkTile without_sequence(int head, int index) const {
    WorkTile tile = varlen_segment(params, index < leading ? 0 : params.b + 1);
    tile.head = head;
    set_rows(tile, block_m, index < leading ? index : index - leading);
    return tile;
  }
};

}  // namespace sm90
}  // namespace flash
