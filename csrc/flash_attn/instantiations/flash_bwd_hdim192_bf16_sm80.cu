#include "kernels/sm80/bwd_launch.h"

template <>
cudaError_t flash::run_mha_bwd_<flash::Dtype::kBf16, 192>(const Flash_bwd_mask_params& params,
                                                          const plan::BwdPlan& plan, cudaStream_t stream) {
  return sm80::run_mha_bwd<Dtype::kBf16, 192>(params, plan, stream);
}
