// Tensor maps of the wgmma backwards in two kernels.
#pragma once

#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/tma/tensor_map.h"

namespace flash {
namespace sm90 {

inline cudaError_t make_tensor_maps(BwdTwoPassLaunch& launch, Dtype dtype) {
  const Flash_bwd_params& params = launch.params;
  struct Matrix {
    CUtensorMap& map;
    const void* data;
    const MatrixStrides& strides;
    bool is_query;
    int head_dim;
  };
  const Matrix matrices[] = {
      {launch.q_map, params.q_ptr, params.q_strides, true, params.d},
      {launch.do_map, params.do_ptr, params.do_strides, true, params.d_v},
      {launch.k_map, params.k_ptr, params.k_strides, false, params.d},
      {launch.v_map, params.v_ptr, params.v_strides, false, params.d_v},
  };
  for (const Matrix& matrix : matrices) {
    const cudaError_t status = tma::make_tensor_map(
        matrix.map, tma::tensor_map_source(params, matrix.data, matrix.strides, matrix.is_query, matrix.head_dim),
        dtype, {64, 64});
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace sm90
}  // namespace flash
