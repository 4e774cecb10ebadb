#include "kernels/sm90/bwd_launch.h"

template <>
cudaError_t flash::run_mha_bwd_wgmma_<flash::Dtype::kFp16, 128>(const Flash_bwd_params& params, cudaStream_t stream) {
  return run_mha_bwd_sm90<Dtype::kFp16, 128>(params, stream);
}
