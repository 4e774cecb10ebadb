// Grid, shared memory and launch of the mma.sync forward.
#pragma once

#include "core/static_switch.h"
#include "kernels/common/launch.h"
#include "kernels/sm80/fwd_kernel.h"
#include "plan/fwd_shape.h"
#include "plan/grid.h"

namespace flash {

template <class Config>
int64_t fwd_blocks(const Flash_fwd_params& params) {
  return params.h * plan::m_blocks(params.is_varlen(), params.b, params.seqlen_q, Config::kBlockM);
}

template <class Config>
cudaError_t run_flash_fwd(const Flash_fwd_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch_dependent(flash_fwd_kernel<Config>, fwd_blocks<Config>(params), Config::kThreads, Config::kSmemBytes,
                          params, params.device, stream, configured_devices);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_sm80(const Flash_fwd_params& params, cudaStream_t stream) {
  using Plain = FwdConfig<kDtype, kHeadDim, FwdVariant::kPlain>;
  using Short = FwdConfig<kDtype, kHeadDim, FwdVariant::kShort>;
  if (params.has_dropout) return run_flash_fwd<FwdConfig<kDtype, kHeadDim, FwdVariant::kDropout>>(params, stream);
  if constexpr (Short::kBlockM < Plain::kBlockM) {
    if (plan::takes_short_tile(fwd_shape(params), Plain::kBlockM)) return run_flash_fwd<Short>(params, stream);
  }
  return run_flash_fwd<Plain>(params, stream);
}

}  // namespace flash
