// Rotates queries, for a prefill over a KV cache.
#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/decode/request.h"
#include "kernels/decode/rotary.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 256;

struct RotateArguments {
  Flash_kvcache_params params;
  void* rotated;
};

// Threads of a row: one for each rotated pair, then one for each column that is not rotated.
__host__ __device__ int threads_of_row(const Flash_kvcache_params& params) { return params.d - params.rotary.pairs; }

template <class Element>
__global__ void __launch_bounds__(kThreads) kvcache_rotate_kernel(const __grid_constant__ RotateArguments arguments) {
  const Flash_kvcache_params& params = arguments.params;
  const Rotary& rotary = params.rotary;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / threads_of_row(params);  // of (b, seqlen_q, h)
  const int place = static_cast<int>(index - row * threads_of_row(params));
  const int64_t batch = row / params.h / params.seqlen_q;
  if (batch >= params.b) return;
  const KvRequest request = kv_request(params, static_cast<int>(batch));
  if (!request.is_valid()) return;
  const int token = static_cast<int>(row / params.h - batch * params.seqlen_q);
  const int head = static_cast<int>(row % params.h);
  const Element* const from = static_cast<const Element*>(params.q_ptr) + batch * params.q_strides.batch +
                              token * params.q_strides.row + head * params.q_strides.head;
  Element* const to = static_cast<Element*>(arguments.rotated) + row * params.d;
  if (place >= rotary.pairs) {
    to[place + rotary.pairs] = from[place + rotary.pairs];
    return;
  }
  const RotaryPair cols = rotary_pair(rotary, place);
  Element a = from[cols.first], b = from[cols.second];
  rotate_pair(rotary, request.cached + (rotary.one_position ? 0 : token), place, a, b);
  to[cols.first] = a;
  to[cols.second] = b;
}

template <class Element>
cudaError_t run(const Flash_kvcache_params& params, void* rotated, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const RotateArguments arguments{params, rotated};
  const int64_t threads = static_cast<int64_t>(params.b) * params.seqlen_q * params.h * threads_of_row(params);
  return launch(kvcache_rotate_kernel<Element>, (threads + kThreads - 1) / kThreads, kThreads, 0, arguments,
                params.device, stream, configured_devices);
}

}  // namespace

cudaError_t run_kvcache_rotate(const Flash_kvcache_params& params, Dtype dtype, void* rotated, cudaStream_t stream) {
  return FP16_SWITCH(dtype, [&] { return run<ElementOf<kDtype>>(params, rotated, stream); });
}

}  // namespace flash
