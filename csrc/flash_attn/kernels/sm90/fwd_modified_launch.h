// Launches of the wgmma forward with modified scores: apart from fwd_launch.h, so that neither file of instantiations
// compiles the kernels of the other.
#pragma once

#include "kernels/sm90/fwd_launch.h"

namespace flash {

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_modified_wgmma_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan,
                                        cudaStream_t stream) {
  using plan::FwdVariant;
  switch (plan.variant) {
    case FwdVariant::kScoreMod: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kScoreMod>(params, plan, stream);
    case FwdVariant::kSoftcap: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kSoftcap>(params, plan, stream);
    case FwdVariant::kAlibi: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kAlibi>(params, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash
