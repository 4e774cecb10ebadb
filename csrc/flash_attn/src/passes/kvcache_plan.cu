// The schedule of attention against a KV cache, made once for all layers of a step (kv_schedule.h).
#include <atomic>

#include "common/kv_start.h"
#include "common/launch.h"
#include "kvcache.h"

namespace flash {
namespace {

constexpr int kThreads = 1024;

struct PlanArguments {
  Flash_kvcache_params params;
  KvHeader* schedule;
};

// The item at `target` of the line: first the thread whose items hold it, then the item among those.
__device__ KvRecord record_at(const Flash_kvcache_params& params, const int64_t* ends, int items, int64_t target) {
  int low = 0, high = kThreads - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > target) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  KvRecord record;
  record.item_begin = low > 0 ? ends[low - 1] : 0;
  const KvItems own(items, low, kThreads);
  for (record.item = own.begin; record.item + 1 < own.end; ++record.item) {
    const int64_t next = record.item_begin + kv_item_work(params, record.item);
    if (next > target) break;
    record.item_begin = next;
  }
  return record;
}

__global__ void __launch_bounds__(kThreads) kvcache_plan_kernel(const __grid_constant__ PlanArguments arguments) {
  extern __shared__ __align__(16) char smem[];
  const Flash_kvcache_params& params = arguments.params;
  int64_t* const ends = reinterpret_cast<int64_t*>(smem);  // of each thread's items
  const int items = params.b * params.row_tiles;
  const KvItems own(items, threadIdx.x, kThreads);
  int64_t work = 0;
  for (int item = own.begin; item < own.end; ++item) work += kv_item_work(params, item);
  int64_t total = 0;
  ends[threadIdx.x] = block_prefix_sum(work, ends + kThreads, total);
  __syncthreads();
  const int64_t share = kv_share(total, params.thread_blocks, params.least_share);
  if (threadIdx.x == 0) *arguments.schedule = KvHeader{share, total};
  KvRecord* const records = reinterpret_cast<KvRecord*>(arguments.schedule + 1);
  for (int i = threadIdx.x; i < params.thread_blocks; i += kThreads) {
    KvRecord record;
    record.item = items;
    if (i * share < total) record = record_at(params, ends, items, i * share);
    records[i] = record;
  }
}

}  // namespace

cudaError_t run_kvcache_plan(const Flash_kvcache_params& params, KvHeader* schedule, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const PlanArguments arguments{params, schedule};
  constexpr int kSmemBytes = (kThreads + kThreads / 32) * sizeof(int64_t);
  return launch(kvcache_plan_kernel, 1, kThreads, kSmemBytes, arguments, params.device, stream, configured_devices);
}

}  // namespace flash
