// Attention over a KV cache by wgmma: interface between the binding and the kernel archive.
#pragma once

#include "params/kvcache.h"

namespace flash {

// run_mha_fwd_split_() for the calls of plan::kv_takes_wgmma().
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_split_wgmma_(const Flash_kvcache_params& params, cudaStream_t stream);

}  // namespace flash
