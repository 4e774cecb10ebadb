// Prepares a call's workspace: the segments of a packed batch, a cleared tile_count_semaphore. One thread block, so
// that it costs a call about as much as a fill.
#include <algorithm>
#include <atomic>

#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/common/prepare_varlen.h"

namespace flash {
namespace {

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ Flash_fwd_params params) {
  allow_next_kernel();  // it calls wait_for_previous_kernel() before it reads any of this
  if (threadIdx.x == 0 && params.tile_count_semaphore != nullptr) *params.tile_count_semaphore = 0;
  if (params.is_varlen()) prepare_varlen(params);
}

}  // namespace

cudaError_t run_prepare(const Flash_fwd_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int entries = params.is_varlen() ? params.b + 1 : 1;
  const int threads = std::min((entries + 31) / 32 * 32, kPrepareThreads);
  return launch(prepare_kernel, 1, threads, 0, params, params.device, stream, configured_devices);
}

}  // namespace flash
