#include "kernels/sm90/fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_wgmma_<flash::Dtype::kFp16, 256>(const Flash_fwd_split_params& params,
                                                                cudaStream_t stream) {
  return run_mha_fwd_sm90<Dtype::kFp16, 256>(params, stream);
}
