// TMA descriptors of attention matrices: built on the host by one plain function, addressed on the device by rows.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "flash.h"

namespace flash {
namespace sm90 {

// What a box covers: `cols` columns (128 or 64 bytes, which also sets the swizzle) of `rows` rows.
struct TensorMapBox {
  int cols;
  int rows;
};

// A (b, rows, heads, d) or packed (total, heads, d) matrix.
struct TensorMapSource {
  const void* data;
  MatrixStrides strides;
  bool is_packed;
  int batch;
  int rows;  // of a sequence; of all sequences when packed
  int heads;
  int head_dim;
};

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's encoder, found at run time so that nothing links against the driver; null where it is missing.
inline EncodeTensorMap find_tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
  return status == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTensorMap>(function)
                                                                        : nullptr;
}

// Axes: (column, row, head, outer). Dense: outer is the batch. Packed: rows are clipped at the end of any sequence,
// although there is one map for all of them: the row axis is as long as the whole tensor and ends where the sequence
// ends, because the outer axis moves the origin by single rows, and the base lies one length before the data. Nothing
// outside a sequence is read or written, see TmaRows.
inline cudaError_t make_tensor_map(CUtensorMap& map, const TensorMapSource& source, Dtype dtype, TensorMapBox box) {
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  constexpr int64_t kBytes = 2;
  const int64_t row_bytes = source.strides.row * kBytes;
  const int64_t outer_bytes = source.is_packed ? row_bytes : source.strides.batch * kBytes;
  // The stride of an axis of length 1 is never used, and may be anything.
  auto stride_of = [](int64_t bytes, int64_t length) { return static_cast<cuuint64_t>(length > 1 ? bytes : 16); };
  const int64_t outer = source.is_packed ? int64_t{source.rows} + 1 : source.batch;
  const cuuint64_t lengths[4] = {static_cast<cuuint64_t>(source.head_dim), static_cast<cuuint64_t>(source.rows),
                                 static_cast<cuuint64_t>(source.heads), static_cast<cuuint64_t>(outer)};
  const cuuint64_t strides[3] = {
      source.is_packed ? static_cast<cuuint64_t>(row_bytes) : stride_of(row_bytes, source.rows),
      stride_of(source.strides.head * kBytes, source.heads), stride_of(outer_bytes, outer)};
  const cuuint32_t box_lengths[4] = {static_cast<cuuint32_t>(box.cols), static_cast<cuuint32_t>(box.rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const char* base = static_cast<const char*>(source.data) - (source.is_packed ? source.rows * row_bytes : 0);
  const CUresult status =
      encode(&map, dtype == Dtype::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             const_cast<char*>(base), lengths, strides, box_lengths, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box.cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

// Where the rows of a sequence stand in a tensor map.
struct TmaRows {
  int shift;  // row i of the sequence has the coordinate i + shift
  int outer;

  // Rows [begin, begin + length) of a packed tensor of `total` rows, or all rows of sequence `batch` of a dense one.
  __device__ __forceinline__ TmaRows(bool is_packed, int total, int batch, int begin, int length)
      : shift(is_packed ? total - length : 0), outer(is_packed ? begin + length : batch) {}
};

}  // namespace sm90
}  // namespace flash
