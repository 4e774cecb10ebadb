// Around a prefill over a KV cache: key ranges of each request before it, the LSE of inactive requests after it.
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
  const bool has_keys = is_active(params, request);
  if (threadIdx.x > 0) return;
  const int sequence_begin = params.paged.block_table != nullptr ? 0 : request.cache_row * arguments.rows_per_sequence;
  arguments.cached_keys[2 * request.index] = sequence_begin + request.first_row;
  arguments.cached_keys[2 * request.index + 1] = has_keys ? request.seqlen_k : 0;
}

// The prefill treats an inactive request as one without keys, whose LSE is the sink.
__global__ void __launch_bounds__(kThreads) kvcache_lse_kernel(const __grid_constant__ Flash_kvcache_params params) {
  const KvRequest request = kv_request(params, blockIdx.x);
  if (is_active(params, request)) return;
  const int64_t rows = static_cast<int64_t>(params.h) * params.seqlen_q;
  float* const lse = params.softmax_lse_ptr + request.index * rows;
  for (int64_t row = threadIdx.x; row < rows; row += kThreads) lse[row] = INFINITY;
}

}  // namespace

cudaError_t run_kvcache_keys(const Flash_kvcache_params& params, int rows_per_sequence, int* cached_keys,
                             cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const KeysArguments arguments{params, rows_per_sequence, cached_keys};
  return launch(kvcache_keys_kernel, params.b, kThreads, 0, arguments, params.device, stream, configured_devices);
}

cudaError_t run_kvcache_lse(const Flash_kvcache_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch(kvcache_lse_kernel, params.b, kThreads, 0, params, params.device, stream, configured_devices);
}

}  // namespace flash
