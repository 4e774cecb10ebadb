// Combines the partial results of split tiles. Every CTA boundary that may split a tile has a few CTAs, each with some
// of the rows; they find out whether there is work while the attention kernel still runs (PDL).
#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/decode/output.h"
#include "kernels/decode/split_tile.h"
#include "params/kvcache.h"
#include "plan/tiles.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 128;  // with their registers they fit next to two CTAs of the attention
constexpr int kWarps = kCombineWarps;
static_assert(kThreads == 32 * kWarps);
constexpr int kBatchedLoads = kCombineLoads;

__device__ RowStats load_stats(const Flash_kvcache_params& params, int64_t slot, int row) {
  const float2 pair = *reinterpret_cast<const float2*>(params.partial_stats + 2 * (slot * params.slot_rows + row));
  return {pair.x, pair.y};
}

// A row is spread over the lanes of a warp, kQuads float4 each.
template <int kQuads>
__device__ void load_row(const Flash_kvcache_params& params, int64_t slot, int row, RowValue<kQuads>& value) {
  const float* const from = params.partial_o + (slot * params.slot_rows + row) * params.padded_dim;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
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

// The partial results of a tile, one per lane and 32 at a time; the first ones are looked up before the attention
// writes them.
struct LanePartials {
  int index;
  int slot;        // -1: no partial result
  int first_slot;  // of the tile's first partial result, which exists

  __device__ LanePartials(const Flash_kvcache_params& params, const SplitTile& tile)
      : index(tile.first + static_cast<int>(threadIdx.x % 32)) {
    look_up(params, tile);
    first_slot = max(__shfl_sync(0xffffffffu, slot, 0), 0);  // a tile that is not split has none
  }

  __device__ void next(const Flash_kvcache_params& params, const SplitTile& tile) {
    index += 32;
    look_up(params, tile);
  }

 private:
  __device__ void look_up(const Flash_kvcache_params& params, const SplitTile& tile) {
    slot = index <= tile.last ? partial_slot(params, tile, index) : -1;
  }
};

// How many warps add up one row, and which of them this one is: each takes consecutive ones of every 32 partial
// results.
struct RowWarps {
  int count;
  int index;

  __device__ int partials() const { return 32 / count; }
  __device__ int first_partial() const { return partials() * index; }
};

// Addresses of each lane's row statistics and of a row of the partial results from `first_partial` on, computed before
// the attention ends so that only the loads follow its end. A missing partial result, whose weight is 0, is read as the
// tile's first: a slot that nobody wrote may hold NaN.
template <int kQuads>
struct RowLoads {
  const float2* stats;
  const float4* rows;
  int stats_index;
  int row_index[kBatchedLoads];
  int quad_index[kQuads];  // columns beyond the padded head dim are read as column 0, and not stored

  __device__ RowLoads(const Flash_kvcache_params& params, const LanePartials& partials, int row, int first_partial)
      : stats(reinterpret_cast<const float2*>(params.partial_stats)),
        rows(reinterpret_cast<const float4*>(params.partial_o)) {
    const int present = partials.slot >= 0 ? partials.slot : partials.first_slot;
    stats_index = present * params.slot_rows + row;
    const int quads = params.padded_dim / 4;
#pragma unroll
    for (int i = 0; i < kBatchedLoads; ++i) {
      const int other = __shfl_sync(0xffffffffu, present, first_partial + i);
      row_index[i] = (other * params.slot_rows + row) * quads;
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      const int quad = threadIdx.x % 32 + 32 * i;
      quad_index[i] = quad < quads ? quad : 0;
    }
  }

  // Keeps the compiler from sinking the address arithmetic to the loads.
  __device__ void materialize() {
    asm volatile("" : "+r"(stats_index));
#pragma unroll
    for (int& at : row_index) asm volatile("" : "+r"(at));
  }

  __device__ RowStats load_stats() const {
    const float2 pair = stats[stats_index];
    return {pair.x, pair.y};
  }

  __device__ void load_rows(RowValue<kQuads> (&values)[kBatchedLoads]) const {
#pragma unroll
    for (int i = 0; i < kBatchedLoads; ++i) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) values[i].quads[quad] = rows[row_index[i] + quad_index[quad]];
    }
  }
};

// Adds kBatchedLoads of the 32 partial results to the sum. `weight`: of this lane's partial result.
template <int kQuads>
__device__ void add_rows(RowValue<kQuads>& sum, float weight, int first_partial,
                         const RowValue<kQuads> (&values)[kBatchedLoads]) {
#pragma unroll
  for (int i = 0; i < kBatchedLoads; ++i) {
    sum.add(__shfl_sync(0xffffffffu, weight, first_partial + i), values[i]);
  }
}

// This warp's part of the sum of a row's partial results, and the statistics of all of them, which every warp of the
// row computes for itself.
template <int kQuads>
__device__ RowStats sum_partials(const Flash_kvcache_params& params, const SplitTile& tile, int row,
                                 const RowWarps& warps, LanePartials partials, RowLoads<kQuads> loads,
                                 RowValue<kQuads>& sum) {
  const float scale = params.softmax_scale_log2;
  RowStats stats{-INFINITY, 0.0f};
  bool invalid = false;
  sum.clear();
  RowValue<kQuads> values[kBatchedLoads];
#pragma unroll 1
  for (int remaining = tile.last - tile.first + 1;;) {
    RowStats own = loads.load_stats();
    loads.load_rows(values);
    if (partials.slot < 0) own = RowStats{-INFINITY, 0.0f};
    invalid |= own.invalid();
    const float top = fmaxf(stats.max, warp_max(own.max));
    const float weight = partial_weight(own.max, top, scale);
    const float correction = partial_weight(stats.max, top, scale);
    stats.sum = stats.sum * correction + warp_sum(weight * own.sum);
    stats.max = top;
    sum.scale(correction);
    const int end = min(warps.first_partial() + warps.partials(), remaining);
#pragma unroll 1
    for (int j = warps.first_partial();;) {
      add_rows(sum, weight, j, values);
      j += kBatchedLoads;
      if (j >= end) break;
      RowLoads<kQuads>(params, partials, row, j).load_rows(values);
    }
    remaining -= 32;
    if (remaining <= 0) break;
    partials.next(params, tile);
    loads = RowLoads<kQuads>(params, partials, row, warps.first_partial());
  }
  if (__any_sync(0xffffffffu, invalid)) stats.sum = RowStats::kInvalid;
  return stats;
}

// Ordered reduce: all fixed splits of a row in the order of their keys, as KvEpilogue accumulates them.
template <int kQuads>
__device__ RowStats combine_ordered(const Flash_kvcache_params& params, const SplitTile& tile, int row,
                                    RowValue<kQuads>& sum) {
  RowStats stats{};
  for (int base = tile.first; base <= tile.last; base += kBatchedLoads) {
    RowValue<kQuads> values[kBatchedLoads];
    RowStats split_stats[kBatchedLoads];
#pragma unroll
    for (int i = 0; i < kBatchedLoads; ++i) {
      if (base + i > tile.last) break;
      const int64_t slot = tile.tile * params.max_splits + base + i;
      split_stats[i] = load_stats(params, slot, row);
      load_row(params, slot, row, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatchedLoads; ++i) {
      if (base + i > tile.last) break;
      if (base + i == tile.first) {
        stats = split_stats[i];
        sum = values[i];
        continue;
      }
      RowStats combined = stats;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        combined = stats;
        combine_partials(combined, sum.quads[quad], split_stats[i], values[i].quads[quad], params.softmax_scale_log2);
      }
      stats = combined;
    }
  }
  return stats;
}

// Output addresses of a row, and its sink.
template <class Element, int kQuads>
struct RowOutput {
  OutputAddress<Element> quads[kQuads];
  float sink;

  __device__ RowOutput(const Flash_kvcache_params& params, const SplitTile& tile, int row) {
    const PackedRow at = packed_row(params, tile.head_tile, tile.first_row + row);
    sink = head_sink(params, min(at.head, params.h - 1));  // a tile without rows may lie beyond the last head
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      quads[i] = output_address<Element>(params, tile.queries, at, (threadIdx.x % 32 + 32 * i) * 4);
    }
  }

  __device__ void store(const Flash_kvcache_params& params, const RowStats& stats,
                        const RowValue<kQuads>& value) const {
    const RowEnd end{stats, params.softmax_scale_log2, sink};
#pragma unroll
    for (int i = 0; i < kQuads; ++i) store_output(quads[i], end, value.quads[i]);
  }
};

__device__ int rows_per_block(const Flash_kvcache_params& params) { return kv_combine_rows(params.combines_one_row); }

__device__ int blocks_per_tile(const Flash_kvcache_params& params) {
  return kv_combine_blocks(params.slot_rows, params.combines_one_row);
}

__device__ bool combines_by_tile(const Flash_kvcache_params& params) {
  return !params.is_varlen() && kv_has_few_tiles(params.work_items, params.head_tiles, params.thread_blocks);
}

// Sum over the warps of one row; on return the first warp has it.
template <int kQuads>
__device__ void sum_warps(float4* shared, RowValue<kQuads>& sum) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp > 0) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) shared[((warp - 1) * kQuads + i) * 32 + lane] = sum.quads[i];
  }
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int other = 0; other < kWarps - 1; ++other) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      sum.quads[i] = add_scaled(sum.quads[i], 1.0f, shared[(other * kQuads + i) * 32 + lane]);
    }
  }
}

// The combine after SplitRule::kAnywhere and kEqualSplits.
template <class Element, int kQuads>
__global__ void __launch_bounds__(kThreads, kQuads > 2 ? 2 : 4)
    decode_combine_kernel(const __grid_constant__ Flash_kvcache_params params) {
  allow_next_kernel();  // the attention of the next layer, which waits for this kernel
  // Lengths, schedule and sinks are read before the wait. The attention waited for their writers before it triggered
  // this launch, or it follows an append, which starts only after all older kernels.
  extern __shared__ __align__(16) char smem[];
  const int blocks = blocks_per_tile(params), rows = rows_per_block(params);
  const int index = static_cast<int>(blockIdx.x) / blocks;
  int64_t* const scratch = reinterpret_cast<int64_t*>(smem);
  const SplitTile tile =
      combines_by_tile(params) ? tile_at(params, index, scratch) : tile_split_before(params, index + 1, scratch);
  const int begin = (static_cast<int>(blockIdx.x) - index * blocks) * rows, end = min(begin + rows, tile.rows);
  const bool idle = begin >= end;
  // The first CTA always waits, so that this kernel never ends before the attention has.
  if (idle && blockIdx.x > 0) return;
  const int warp = threadIdx.x / 32;
  const bool splits_row = rows == 1;
  const RowWarps warps = splits_row ? RowWarps{kWarps, warp} : RowWarps{1, 0};
  const int row = min(splits_row ? begin : begin + warp, max(end - 1, 0));
  const bool writes = warps.index == 0 && (splits_row || begin + warp < end);
  const LanePartials partials(params, tile);
  RowLoads<kQuads> loads(params, partials, row, warps.first_partial());
  loads.materialize();
  const RowOutput<Element, kQuads> output(params, tile, row);
  if (splits_row) __syncthreads();  // all reads of the scratch precede its reuse
  wait_for_previous_kernel();
  if (idle) return;
  RowValue<kQuads> sum;
  const RowStats stats = sum_partials(params, tile, row, warps, partials, loads, sum);
  if (splits_row) sum_warps(reinterpret_cast<float4*>(smem), sum);
  if (writes) output.store(params, stats, sum);
}

// The combine after SplitRule::kFixedSplits.
template <class Element, int kQuads>
__global__ void __launch_bounds__(kThreads)
    decode_combine_ordered_kernel(const __grid_constant__ Flash_kvcache_params params) {
  const SplitTile tile = tile_of_fixed_splits(params, blockIdx.x);
  if (tile.rows == 0 && blockIdx.x > 0) return;
  wait_for_previous_kernel();  // reads before it: as in decode_combine_kernel()
  for (int row = threadIdx.x / 32; row < tile.rows; row += kWarps) {
    RowValue<kQuads> sum;
    const RowStats stats = combine_ordered(params, tile, row, sum);
    RowOutput<Element, kQuads>(params, tile, row).store(params, stats, sum);
  }
}

template <class Element, int kQuads>
cudaError_t run(const Flash_kvcache_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  constexpr int kSmemBytes = (kWarps - 1) * kQuads * 32 * sizeof(float4);
  const int64_t blocks =
      kv_combine_grid(params.split_points.rule, params.is_varlen(), params.work_items, params.head_tiles,
                      params.thread_blocks, params.slot_rows, params.combines_one_row);
  if (params.split_points.rule == SplitRule::kFixedSplits) {
    return launch_dependent(decode_combine_ordered_kernel<Element, kQuads>, blocks, kThreads, 0, params, params.device,
                            stream, configured_devices);
  }
  return launch_dependent(decode_combine_kernel<Element, kQuads>, blocks, kThreads, kSmemBytes, params, params.device,
                          stream, configured_devices);
}

template <class Element>
cudaError_t run(const Flash_kvcache_params& params, cudaStream_t stream) {
  static_assert(plan::kMaxHeadDim <= 4 * 128, "the lanes of a warp hold up to four float4 each");
  if (params.padded_dim > 2 * 128) return run<Element, 4>(params, stream);
  return params.padded_dim <= 128 ? run<Element, 1>(params, stream) : run<Element, 2>(params, stream);
}

}  // namespace

cudaError_t run_decode_combine(const Flash_kvcache_params& params, Dtype dtype, cudaStream_t stream) {
  return FP16_SWITCH(dtype, [&] { return run<ElementOf<kDtype>>(params, stream); });
}

}  // namespace flash
