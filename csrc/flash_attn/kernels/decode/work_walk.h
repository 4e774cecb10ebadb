// Iterates over the work parts in a CTA's range of the linearised work.
#pragma once

#include <type_traits>

#include "kernels/decode/cta_work.h"

namespace flash {
namespace decode {

// A CTA's n_blocks of one tile. Aligned to 16-byte vectors, because it passes through shared memory.
struct alignas(16) WorkPart {
  KvRequest request;
  int row_tile = 0;
  int head = 0;  // K/V head
  BlockSpan segment;
  int first_block = 0, end_block = 0;  // n_blocks of the whole tile; fully masked where end_block <= first_block

  __device__ __forceinline__ bool empty() const { return end_block <= first_block; }
  __device__ __forceinline__ int count() const { return empty() ? 1 : end_block - first_block; }
  __device__ __forceinline__ bool whole() const { return segment.from == 0 && segment.to == count(); }

  // n_blocks of the part. A fully masked tile takes one step like any other, over zeros.
  __device__ __forceinline__ int block_begin() const { return first_block + segment.from; }
  __device__ __forceinline__ int block_end() const { return first_block + segment.to; }
};

// kPlain: of a dense batch with fewer than kMostShortPlaces n_blocks, under SplitRule::kAnywhere or kWhole.
template <bool kPlain>
struct WorkWalk {
  using Place = std::conditional_t<kPlain, int, int64_t>;  // offsets in the linearised work

  const Flash_kvcache_params& params;
  const int index;  // of the CTA
  Place share;      // 0: follows from the only work item
  Place tile_begin;
  int item;
  int cached;
  WorkPart part;
  bool begun = false;

  __device__ __forceinline__ WorkWalk(const Flash_kvcache_params& params_, int index_, const CtaWork& start)
      : params(params_),
        index(index_),
        share(static_cast<Place>(start.share)),
        tile_begin(static_cast<Place>(start.item_begin)),
        item(start.item),
        cached(start.cached) {}

  __device__ __forceinline__ bool done() const { return item >= kv_items(params); }

  // To the next part; the first call goes to the first one. One copy of this code per kernel, because most of its time
  // is instruction fetch.
  __device__ __forceinline__ void next() {
    do {
      bool enters_item = !begun;
      if (begun) {
        tile_begin += part.count();
        if (++part.head == params.h_k) {
          part.head = 0;
          ++item;
          enters_item = true;
        }
        if (tile_begin >= (index + 1) * share) item = kv_items(params);
      }
      if (done()) return;
      if (enters_item) load_item();
      if (done()) return;
      if (!begun) find_place();
      if (done()) return;
      begun = true;
      part.segment = find_segment();
    } while (part.segment.empty());
  }

 private:
  __device__ __forceinline__ BlockSpan find_segment() const {
    if constexpr (kPlain) {
      return free_block_span(params.split_points, part.count(), tile_begin, share, index);
    } else {
      return block_span(params.split_points, part.first_block, part.count(), tile_begin, share, index);
    }
  }

  __device__ __forceinline__ void load_item() {
    if (!kPlain && params.is_varlen()) {
      load_packed_item();
      if (done()) return;
    } else {
      const int request = params.row_tiles == 1 ? item : item / params.row_tiles;
      part.request = kv_request<!kPlain>(params, request, share == 0 ? cached : kv_cached(params, request));
      part.row_tile = item - part.request.index * params.row_tiles;
    }
    const KvQueries queries = kv_queries<!kPlain>(params, part.request.index);
    const BlockRange range = kv_range(params, queries, part.row_tile, part.request.seqlen_k);
    part.first_block = range.begin;
    part.end_block = range.end;
  }

  // The next work item that has rows.
  __device__ __forceinline__ void load_packed_item() {
    for (; !done(); ++item) {
      const KvItem found = packed_item(params, item);
      part.request = found.request;
      part.row_tile = found.row_tile;
      const int rows = kv_rows(params, kv_queries<true>(params, part.request.index));
      if (part.row_tile * params.tile_rows < rows) return;
    }
  }

  // n_blocks per CTA of a single work item, and the tile in which the CTA range begins.
  __device__ __forceinline__ void find_place() {
    if (share == 0) {
      const Place work = static_cast<Place>(params.h_k) * part.count();
      share = max(divided(work + params.thread_blocks - 1, params.thread_blocks),
                  static_cast<Place>(params.min_blocks_per_cta));
      if (index * share >= work) item = 1;
    }
    const Place head = divided(max(index * share - tile_begin, Place{0}), part.count());
    part.head = static_cast<int>(min(head, static_cast<Place>(params.h_k - 1)));
    tile_begin += head * part.count();
  }

  __device__ __forceinline__ static Place divided(Place value, int divisor) {
    using Unsigned = std::make_unsigned_t<Place>;
    return static_cast<Place>(static_cast<Unsigned>(value) / static_cast<unsigned>(divisor));
  }
};

}  // namespace decode
}  // namespace flash
