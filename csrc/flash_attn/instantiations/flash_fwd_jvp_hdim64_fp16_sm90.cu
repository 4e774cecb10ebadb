#include "kernels/sm90/jvp_fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_jvp_wgmma_<flash::Dtype::kFp16, 64>(const Flash_fwd_jvp_params& params,
                                                                   const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_fwd_jvp<Dtype::kFp16, 64>(params, plan, stream);
}
