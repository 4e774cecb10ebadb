// The parts of tiles in a thread block's stretch of the line of work, one after the other.
#pragma once

#include "common/kv_start.h"

namespace flash {

// A thread block's part of one tile. Sixteen-byte pieces, because it passes through shared memory.
struct alignas(16) KvPart {
  KvRequest request;
  int row_tile = 0;
  int head = 0;  // K/V head
  KvSegment segment;
  int first_block = 0, end_block = 0;  // key blocks of the whole tile; none where the second is not larger

  __device__ __forceinline__ bool empty() const { return end_block <= first_block; }
  __device__ __forceinline__ int count() const { return empty() ? 1 : end_block - first_block; }
  __device__ __forceinline__ bool whole() const { return segment.from == 0 && segment.to == count(); }

  // Key blocks of the part. A tile without keys takes one step like any other, over nothing but zeros.
  __device__ __forceinline__ int block_begin() const { return first_block + segment.from; }
  __device__ __forceinline__ int block_end() const { return first_block + segment.to; }
};

// kPlain: of a dense batch, and tiles are cut anywhere or nowhere.
template <bool kPlain>
struct KvWalk {
  const Flash_kvcache_params& params;
  const int index;  // of the thread block
  KvStart start;
  int64_t tile_begin = 0;
  KvPart part;
  bool begun = false;

  __device__ __forceinline__ KvWalk(const Flash_kvcache_params& params_, int index_, const KvStart& start_)
      : params(params_), index(index_), start(start_) {}

  __device__ __forceinline__ bool done() const { return start.item >= kv_items(params); }

  // To the next part, at the first call to the first one. There is one copy of this code in a kernel: most of its time
  // is spent on fetching instructions.
  __device__ __forceinline__ void next() {
    do {
      bool enters_item = !begun;
      if (begun) {
        tile_begin += part.count();
        if (++part.head == params.h_k) {
          part.head = 0;
          ++start.item;
          enters_item = true;
        }
        if (tile_begin >= (index + 1) * start.share) start.item = kv_items(params);
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
  __device__ __forceinline__ KvSegment find_segment() const {
    if constexpr (kPlain) {
      const int whole_up_to = params.cuts.rule == CutRule::kWhole ? kUnbounded : params.cuts.value;
      return kv_free_segment(whole_up_to, part.count(), tile_begin, start.share, index);
    } else {
      return kv_segment(params.cuts, part.first_block, part.count(), tile_begin, start.share, index);
    }
  }

  __device__ __forceinline__ void load_item() {
    if (!kPlain && params.is_varlen()) {
      load_packed_item();
      if (done()) return;
    } else {
      part.request = start.share == 0
                         ? kv_request(params, 0, start.cached)
                         : kv_request(params, params.row_tiles == 1 ? start.item : start.item / params.row_tiles);
      part.row_tile = start.item - part.request.index * params.row_tiles;
    }
    const KvQueries queries = kv_queries<!kPlain>(params, part.request.index);
    const BlockRange range = kv_range(params, queries, part.row_tile, part.request.seqlen_k);
    part.first_block = range.begin;
    part.end_block = range.end;
  }

  // The next one that has rows.
  __device__ __forceinline__ void load_packed_item() {
    for (; !done(); ++start.item) {
      const KvItem item = packed_item(params, start.item);
      part.request = item.request;
      part.row_tile = item.row_tile;
      const int rows = kv_rows(params, kv_queries<true>(params, part.request.index));
      if (part.row_tile * params.tile_rows < rows) return;
    }
  }

  __device__ __forceinline__ void find_place() {
    if (start.share == 0) start = kv_start_of_one(params, index, static_cast<int64_t>(params.h_k) * part.count());
    const KvPlace place = kv_place(start, index, part.count());
    part.head = min(place.head, params.h_k - 1);
    tile_begin = place.tile_begin;
  }
};

}  // namespace flash
