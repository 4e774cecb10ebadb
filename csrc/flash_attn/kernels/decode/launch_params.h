// Parameters of the decode kernel, and the tensor maps through which it reads K and V in boxes.
#pragma once

#include "kernels/tma/tensor_map.h"
#include "params/kvcache.h"
#include "plan/kv_tiles.h"

namespace flash {
namespace decode {

struct KvLaunch {
  Flash_kvcache_params params;
  CUtensorMap k_map, v_map;  // of kernels with plan::kv_reads_boxes()
};

// A box is the rows of a step: all columns of one head, as blocks of 64 with all rows each. Axes: (column of a block,
// row, block, head, page or sequence).
inline cudaError_t make_kv_map(CUtensorMap& map, const Flash_kvcache_params& params, const void* data,
                               const MatrixStrides& strides, Dtype dtype, const plan::KvTile& tile) {
  const int64_t bytes = tile.kv_bytes;
  const bool is_paged = params.paged.block_table != nullptr;
  const int rows = is_paged ? params.paged.page_size.divisor : params.capacity;
  const int outer = is_paged ? params.paged.num_pages : params.cache_batch;
  const auto length = [](int value) { return static_cast<cuuint64_t>(value); };
  const tma::TensorMapAxes axes{
      {plan::kKvBoxCols, length(rows), length(tile.head_dim / plan::kKvBoxCols), length(params.h_k), length(outer)},
      {tma::axis_stride(strides.row * bytes, rows), static_cast<cuuint64_t>(plan::kKvBoxCols * bytes),
       tma::axis_stride(strides.head * bytes, params.h_k), tma::axis_stride(strides.batch * bytes, outer)},
      {plan::kKvBoxCols, static_cast<cuuint32_t>(tile.step), static_cast<cuuint32_t>(tile.head_dim / plan::kKvBoxCols),
       1, 1}};
  // Both blocks of a row are fetched from device memory together.
  return tma::encode_tensor_map(map, data, dtype, axes, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace decode
}  // namespace flash
