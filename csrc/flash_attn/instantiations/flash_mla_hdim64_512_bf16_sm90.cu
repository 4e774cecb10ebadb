#include "kernels/mla/wgmma_launch.h"

template <>
cudaError_t flash::run_mha_mla_wgmma_<flash::Dtype::kBf16, 64, 512>(const Flash_mla_params& params,
                                                                    cudaStream_t stream) {
  return mla::run_mla_wgmma<Dtype::kBf16>(params, stream);
}
