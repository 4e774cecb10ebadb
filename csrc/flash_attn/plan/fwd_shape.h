// What the choice of a forward's kernels depends on, of its parameters.
#pragma once

#include "params/flash.h"
#include "plan/grid.h"

namespace flash {

inline plan::FwdShape fwd_shape(const Flash_fwd_params& params) {
  plan::FwdShape shape{params.is_varlen(),    params.b,        params.h,        params.h_k,
                       params.max_head_dim(), params.seqlen_q, params.seqlen_k, params.window,
                       params.multiprocessors};
  if (params.is_paged()) {
    shape.page_rows = static_cast<int64_t>(params.paged.num_pages) * params.paged.page_size.divisor;
  }
  shape.batch_invariant = params.batch_invariant;
  return shape;
}

}  // namespace flash
