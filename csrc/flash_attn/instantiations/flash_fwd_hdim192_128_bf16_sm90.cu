#include "kernels/sm90/fwd_launch.h"

template <>
cudaError_t flash::run_mha_fwd_wgmma_<flash::Dtype::kBf16, 192, 128>(const Flash_fwd_split_params& params,
                                                                     cudaStream_t stream) {
  return run_mha_fwd_value_dim_sm90<Dtype::kBf16, 192, 128>(params, stream);
}
