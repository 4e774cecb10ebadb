#include "kernels/sm90/fp8_fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_fp8_wgmma_<flash::Dtype::kBf16, 256>(const Flash_fwd_fp8_params& params,
                                                                    const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_fwd_fp8<Dtype::kBf16, 256>(params, plan, stream);
}
