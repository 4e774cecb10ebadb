#include "kernels/sm90/wide_fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_wgmma_<flash::Dtype::kFp16, 512>(const Flash_fwd_split_params& params,
                                                                const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_fwd_wide<Dtype::kFp16>(params, plan, stream);
}
