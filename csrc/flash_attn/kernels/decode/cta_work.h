// Where a CTA range of the linearised work begins (kv_schedule.h): read from a schedule, or found by a prefix sum over
// all work items.
#pragma once

#include "kernels/decode/request.h"

namespace flash {
namespace decode {

struct CtaWork {
  int64_t cta_blocks = 1;
  int64_t work_item_begin = 0;
  int work_item = 0;  // num_work_items(): the CTA range is empty
  // cta_blocks == 0: kv_cached() of the only request, loaded before everything else to hide its latency.
  int cached = 0;
};

__device__ __forceinline__ int num_work_items(const Flash_kvcache_params& params) { return params.work_items; }

// For a batch with one work item of `work` n_blocks.
__device__ __forceinline__ CtaWork single_item_cta_work(const Flash_kvcache_params& params, int index, int64_t work) {
  CtaWork cta_work;
  cta_work.cta_blocks = blocks_per_cta(work, params.thread_blocks, params.min_blocks_per_cta);
  cta_work.work_item = index * cta_work.cta_blocks < work ? 0 : 1;
  return cta_work;
}

// Inclusive prefix sums over the threads of a block, at most 1024. scratch: one value for each warp.
__device__ __forceinline__ int64_t block_prefix_sum(int64_t value, int64_t* scratch, int64_t& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  if (lane == 31) scratch[warp] = value;
  __syncthreads();
  total = 0;
  for (int i = 0; i < warps; ++i) {
    if (i == warp) value += total;
    total += scratch[i];
  }
  return value;
}

// The work items of one thread of a block: consecutive, so that prefix sums over threads are prefix sums over work
// items.
struct WorkItemRange {
  int begin;
  int end;

  __device__ __forceinline__ WorkItemRange(int work_items, int thread, int threads) {
    const int64_t each = (static_cast<unsigned>(work_items) + threads - 1u) / threads;
    begin = static_cast<int>(min(each * thread, static_cast<int64_t>(work_items)));
    end = static_cast<int>(min(each * (thread + 1), static_cast<int64_t>(work_items)));
  }
};

// Start of CTA range `index` with at most 32 work items, one per lane: every warp finds it without a block barrier.
__device__ __forceinline__ CtaWork find_cta_work_by_warp(const Flash_kvcache_params& params, int index) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int work_items = num_work_items(params), lane = threadIdx.x % 32;
  const int64_t work = lane < work_items ? work_item_blocks(params, lane) : 0;
  int64_t end = work;  // of the lane's work item, in the linearised work
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, end, distance);
    if (lane >= distance) end += below;
  }
  CtaWork cta_work;
  cta_work.cta_blocks =
      blocks_per_cta(__shfl_sync(kAllLanes, end, 31), params.thread_blocks, params.min_blocks_per_cta);
  const unsigned later = __ballot_sync(kAllLanes, end > index * cta_work.cta_blocks);
  cta_work.work_item = later != 0 ? __ffs(later) - 1 : work_items;
  cta_work.work_item_begin = __shfl_sync(kAllLanes, end - work, cta_work.work_item % 32);
  return cta_work;
}

// Start of CTA range `index`; all threads together. scratch: 8-byte words, one for each warp and two more. With one
// work item and no schedule `cta_blocks` stays 0: the code that loads the work item knows its n_blocks.
__device__ __forceinline__ CtaWork find_cta_work(const Flash_kvcache_params& params, int index, int64_t* scratch) {
  const int work_items = num_work_items(params);
  CtaWork cta_work;
  if (params.schedule == nullptr && work_items == 1) {
    cta_work.cta_blocks = 0;
    if (!params.is_varlen()) cta_work.cached = kv_cached(params, 0);
    return cta_work;
  }
  cta_work.work_item = work_items;
  if (params.schedule != nullptr) {
    const SchedEntry entry = reinterpret_cast<const SchedEntry*>(params.schedule + 1)[index];
    cta_work.cta_blocks = max(params.schedule->cta_blocks, int64_t{1});
    cta_work.work_item_begin = entry.work_item_begin;
    cta_work.work_item = min(max(entry.work_item, 0), work_items);
    return cta_work;
  }
  if (work_items <= 32) return find_cta_work_by_warp(params, index);
  const WorkItemRange own(work_items, threadIdx.x, blockDim.x);
  int64_t work = 0;
  for (int work_item = own.begin; work_item < own.end; ++work_item) work += work_item_blocks(params, work_item);
  int64_t total = 0;
  int64_t position = block_prefix_sum(work, scratch, total) - work;
  cta_work.cta_blocks = blocks_per_cta(total, params.thread_blocks, params.min_blocks_per_cta);
  const int64_t target = index * cta_work.cta_blocks;
  if (target >= total) return cta_work;
  int64_t* const found = scratch + blockDim.x / 32;
  if (position <= target && target < position + work) {
    int work_item = own.begin;
    for (; work_item + 1 < own.end; ++work_item) {
      const int64_t next = position + work_item_blocks(params, work_item);
      if (next > target) break;
      position = next;
    }
    found[0] = work_item;
    found[1] = position;
  }
  __syncthreads();
  cta_work.work_item = static_cast<int>(found[0]);
  cta_work.work_item_begin = found[1];
  return cta_work;
}

// The tile in which a CTA range begins.
struct TilePosition {
  int head_tile = 0;
  int64_t tile_begin = 0;
};

// count: n_blocks of each of the work item's tiles. A stale schedule may name one that does not exist.
__device__ __forceinline__ TilePosition first_tile_position(const CtaWork& cta_work, int index, int count) {
  const int64_t offset = max(index * cta_work.cta_blocks - cta_work.work_item_begin, int64_t{0});
  const int64_t head_tile = offset / count;
  return {static_cast<int>(min(head_tile, int64_t{kUnbounded})), cta_work.work_item_begin + head_tile * count};
}

}  // namespace decode
}  // namespace flash
