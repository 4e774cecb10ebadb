#include "kernels/sm80/fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_<flash::Dtype::kBf16, 512>(const Flash_fwd_split_params& params,
                                                          const plan::FwdPlan& plan, cudaStream_t stream) {
  return sm80::run_mha_fwd<Dtype::kBf16, 512>(params, plan, stream);
}
