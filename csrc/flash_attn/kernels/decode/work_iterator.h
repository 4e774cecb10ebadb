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
  int head_tile = 0;
  BlockSpan span;
  int first_block = 0, end_block = 0;  // n_blocks of the whole tile; fully masked where end_block <= first_block

  __device__ __forceinline__ bool empty() const { return end_block <= first_block; }
  __device__ __forceinline__ int count() const { return empty() ? 1 : end_block - first_block; }
  __device__ __forceinline__ bool whole() const { return span.from == 0 && span.to == count(); }

  // n_blocks of the part. A fully masked tile takes one step like any other, over zeros.
  __device__ __forceinline__ int block_begin() const { return first_block + span.from; }
  __device__ __forceinline__ int block_end() const { return first_block + span.to; }
};

// kPlain: of a dense batch with fewer than kMaxBlocks32 n_blocks, under SplitRule::kAnywhere or kNowhere.
template <bool kPlain>
struct WorkIterator {
  using Index = std::conditional_t<kPlain, int, int64_t>;  // offsets in the linearised work

  const Flash_kvcache_params& params;
  const int index;   // of the CTA
  Index cta_blocks;  // 0: follows from the only work item
  Index tile_begin;
  int work_item;
  int cached;
  WorkPart part;
  bool started = false;

  __device__ __forceinline__ WorkIterator(const Flash_kvcache_params& params_, int index_, const CtaWork& cta_work)
      : params(params_),
        index(index_),
        cta_blocks(static_cast<Index>(cta_work.cta_blocks)),
        tile_begin(static_cast<Index>(cta_work.work_item_begin)),
        work_item(cta_work.work_item),
        cached(cta_work.cached) {}

  __device__ __forceinline__ bool done() const { return work_item >= num_work_items(params); }

  // To the next part; the first call goes to the first one. One copy of this code per kernel, because most of its time
  // is instruction fetch.
  __device__ __forceinline__ void next() {
    do {
      bool enters_work_item = !started;
      if (started) {
        tile_begin += part.count();
        if (++part.head_tile == params.head_tiles) {
          part.head_tile = 0;
          ++work_item;
          enters_work_item = true;
        }
        if (tile_begin >= (index + 1) * cta_blocks) work_item = num_work_items(params);
      }
      if (done()) return;
      if (enters_work_item) load_work_item();
      if (done()) return;
      if (!started) find_first_tile();
      if (done()) return;
      started = true;
      part.span = find_span();
    } while (part.span.empty());
  }

 private:
  __device__ __forceinline__ BlockSpan find_span() const {
    if constexpr (kPlain) {
      return block_span_anywhere(params.split_points, part.count(), tile_begin, cta_blocks, index);
    } else {
      return block_span(params.split_points, part.first_block, part.count(), tile_begin, cta_blocks, index);
    }
  }

  __device__ __forceinline__ void load_work_item() {
    if (!kPlain && params.is_varlen()) {
      load_packed_work_item();
      if (done()) return;
    } else {
      const int request = params.row_tiles == 1 ? work_item : work_item / params.row_tiles;
      part.request = kv_request<!kPlain>(params, request, cta_blocks == 0 ? cached : kv_cached(params, request));
      part.row_tile = work_item - part.request.index * params.row_tiles;
    }
    const KvQueries queries = kv_queries<!kPlain>(params, part.request.index);
    const BlockRange range = kv_range(params, queries, part.row_tile, part.request.seqlen_k);
    part.first_block = range.begin;
    part.end_block = range.end;
  }

  // The next work item that has rows.
  __device__ __forceinline__ void load_packed_work_item() {
    for (; !done(); ++work_item) {
      const WorkItem next_item = packed_work_item(params, work_item);
      part.request = next_item.request;
      part.row_tile = next_item.row_tile;
      const int rows = kv_rows(params, kv_queries<true>(params, part.request.index));
      if (part.row_tile * params.tile_rows < rows) return;
    }
  }

  // n_blocks per CTA of a single work item, and the tile in which the CTA range begins.
  __device__ __forceinline__ void find_first_tile() {
    if (cta_blocks == 0) {
      const Index work = static_cast<Index>(params.head_tiles) * part.count();
      cta_blocks = max(divide(work + params.thread_blocks - 1, params.thread_blocks),
                       static_cast<Index>(params.min_blocks_per_cta));
      if (index * cta_blocks >= work) work_item = 1;
    }
    const Index head_tile = divide(max(index * cta_blocks - tile_begin, Index{0}), part.count());
    part.head_tile = static_cast<int>(min(head_tile, static_cast<Index>(params.head_tiles - 1)));
    tile_begin += head_tile * part.count();
  }

  __device__ __forceinline__ static Index divide(Index value, int divisor) {
    using Unsigned = std::make_unsigned_t<Index>;
    return static_cast<Index>(static_cast<Unsigned>(value) / static_cast<unsigned>(divisor));
  }
};

}  // namespace decode
}  // namespace flash
