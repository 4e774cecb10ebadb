// Merges the partial results of the tiles that the KV-cache kernel cut. A few thread blocks, each with its rows, for
// every place where a tile may have been cut; they find out by themselves whether there is something to do, while the
// attention still runs.
#include <atomic>

#include "common/kv_output.h"
#include "common/kv_start.h"
#include "common/launch.h"
#include "common/pdl.h"
#include "kvcache.h"

namespace flash {
namespace {

constexpr int kThreads = 128;  // with their registers they fit beside two thread blocks of the attention
constexpr int kWarps = kThreads / 32;
constexpr int kBatchedLoads = 8;
constexpr int kMaxQuads = 2;  // float4 of a row that one lane holds

// A tile of which several partial results exist.
struct CutTile {
  KvRequest request;
  int head = 0;
  int first_row = 0;  // packed
  int rows = 0;       // 0: nothing to merge
  BlockRange range;
  int64_t tile_begin = 0, share = 1;
  int64_t tile = 0;         // index of the tile, of its runs' slots
  int first = 0, last = 0;  // thread blocks, or runs, that left a partial result; some thread blocks may have none
};

struct Partial {
  int64_t slot;
  bool exists;
};

__device__ Partial partial_of(const Flash_kvcache_params& params, const CutTile& tile, int index) {
  const KvSegment segment =
      kv_segment(params.cuts, tile.range.begin, kv_count(tile.range), tile.tile_begin, tile.share, index);
  return {kv_slot(index, segment), !segment.empty()};
}

__device__ void set_item(const Flash_kvcache_params& params, int item, CutTile& tile) {
  const int row_tile = item % params.row_tiles;
  tile.request = kv_request(params, item / params.row_tiles);
  tile.range = kv_range(params, kv_tokens(params, row_tile), tile.request.seqlen_k);
  tile.first_row = row_tile * params.tile_rows;
}

__device__ int tile_rows(const Flash_kvcache_params& params, const CutTile& tile) {
  return min(kv_rows(params) - tile.first_row, params.tile_rows);
}

// The tile that holds the beginning of thread block `index`'s stretch, if this is the first such place inside of it.
__device__ CutTile tile_cut_before(const Flash_kvcache_params& params, int index, int64_t* scratch) {
  CutTile tile;
  KvStart start = find_kv_start(params, index, scratch);
  if (start.item >= kv_items(params)) return tile;
  set_item(params, start.item, tile);
  const int count = kv_count(tile.range);
  if (start.share == 0) start = kv_start_of_one(params, index, static_cast<int64_t>(params.h_k) * count);
  if (start.item >= kv_items(params)) return tile;
  const KvPlace place = kv_place(start, index, count);
  tile.share = start.share;
  tile.tile_begin = place.tile_begin;
  tile.head = place.head;
  if (place.head >= params.h_k || index * start.share <= place.tile_begin ||
      (index - 1) * start.share > place.tile_begin) {
    return tile;
  }
  tile.first = index - 1;
  const int64_t last = (place.tile_begin + count - 1) / start.share;
  tile.last = static_cast<int>(min(last, static_cast<int64_t>(params.thread_blocks) - 1));
  const KvSegment segment = kv_segment(params.cuts, tile.range.begin, count, tile.tile_begin, tile.share, tile.first);
  if (segment.to < count) tile.rows = tile_rows(params, tile);
  return tile;
}

__device__ CutTile tile_of_runs(const Flash_kvcache_params& params, int64_t index) {
  CutTile tile;
  set_item(params, static_cast<int>(index / params.h_k), tile);
  tile.tile = index;
  tile.head = static_cast<int>(index % params.h_k);
  if (tile.range.count() <= 0) return tile;
  tile.first = tile.range.begin / params.run_blocks;
  tile.last = (tile.range.end - 1) / params.run_blocks;
  if (tile.last > tile.first) tile.rows = tile_rows(params, tile);
  return tile;
}

// A row of a partial result, spread over the lanes of a warp.
struct RowValue {
  float4 quads[kMaxQuads];

  __device__ void clear() {
    for (float4& quad : quads) quad = float4{};
  }
};

__device__ RowStats load_stats(const Flash_kvcache_params& params, int64_t slot, int row) {
  const float2 pair = *reinterpret_cast<const float2*>(params.partial_stats + 2 * (slot * params.slot_rows + row));
  return {pair.x, pair.y};
}

__device__ void load_row(const Flash_kvcache_params& params, int64_t slot, int row, RowValue& value) {
  const float* const from = params.partial_o + (slot * params.slot_rows + row) * params.padded_dim;
#pragma unroll
  for (int i = 0; i < kMaxQuads; ++i) {
    const int col = (threadIdx.x % 32 + 32 * i) * 4;
    value.quads[i] = col < params.padded_dim ? *reinterpret_cast<const float4*>(from + col) : float4{};
  }
}

__device__ float warp_max(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  return value;
}

__device__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

// `count` (up to kBatchedLoads) partial results from that of lane `first` on.
__device__ void load_rows(const Flash_kvcache_params& params, const Partial& partial, int row, int first, int count,
                          RowValue (&values)[kBatchedLoads]) {
#pragma unroll
  for (int i = 0; i < kBatchedLoads; ++i) {
    const int lane = min(first + i, 31);
    const int64_t slot = __shfl_sync(0xffffffffu, partial.slot, lane);
    const bool exists = __shfl_sync(0xffffffffu, static_cast<int>(partial.exists), lane) != 0 && i < count;
    values[i].clear();
    if (exists) load_row(params, slot, row, values[i]);
  }
}

// Every `step`-th partial result of a row from `begin` on, by one warp. The first rows are asked for before their
// weights are known.
__device__ RowStats sum_partials(const Flash_kvcache_params& params, const CutTile& tile, int row, int begin, int step,
                                 RowValue& sum) {
  const float scale = params.softmax_scale_log2;
  RowStats stats{-INFINITY, 0.0f};
  bool refused = false;
  sum.clear();
#pragma unroll 1
  for (int base = begin; base <= tile.last; base += 32 * step) {
    const int own = base + static_cast<int>(threadIdx.x % 32) * step;
    const int count = min((tile.last - base) / step + 1, 32);
    Partial partial{0, false};
    if (own <= tile.last) partial = partial_of(params, tile, own);
    RowStats own_stats{-INFINITY, 0.0f};
    if (partial.exists) own_stats = load_stats(params, partial.slot, row);
    RowValue values[kBatchedLoads];
    load_rows(params, partial, row, 0, count, values);
    refused |= own_stats.refused();
    const float top = fmaxf(stats.max, warp_max(own_stats.max));
    const float weight = partial_weight(own_stats.max, top, scale);
    const float correction = partial_weight(stats.max, top, scale);
    stats.sum = stats.sum * correction + warp_sum(weight * own_stats.sum);
    stats.max = top;
#pragma unroll
    for (float4& quad : sum.quads) quad = scaled(correction, quad);
#pragma unroll 1
    for (int j = 0;;) {
#pragma unroll
      for (int i = 0; i < kBatchedLoads; ++i) {
        const float row_weight = __shfl_sync(0xffffffffu, weight, min(j + i, 31));
#pragma unroll
        for (int quad = 0; quad < kMaxQuads; ++quad) {
          sum.quads[quad] = add_scaled(sum.quads[quad], j + i < count ? row_weight : 0.0f, values[i].quads[quad]);
        }
      }
      j += kBatchedLoads;
      if (j >= count) break;
      load_rows(params, partial, row, j, count - j, values);
    }
  }
  if (__any_sync(0xffffffffu, refused)) stats.sum = RowStats::kRefused;
  return stats;
}

// All runs of a row in the order of their keys, as KvEpilogue carries them.
__device__ RowStats fold_runs(const Flash_kvcache_params& params, const CutTile& tile, int row, RowValue& sum) {
  RowStats stats{};
  for (int base = tile.first; base <= tile.last; base += kBatchedLoads) {
    RowValue values[kBatchedLoads];
    RowStats run_stats[kBatchedLoads];
#pragma unroll
    for (int i = 0; i < kBatchedLoads; ++i) {
      if (base + i > tile.last) break;
      const int64_t slot = tile.tile * params.max_runs + base + i;
      run_stats[i] = load_stats(params, slot, row);
      load_row(params, slot, row, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatchedLoads; ++i) {
      if (base + i > tile.last) break;
      if (base + i == tile.first) {
        stats = run_stats[i];
        sum = values[i];
        continue;
      }
      RowStats merged = stats;
#pragma unroll
      for (int quad = 0; quad < kMaxQuads; ++quad) {
        merged = stats;
        merge_partials(merged, sum.quads[quad], run_stats[i], values[i].quads[quad], params.softmax_scale_log2);
      }
      stats = merged;
    }
  }
  return stats;
}

template <class Element>
__device__ void write_row(const Flash_kvcache_params& params, const CutTile& tile, int row, const RowStats& stats,
                          const RowValue& value) {
  const PackedRow at = packed_row(params, tile.head, tile.first_row + row);
#pragma unroll
  for (int i = 0; i < kMaxQuads; ++i) {
    const int col = (threadIdx.x % 32 + 32 * i) * 4;
    if (col < params.padded_dim) {
      write_output_row<Element>(params, tile.request.index, at, col, stats, value.quads[i]);
    }
  }
}

// Several warps share the partial results of a row, and the first of them adds up what they found. Rows [begin, end),
// at most one for each warp.
template <class Element>
__device__ void merge_shared_rows(const Flash_kvcache_params& params, const CutTile& tile, int begin, int end,
                                  char* smem) {
  RowStats* const shared_stats = reinterpret_cast<RowStats*>(smem);
  float4* const shared_quads = reinterpret_cast<float4*>(shared_stats + kWarps);  // (kWarps, kMaxQuads, 32)
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int helpers = kWarps / (end - begin);
  const int row = begin + warp / helpers, helper = warp % helpers;
  RowValue sum;
  RowStats stats{-INFINITY, 0.0f};
  sum.clear();
  if (row < end) stats = sum_partials(params, tile, row, tile.first + helper, helpers, sum);
  if (lane == 0) shared_stats[warp] = stats;
#pragma unroll
  for (int i = 0; i < kMaxQuads; ++i) shared_quads[(warp * kMaxQuads + i) * 32 + lane] = sum.quads[i];
  __syncthreads();
  if (row >= end || helper != 0) return;
  for (int other = warp + 1; other < warp + helpers; ++other) {
    RowStats merged = stats;
#pragma unroll
    for (int i = 0; i < kMaxQuads; ++i) {
      merged = stats;
      merge_partials(merged, sum.quads[i], shared_stats[other], shared_quads[(other * kMaxQuads + i) * 32 + lane],
                     params.softmax_scale_log2);
    }
    stats = merged;
  }
  write_row<Element>(params, tile, row, stats, sum);
}

// Rows of a tile for each thread block: one where there are few, so that all their partial results are read at once.
__host__ __device__ int rows_per_block(const Flash_kvcache_params& params) {
  return params.slot_rows <= 2 * kWarps ? 1 : kWarps;
}

__host__ __device__ int blocks_per_tile(const Flash_kvcache_params& params) {
  return (params.slot_rows + rows_per_block(params) - 1) / rows_per_block(params);
}

// Tiles that were cut anywhere.
template <class Element>
__global__ void __launch_bounds__(kThreads, 4)
    kvcache_merge_kernel(const __grid_constant__ Flash_kvcache_params params) {
  extern __shared__ __align__(16) char smem[];
  const int blocks = blocks_per_tile(params);
  const int place = static_cast<int>(blockIdx.x) / blocks;
  const CutTile tile = tile_cut_before(params, place + 1, reinterpret_cast<int64_t*>(smem));
  const int begin = (static_cast<int>(blockIdx.x) - place * blocks) * rows_per_block(params);
  // The first thread block waits in any case, so that this kernel never ends before the attention has.
  if (begin >= tile.rows && blockIdx.x > 0) return;
  wait_for_previous_kernel();
  if (begin >= tile.rows) return;
  __syncthreads();
  merge_shared_rows<Element>(params, tile, begin, min(begin + rows_per_block(params), tile.rows), smem);
}

// Tiles that were cut between their runs.
template <class Element>
__global__ void __launch_bounds__(kThreads) kvcache_fold_kernel(const __grid_constant__ Flash_kvcache_params params) {
  const CutTile tile = tile_of_runs(params, blockIdx.x);
  if (tile.rows == 0 && blockIdx.x > 0) return;
  wait_for_previous_kernel();
  for (int row = threadIdx.x / 32; row < tile.rows; row += kWarps) {
    RowValue sum;
    const RowStats stats = fold_runs(params, tile, row, sum);
    write_row<Element>(params, tile, row, stats, sum);
  }
}

template <class Element>
cudaError_t run(const Flash_kvcache_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  constexpr int kSmemBytes = kWarps * (sizeof(RowStats) + kMaxQuads * 32 * sizeof(float4));
  if (params.cuts.rule == CutRule::kChunks) {
    const int64_t tiles = static_cast<int64_t>(params.b) * params.row_tiles * params.h_k;
    return launch_dependent(kvcache_fold_kernel<Element>, tiles, kThreads, 0, params, params.device, stream,
                            configured_devices);
  }
  const int64_t blocks = static_cast<int64_t>(params.thread_blocks - 1) * blocks_per_tile(params);
  return launch_dependent(kvcache_merge_kernel<Element>, blocks, kThreads, kSmemBytes, params, params.device, stream,
                          configured_devices);
}

}  // namespace

template <>
cudaError_t run_kvcache_merge_<Dtype::kFp16>(const Flash_kvcache_params& params, cudaStream_t stream) {
  return run<ElementOf<Dtype::kFp16>>(params, stream);
}

template <>
cudaError_t run_kvcache_merge_<Dtype::kBf16>(const Flash_kvcache_params& params, cudaStream_t stream) {
  return run<ElementOf<Dtype::kBf16>>(params, stream);
}

}  // namespace flash
