// Launch of the mma.sync forward.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm80/fwd_kernel.h"
#include "plan/fwd_plan.h"

namespace flash {
namespace sm80 {

template <class Config>
cudaError_t run_flash_fwd(const Flash_fwd_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch_dependent(flash_fwd_kernel<Config>, plan.grid, Config::kThreads, Config::kSmemBytes, params,
                          params.device, stream, configured_devices);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd(const Flash_fwd_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if (plan.variant == FwdVariant::kDropout) {
    return run_flash_fwd<FwdConfig<kDtype, kHeadDim, FwdVariant::kDropout>>(params, plan, stream);
  }
  if constexpr (plan::mma_sync_has_short(kHeadDim)) {
    if (plan.variant == FwdVariant::kShort) {
      return run_flash_fwd<FwdConfig<kDtype, kHeadDim, FwdVariant::kShort>>(params, plan, stream);
    }
  }
  return run_flash_fwd<FwdConfig<kDtype, kHeadDim, FwdVariant::kPlain>>(params, plan, stream);
}

}  // namespace sm80
}  // namespace flash
