// The launch of the wgmma backward: which of its two schedules runs.
#pragma once

#include "kernels/sm90/bwd_one_pass/launch.h"
#include "kernels/sm90/bwd_two_pass/launch.h"

namespace flash {
namespace sm90 {

template <Dtype kDtype, int kHeadDim, int kHeadDimV = kHeadDim>
cudaError_t run_mha_bwd(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::has_dq_pass(plan::sm90_bwd_tile(kHeadDim, kHeadDimV))) {
    return run_mha_bwd_two_pass<kDtype, kHeadDim, kHeadDimV>(params, plan, stream);
  } else {
    if constexpr (kHeadDim == plan::kSm90TwoPassTile.head_dim) {
      using Plain = BwdTwoPassConfig<kDtype, kHeadDim, BwdVariant::kPlain, kHeadDim>;
      if (plan.dq_pass) return run_flash_bwd_two_pass<Plain, Plain>(params, plan, stream);
    }
    return run_mha_bwd_one_pass<kDtype, kHeadDim>(params, plan, stream);
  }
}

}  // namespace sm90

template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_bwd_wgmma_(const Flash_bwd_mask_params& params, const plan::BwdPlan& plan, cudaStream_t stream) {
  return sm90::run_mha_bwd<kDtype, kHeadDim, kHeadDimV>(params, plan, stream);
}

}  // namespace flash
