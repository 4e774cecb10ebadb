#include "kernels/sm90/wide_bwd/launch.h"

template <>
cudaError_t flash::run_mha_bwd_wgmma_<flash::Dtype::kFp16, 512>(const Flash_bwd_mask_params& params,
                                                                const plan::BwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_bwd_wide<Dtype::kFp16>(params, plan, stream);
}
