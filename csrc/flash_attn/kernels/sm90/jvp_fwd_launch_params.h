// Kernel parameters of the forward with tangents.
#pragma once

#include "kernels/sm90/fwd_launch_params.h"
#include "params/jvp.h"

namespace flash {
namespace sm90 {

struct JvpFwdLaunch : FwdLaunch {
  bool has_tq, has_tk, has_tv;
  void* to_ptr;
  float* t_lse_ptr;
  MatrixStrides to_strides;
  CUtensorMap tq_map, tk_map, tv_map, to_map;
};

}  // namespace sm90
}  // namespace flash
