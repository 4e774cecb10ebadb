#include "kernels/sm90/fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_wgmma_<flash::Dtype::kFp16, 192>(const Flash_fwd_split_params& params,
                                                                const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_fwd<Dtype::kFp16, 192>(params, plan, stream);
}
