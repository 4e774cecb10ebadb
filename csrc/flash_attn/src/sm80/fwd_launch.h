// Grid, shared memory and launch of the mma.sync forward.
#pragma once

#include "../plan/grid.h"
#include "common/launch.h"
#include "sm80/fwd_kernel.h"
#include "static_switch.h"

namespace flash {

template <class Config>
cudaError_t run_flash_fwd(const Flash_fwd_params& params, cudaStream_t stream) {
  const int64_t blocks =
      params.h * plan::row_blocks(params.varlen.cu_seqlens_q != nullptr, params.b, params.seqlen_q, Config::kBlockM);
  static std::atomic<uint64_t> configured_devices{0};
  return launch(flash_fwd_kernel<Config>, blocks, Config::kThreads, Config::kSmemBytes, params, params.device, stream,
                configured_devices);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_sm80(const Flash_fwd_params& params, cudaStream_t stream) {
  return BOOL_SWITCH(params.has_dropout, kHasDropout, [&] {
    constexpr FwdVariant kVariant = kHasDropout ? FwdVariant::kDropout : FwdVariant::kPlain;
    return run_flash_fwd<FwdConfig<kDtype, kHeadDim, kVariant>>(params, stream);
  });
}

}  // namespace flash
