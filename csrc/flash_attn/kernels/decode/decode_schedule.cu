// Makes the schedule of attention over a KV cache once for all layers of a step (kv_schedule.h).
#include <atomic>

#include "kernels/common/launch.h"
#include "kernels/common/prepare_varlen.h"
#include "kernels/decode/cta_work.h"
#include "params/kvcache.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 512;
static_assert(kThreads <= kPrepareThreads, "prepare_varlen() has room for them");

struct PlanArguments {
  Flash_kvcache_params params;
  SchedHeader* schedule;
};

// The summands of the prefix sum: work items, or the segments of a packed batch.
__device__ int num_summands(const Flash_kvcache_params& params) {
  return params.is_varlen() ? params.b + 2 : params.work_items;
}

__device__ int segment_tiles(const Flash_kvcache_params& params, const KvQueries& queries) {
  return (kv_rows(params, queries) + params.tile_rows - 1) / params.tile_rows;
}

__device__ int64_t summand_work(const Flash_kvcache_params& params, int index) {
  if (!params.is_varlen()) return work_item_blocks(params, index);
  const KvQueries queries = kv_queries<true>(params, index - 1);
  const KvRequest request = packed_request(params, index);
  int64_t work = 0;
  for (int tile = 0; tile < segment_tiles(params, queries); ++tile) {
    work += kv_work(params, queries, tile, request.seqlen_k);
  }
  return work;
}

// The work item of summand `index`, which begins at entry.work_item_begin, that holds n_block `target`.
__device__ void set_work_item(const Flash_kvcache_params& params, int index, int64_t target, SchedEntry& entry) {
  entry.work_item = index;
  if (!params.is_varlen()) return;
  const KvQueries queries = kv_queries<true>(params, index - 1);
  const KvRequest request = packed_request(params, index);
  int tile = 0;
  for (; tile + 1 < segment_tiles(params, queries); ++tile) {
    const int64_t next = entry.work_item_begin + kv_work(params, queries, tile, request.seqlen_k);
    if (next > target) break;
    entry.work_item_begin = next;
  }
  entry.work_item = packed_first_work_item(params, queries, index) + tile;
}

// The work item at n_block `target` of the linearised work: first the thread whose summands hold it, then the summand.
__device__ SchedEntry entry_at(const Flash_kvcache_params& params, const int64_t* ends, int64_t target) {
  int low = 0, high = kThreads - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > target) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  SchedEntry entry;
  entry.work_item_begin = low > 0 ? ends[low - 1] : 0;
  const WorkItemRange own(num_summands(params), low, kThreads);
  int index = own.begin;
  for (; index + 1 < own.end; ++index) {
    const int64_t next = entry.work_item_begin + summand_work(params, index);
    if (next > target) break;
    entry.work_item_begin = next;
  }
  set_work_item(params, index, target, entry);
  return entry;
}

// Whether a packed batch has sequences long enough for this call (skip_up_to_keys). All threads together.
__device__ bool has_work(const Flash_kvcache_params& params) {
  if (!params.is_varlen() || params.skip_up_to_keys < 0) return true;
  bool is_longer = false;
  for (int i = threadIdx.x; i < params.b; i += kThreads) {
    is_longer |= params.varlen.key_ranges[2 * i + 1] > params.skip_up_to_keys;
  }
  return __syncthreads_or(is_longer);
}

__global__ void __launch_bounds__(kThreads) kvcache_plan_kernel(const __grid_constant__ PlanArguments arguments) {
  extern __shared__ __align__(16) char smem[];
  const Flash_kvcache_params& params = arguments.params;
  int64_t* const ends = reinterpret_cast<int64_t*>(smem);  // of each thread's summands
  if (params.is_varlen()) prepare_varlen(params);
  const WorkItemRange own(has_work(params) ? num_summands(params) : 0, threadIdx.x, kThreads);
  int64_t work = 0;
  for (int index = own.begin; index < own.end; ++index) work += summand_work(params, index);
  int64_t total = 0;
  ends[threadIdx.x] = block_prefix_sum(work, ends + kThreads, total);
  __syncthreads();
  const int64_t cta_blocks = blocks_per_cta(total, params.thread_blocks, params.min_blocks_per_cta);
  if (threadIdx.x == 0) *arguments.schedule = SchedHeader{cta_blocks, total};
  SchedEntry* const entries = reinterpret_cast<SchedEntry*>(arguments.schedule + 1);
  for (int i = threadIdx.x; i < params.thread_blocks; i += kThreads) {
    SchedEntry entry;
    entry.work_item = params.work_items;
    if (i * cta_blocks < total) entry = entry_at(params, ends, i * cta_blocks);
    entries[i] = entry;
  }
}

}  // namespace

cudaError_t run_kvcache_plan(const Flash_kvcache_params& params, SchedHeader* schedule, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const PlanArguments arguments{params, schedule};
  constexpr int kSmemBytes = (kThreads + kThreads / 32) * sizeof(int64_t);
  return launch(kvcache_plan_kernel, 1, kThreads, kSmemBytes, arguments, params.device, stream, configured_devices);
}

}  // namespace flash
