// Launches of the wgmma forward with a mask or biases as data: apart from fwd_launch.h, as fwd_modified_launch.h is.
#pragma once

#include "kernels/sm90/fwd_launch.h"

namespace flash {

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_listed_wgmma_(const Flash_fwd_split_params& params, const plan::FwdPlan& plan,
                                      cudaStream_t stream) {
  using plan::FwdVariant;
  switch (plan.variant) {
    case FwdVariant::kListed: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kListed>(params, plan, stream);
    case FwdVariant::kListedShort:
      return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kListedShort>(params, plan, stream);
    case FwdVariant::kBiased: return sm90::run_variant<kDtype, kHeadDim, FwdVariant::kBiased>(params, plan, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace flash
