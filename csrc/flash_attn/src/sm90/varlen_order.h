// The order in which the row blocks of a packed batch are handed out.
#pragma once

#include "common/sequence.h"

namespace flash {
namespace sm90 {

// Row blocks that see the most keys first, whatever their sequence, then those of rows that belong to no sequence: the
// last ones to be handed out are short. Held by a warp, whose lanes have a sequence each.
struct VarlenOrder {
  static constexpr int kSequences = 32;
  static constexpr unsigned kAllLanes = 0xffffffffu;

  const Flash_fwd_params& params;
  const int block_m;
  const bool slopes;  // a row block sees `block_m` keys less than the next one of its sequence; else as many
  int blocks = 0;     // of the lane's sequence
  int level = 0;      // keys that the last of them sees, in multiples of block_m

  __device__ __forceinline__ VarlenOrder(const Flash_fwd_params& params_, int block_m_, bool used)
      : params(params_), block_m(block_m_), slopes(params_.window.right != kUnbounded) {
    RowBlock block;
    block.batch = threadIdx.x % 32;
    if (!used || block.batch >= params.b) return;
    set_key_range(block, params);
    blocks = blocks_of(block.batch + 1);
    level = (block.seqlen_k + block_m - 1) / block_m;
  }

  __device__ __forceinline__ int begin_of(int segment) const {
    return segment_begin(params.varlen.cu_seqlens_q, params.b, params.seqlen_q, segment);
  }
  __device__ __forceinline__ int blocks_of(int segment) const {
    return (max(begin_of(segment + 1) - begin_of(segment), 0) + block_m - 1) / block_m;
  }

  // Row blocks of all sequences that see `keys` multiples of block_m keys or more.
  __device__ __forceinline__ int at_least(int keys) const {
    return __reduce_add_sync(kAllLanes, slopes ? clamp(level - keys + 1, 0, blocks) : level >= keys ? blocks : 0);
  }

  // Row blocks of a head.
  __device__ __forceinline__ int count() const {
    return __reduce_add_sync(kAllLanes, blocks) + blocks_of(0) + blocks_of(params.b + 1);
  }

  // The slot of the row block at place `rank` < count().
  __device__ __forceinline__ int slot(int rank) const {
    const int sequences = __reduce_add_sync(kAllLanes, blocks);
    if (rank >= sequences) return slot_without_sequence(rank - sequences);
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
      const int before = __shfl_up_sync(kAllLanes, end, distance);
      if (threadIdx.x % 32 >= distance) end += before;
    }
    const int owner = __ffs(__ballot_sync(kAllLanes, place < end)) - 1;
    const int from_last = __shfl_sync(kAllLanes, slopes ? level - low : place - (end - equals), owner);
    return varlen_first_slot(begin_of(owner + 1), owner + 1, block_m) + from_last;
  }

  __device__ __forceinline__ int slot_without_sequence(int place) const {
    const int before = blocks_of(0), last = params.b + 1;
    return place < before ? place : varlen_first_slot(begin_of(last), last, block_m) + place - before;
  }
};

}  // namespace sm90
}  // namespace flash
