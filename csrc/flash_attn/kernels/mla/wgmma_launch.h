// Launch of the wgmma MLA decode kernel.
#pragma once

#include "kernels/common/launch.h"
#include "params/mla.h"
#include "plan/mla_plan.h"
#ifdef __CUDA_ARCH__
#include <cutlass/arch/reg_reconfig.h>

#include "kernels/mla/wgmma_kernel.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace mla {

#ifdef __CUDA_ARCH__
template <Dtype kDtype>
__global__ void __launch_bounds__(plan::kMlaWgmmaThreads, 1)
    mla_decode_wgmma_kernel(const __grid_constant__ Flash_mla_params params) {
  using Config = MlaWgmmaConfig<kDtype>;
  static_assert(Config::kThreads == plan::kMlaWgmmaThreads && Config::kKeys == plan::kMlaWgmmaKeys);
  static_assert(Config::kRows == plan::kMlaWgmmaRows);
  static_assert(static_cast<int>(sizeof(MlaWgmmaStorage<Config>)) <= plan::kMlaWgmmaSmem);
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<MlaWgmmaStorage<Config>*>(smem);
  if (threadIdx.x == 0) init_barriers(storage);
  const MlaWork work(params, Config::kRows, Config::kKeys);
  __syncthreads();
  // Shuffled, so that ptxas sees uniform branches.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warp / 4;
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    MlaProducer<Config>(params, storage, work, warp).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if (group == 1) {
      MlaConsumer<Config, 0>(params, storage, work).run();
    } else {
      MlaConsumer<Config, 1>(params, storage, work).run();
    }
  }
}
#else  // kernels/common/host_pass.h
template <Dtype kDtype>
__global__ void mla_decode_wgmma_kernel(const __grid_constant__ Flash_mla_params params) {}
#endif

template <Dtype kDtype>
cudaError_t run_mla_wgmma(const Flash_mla_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t matrices = params.segments_q == nullptr ? params.b : 1;
  return launch(mla_decode_wgmma_kernel<kDtype>, matrices * params.row_tiles * params.splits, plan::kMlaWgmmaThreads,
                plan::kMlaWgmmaSmem, params, params.device, stream, configured_devices);
}

}  // namespace mla

template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_mla_wgmma_(const Flash_mla_params& params, cudaStream_t stream) {
  static_assert(kHeadDim == kMlaRopeDim && kHeadDimV == kMlaLatentDim);
  return mla::run_mla_wgmma<kDtype>(params, stream);
}

}  // namespace flash
