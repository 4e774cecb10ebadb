// Key ranges of each request, for the forward's kernel families, which serve calls of many query rows.
#include <atomic>

#include "kernels/common/launch.h"
#include "kernels/decode/request.h"
#include "params/kvcache.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 128;

struct KeysArguments {
  Flash_kvcache_params params;
  int rows_per_sequence;
  int* cached_keys;
};

__global__ void __launch_bounds__(kThreads) kvcache_keys_kernel(const __grid_constant__ KeysArguments arguments) {
  const Flash_kvcache_params& params = arguments.params;
  const KvRequest request = kv_request(params, blockIdx.x);
  bool invalid = false;
  if (params.paged.block_table != nullptr && request.is_valid()) {
    const KvRows needed = kv_required_rows(params, request);
    invalid = KvPages(params, request.index).has_invalid_page(needed.begin, needed.end, threadIdx.x, kThreads);
  }
  invalid = __syncthreads_or(invalid);
  if (threadIdx.x > 0) return;
  const int sequence_begin = params.paged.block_table != nullptr ? 0 : request.cache_row * arguments.rows_per_sequence;
  arguments.cached_keys[2 * request.index] = sequence_begin + request.first_row;
  arguments.cached_keys[2 * request.index + 1] = request.is_valid() && !invalid ? request.seqlen_k : 0;
}

}  // namespace

cudaError_t run_kvcache_keys(const Flash_kvcache_params& params, int rows_per_sequence, int* cached_keys,
                             cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const KeysArguments arguments{params, rows_per_sequence, cached_keys};
  return launch(kvcache_keys_kernel, params.b, kThreads, 0, arguments, params.device, stream, configured_devices);
}

}  // namespace flash
