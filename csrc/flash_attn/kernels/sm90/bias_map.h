// Tensor map of attn_bias.
#pragma once

#include "kernels/tma/tensor_map.h"

namespace flash {
namespace sm90 {

// Boxes of kBiasBoxBytes of each row, fp32 as pairs of 16-bit halves. An axis along which the bias is broadcast has
// length 1.
// by_columns: boxes are read in the order of their columns.
inline cudaError_t make_bias_map(CUtensorMap& map, const Flash_fwd_params& params, const ScoreBias& bias, int rows,
                                 bool by_columns) {
  if (bias.data == nullptr || !bias.loads_boxes) return cudaSuccess;
  const int halves = static_cast<int>(bias.element_bytes() / 2);
  const auto length = [](int64_t stride, int size) { return stride == 0 ? 1 : size; };
  const tma::TensorMapSource source{bias.data,
                                    {halves * bias.batch_stride, halves * bias.row_stride, halves * bias.head_stride},
                                    params.is_varlen(),
                                    length(bias.batch_stride, params.b),
                                    length(bias.row_stride, params.seqlen_q),
                                    length(bias.head_stride, params.h),
                                    halves * bias.cols};
  constexpr Dtype kHalves = Dtype::kFp16;  // copies convert nothing
  return tma::make_tensor_map(map, source, kHalves,
                              {plan::kBiasBoxBytes / 2, length(bias.row_stride, rows), by_columns});
}

}  // namespace sm90
}  // namespace flash
