#include "kernels/decode/launch.h"

template <>
cudaError_t flash::run_mha_fwd_split_<flash::Dtype::kBf16, 512>(const Flash_kvcache_params& params,
                                                                cudaStream_t stream) {
  return decode::run_mha_fwd_split_sm80<Dtype::kBf16, 512>(params, stream);
}
