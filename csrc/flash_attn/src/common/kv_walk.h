// The tiles of a thread block's stretch of the line of work, one after the other.
#pragma once

#include "common/kv_start.h"

namespace flash {

struct KvWalk {
  const Flash_kvcache_params& params;
  const int index;      // of the thread block
  const int64_t share;  // blocks of the line for each thread block
  int item;
  int head = 0;  // K/V head
  int64_t tile_begin = 0;
  KvRequest request;
  KvTokens tokens;
  BlockRange range;
  KvSegment segment;  // this thread block's part of the tile

  __device__ __forceinline__ KvWalk(const Flash_kvcache_params& params_, int index_, const KvStart& start)
      : params(params_), index(index_), share(start.share), item(start.item) {
    if (done()) return;
    load_item();
    const KvPlace place = kv_place(start, index, kv_count(range));
    head = place.head;
    tile_begin = place.tile_begin;
    if (head >= params.h_k) next_item();
    find_segment();
  }

  __device__ __forceinline__ int row_tile() const { return item - request.index * params.row_tiles; }
  __device__ __forceinline__ bool done() const {
    return item >= params.b * params.row_tiles || tile_begin >= (index + 1) * share;
  }
  __device__ __forceinline__ bool whole() const { return segment.from == 0 && segment.to == kv_count(range); }

  // Key blocks of the segment; a tile without keys has none.
  __device__ __forceinline__ int block_begin() const { return range.begin + segment.from; }
  __device__ __forceinline__ int block_end() const { return min(range.begin + segment.to, range.end); }

  __device__ __forceinline__ void next() {
    advance();
    find_segment();
  }

 private:
  __device__ __forceinline__ void load_item() {
    request = kv_request(params, item / params.row_tiles);
    tokens = kv_tokens(params, row_tile());
    range = kv_range(params, tokens, request.seqlen_k);
  }

  __device__ __forceinline__ void next_item() {
    head = 0;
    ++item;
    if (!done()) load_item();
  }

  __device__ __forceinline__ void advance() {
    tile_begin += kv_count(range);
    if (++head == params.h_k) next_item();
  }

  __device__ __forceinline__ void find_segment() {
    while (!done()) {
      segment = kv_segment(params.cuts, range.begin, kv_count(range), tile_begin, share, index);
      if (!segment.empty()) return;
      advance();
    }
  }
};

}  // namespace flash
