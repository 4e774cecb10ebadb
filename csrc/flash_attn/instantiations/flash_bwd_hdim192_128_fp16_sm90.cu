#include "kernels/sm90/bwd_launch.h"

template <>
cudaError_t flash::run_mha_bwd_wgmma_<flash::Dtype::kFp16, 192, 128>(const Flash_bwd_mask_params& params,
                                                                     const plan::BwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_bwd<Dtype::kFp16, 192, 128>(params, plan, stream);
}
