// The order in which the row blocks of a packed batch are handed out.
#pragma once

#include "kernels/common/sequence.h"
#include "plan/work_tile_order.h"

namespace flash {
namespace sm90 {

// Row blocks that see the most keys first, whatever their sequence, then those of rows that belong to no sequence: the
// last ones to be handed out are short. Held by a warp, whose lanes know a sequence each, so that nothing is read
// again.
struct VarlenOrder {
  static constexpr int kSequences = plan::kSortedSequences;
  static constexpr unsigned kAllLanes = 0xffffffffu;

  const Flash_fwd_params& params;
  const int block_m;
  const bool slopes;  // a row block sees `block_m` keys less than the next one of its sequence; else as many
  WorkTile sequence;  // of the lane
  int blocks = 0;     // of it
  int level = 0;      // keys that the last of them sees, in multiples of block_m
  int before = 0;     // row blocks in front of the first sequence
  int all = 0;        // row blocks of a head
  int of_sequences = 0;

  __device__ __forceinline__ VarlenOrder(const Flash_fwd_params& params_, int block_m_, bool used)
      : params(params_), block_m(block_m_), slopes(params_.window.right != kUnbounded) {
    if (!used) return;
    const int lane = threadIdx.x % 32;
    if (lane < params.b) {
      sequence = varlen_segment(params, lane + 1);
      blocks = m_blocks(sequence.seqlen_q);
      level = m_blocks(sequence.seqlen_k);
    }
    of_sequences = __reduce_add_sync(kAllLanes, blocks);
    before = m_blocks(begin_of(1));
    all = of_sequences + before + m_blocks(params.seqlen_q - begin_of(params.b + 1));
  }

  __device__ __forceinline__ int m_blocks(int rows) const { return (rows + block_m - 1) / block_m; }
  __device__ __forceinline__ int begin_of(int segment) const { return params.varlen.segments_q[segment]; }

  // Row blocks of all sequences that see `keys` multiples of block_m keys or more.
  __device__ __forceinline__ int at_least(int keys) const {
    return __reduce_add_sync(kAllLanes, slopes ? clamp(level - keys + 1, 0, blocks) : level >= keys ? blocks : 0);
  }

  // Row blocks of a head.
  __device__ __forceinline__ int count() const { return all; }

  // The row block at place `rank` < count().
  __device__ __forceinline__ WorkTile at(int head, int rank) const {
    if (rank >= of_sequences) return without_sequence(head, rank - of_sequences);
    int low = __reduce_min_sync(kAllLanes, slopes ? level - blocks : level);
    int high = __reduce_max_sync(kAllLanes, level) + 1;
    while (high - low > 1) {  // at_least(low) > rank >= at_least(high)
      const int middle = low + (high - low) / 2;
      (at_least(middle) > rank ? low : high) = middle;
    }
    const int place = rank - at_least(high);
    const int equals = slopes ? low <= level && low > level - blocks : low == level ? blocks : 0;
    int end = equals;  // of the lane's row blocks among those that see as many keys
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int others = __shfl_up_sync(kAllLanes, end, distance);
      if (threadIdx.x % 32 >= distance) end += others;
    }
    const int owner = __ffs(__ballot_sync(kAllLanes, place < end)) - 1;
    WorkTile block;
    block.batch = owner;
    block.segment = owner + 1;
    block.head = head;
    block.q_begin = __shfl_sync(kAllLanes, sequence.q_begin, owner);
    block.seqlen_q = __shfl_sync(kAllLanes, sequence.seqlen_q, owner);
    block.k_begin = __shfl_sync(kAllLanes, sequence.k_begin, owner);
    block.seqlen_k = __shfl_sync(kAllLanes, sequence.seqlen_k, owner);
    set_rows(block, block_m, __shfl_sync(kAllLanes, slopes ? level - low : place - (end - equals), owner));
    return block;
  }

  __device__ __forceinline__ WorkTile without_sequence(int head, int place) const {
    WorkTile block = varlen_segment(params, place < before ? 0 : params.b + 1);
    block.head = head;
    set_rows(block, block_m, place < before ? place : place - before);
    return block;
  }
};

}  // namespace sm90
}  // namespace flash
