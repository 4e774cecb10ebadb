#include "kernels/sm90/fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_wgmma_<flash::Dtype::kBf16, 96>(const Flash_fwd_split_params& params,
                                                               cudaStream_t stream) {
  return run_mha_fwd_sm90<Dtype::kBf16, 96>(params, stream);
}
