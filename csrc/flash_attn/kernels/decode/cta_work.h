// Where a CTA range of the linearised work begins (kv_schedule.h): read from a schedule, or found by a prefix sum over
// all work items.
#pragma once

#include "kernels/decode/request.h"

namespace flash {
namespace decode {

struct CtaWork {
  int64_t share = 1;
  int64_t item_begin = 0;
  int item = 0;    // kv_items(): the CTA range is empty
  int cached = 0;  // share == 0: kv_cached() of the only request, loaded before everything else to hide its latency
};

__device__ __forceinline__ int kv_items(const Flash_kvcache_params& params) { return params.items; }

// Of a batch with one work item, which has `work` n_blocks.
__device__ __forceinline__ CtaWork cta_work_of_one(const Flash_kvcache_params& params, int index, int64_t work) {
  CtaWork start;
  start.share = blocks_per_cta(work, params.thread_blocks, params.min_blocks_per_cta);
  start.item = index * start.share < work ? 0 : 1;
  return start;
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
struct KvItems {
  int begin;
  int end;

  __device__ __forceinline__ KvItems(int items, int thread, int threads) {
    const int64_t each = (static_cast<unsigned>(items) + threads - 1u) / threads;
    begin = static_cast<int>(min(each * thread, static_cast<int64_t>(items)));
    end = static_cast<int>(min(each * (thread + 1), static_cast<int64_t>(items)));
  }
};

// Start of CTA range `index` with at most 32 work items, one per lane: every warp finds it without a block barrier.
__device__ __forceinline__ CtaWork find_cta_work_of_few(const Flash_kvcache_params& params, int index) {
  constexpr unsigned kAllLanes = 0xffffffffu;
  const int items = kv_items(params), lane = threadIdx.x % 32;
  const int64_t work = lane < items ? kv_item_work(params, lane) : 0;
  int64_t end = work;  // of the lane's work item, in the linearised work
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t below = __shfl_up_sync(kAllLanes, end, distance);
    if (lane >= distance) end += below;
  }
  CtaWork start;
  start.share = blocks_per_cta(__shfl_sync(kAllLanes, end, 31), params.thread_blocks, params.min_blocks_per_cta);
  const unsigned beyond = __ballot_sync(kAllLanes, end > index * start.share);
  start.item = beyond != 0 ? __ffs(beyond) - 1 : items;
  start.item_begin = __shfl_sync(kAllLanes, end - work, start.item % 32);
  return start;
}

// Start of CTA range `index`; all threads together. scratch: 8-byte words, one for each warp and two more. With one
// work item and no schedule `share` stays 0: whoever loads the work item knows its n_blocks.
__device__ __forceinline__ CtaWork find_cta_work(const Flash_kvcache_params& params, int index, int64_t* scratch) {
  const int items = kv_items(params);
  CtaWork start;
  if (params.schedule == nullptr && items == 1) {
    start.share = 0;
    if (!params.is_varlen()) start.cached = kv_cached(params, 0);
    return start;
  }
  start.item = items;
  if (params.schedule != nullptr) {
    const SchedEntry record = reinterpret_cast<const SchedEntry*>(params.schedule + 1)[index];
    start.share = max(params.schedule->share, int64_t{1});
    start.item_begin = record.item_begin;
    start.item = min(max(record.item, 0), items);
    return start;
  }
  if (items <= 32) return find_cta_work_of_few(params, index);
  const KvItems own(items, threadIdx.x, blockDim.x);
  int64_t work = 0;
  for (int item = own.begin; item < own.end; ++item) work += kv_item_work(params, item);
  int64_t total = 0;
  int64_t place = block_prefix_sum(work, scratch, total) - work;
  start.share = blocks_per_cta(total, params.thread_blocks, params.min_blocks_per_cta);
  const int64_t target = index * start.share;
  if (target >= total) return start;
  int64_t* const found = scratch + blockDim.x / 32;
  if (place <= target && target < place + work) {
    int item = own.begin;
    for (; item + 1 < own.end; ++item) {
      const int64_t next = place + kv_item_work(params, item);
      if (next > target) break;
      place = next;
    }
    found[0] = item;
    found[1] = place;
  }
  __syncthreads();
  start.item = static_cast<int>(found[0]);
  start.item_begin = found[1];
  return start;
}

// The tile in which a CTA range begins.
struct KvPlace {
  int head = 0;  // K/V head
  int64_t tile_begin = 0;
};

// count: n_blocks of each of the work item's tiles. A stale schedule may name a head that does not exist.
__device__ __forceinline__ KvPlace kv_state(const CtaWork& start, int index, int count) {
  const int64_t offset = max(index * start.share - start.item_begin, int64_t{0});
  const int64_t head = offset / count;
  return {static_cast<int>(min(head, int64_t{kUnbounded})), start.item_begin + head * count};
}

}  // namespace decode
}  // namespace flash
