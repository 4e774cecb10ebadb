#include "kernels/sm90/bwd_launch.h"

template <>
cudaError_t flash::run_mha_bwd_wgmma_<flash::Dtype::kBf16, 64>(const Flash_bwd_params& params, cudaStream_t stream) {
  return run_mha_bwd_sm90<Dtype::kBf16, 64>(params, stream);
}
