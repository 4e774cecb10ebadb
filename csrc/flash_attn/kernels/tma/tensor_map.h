// TMA descriptors of attention matrices: built on the host by make_tensor_map(), addressed on the device by TmaRows.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "params/flash.h"

namespace flash {
namespace tma {

// The TMA box: `cols` columns (128 or 64 bytes, which also sets the swizzle mode) of `rows` rows.
struct TensorMapBox {
  int cols;
  int rows;
  bool fetches_pairs = false;  // L2 fetches 256 bytes of a row: the box of the next columns follows
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

// `data`: Q-like rows (is_query) or K-like rows. Columns beyond `head_dim` are read as 0 and not written.
inline TensorMapSource tensor_map_source(const Flash_fwd_params& params, const void* data, const MatrixStrides& strides,
                                         bool is_query, int head_dim) {
  return {data,
          strides,
          is_query ? params.is_varlen() : params.keys_packed(),
          params.b,
          is_query ? params.seqlen_q : params.seqlen_k,
          is_query ? params.h : params.h_k,
          head_dim};
}

using EncodeTensorMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                     const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled, looked up at run time so that nothing links against libcuda; null if the driver lacks it.
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

// Axes: (column, row, head, outer, origin). Dense: outer is the batch. Packed: one map for all sequences that still
// clips rows at the end of each. The row axis has kPackedRows rows and a sequence is addressed at its end, where TMA
// clips; outer has the stride of one row and moves the axis so that the sequence's last row coincides with its address;
// origin subtracts kPackedRows rows again, by a stride whose multiple wraps around 2^64. See TmaRows.
constexpr int kPackedRows = 1 << 30;
constexpr int kTensorMapAxes = 5;

constexpr CUtensorMapDataType tensor_map_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFp16: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Dtype::kBf16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Dtype::kE4m3:
    case Dtype::kInt8: return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
  return CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

inline cudaError_t make_tensor_map(CUtensorMap& map, const TensorMapSource& source, Dtype dtype, TensorMapBox box) {
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  if (encode == nullptr) return cudaErrorSymbolNotFound;
  constexpr int64_t kAny = 0x7fffffff;
  const int64_t bytes = dtype_bytes(dtype), row_bytes = source.strides.row * bytes;
  // The stride of an axis of length 1 is never used; 16 satisfies the encoder whatever the tensor's is.
  auto stride_of = [](int64_t stride, int64_t length) { return static_cast<cuuint64_t>(length > 1 ? stride : 16); };
  const cuuint64_t lengths[kTensorMapAxes] = {
      static_cast<cuuint64_t>(source.head_dim), static_cast<cuuint64_t>(source.is_packed ? kPackedRows : source.rows),
      static_cast<cuuint64_t>(source.heads), static_cast<cuuint64_t>(source.is_packed ? kAny : source.batch),
      static_cast<cuuint64_t>(source.is_packed ? kAny : 1)};
  const cuuint64_t strides[kTensorMapAxes - 1] = {
      stride_of(row_bytes, source.is_packed ? kPackedRows : source.rows),
      stride_of(source.strides.head * bytes, source.heads),
      source.is_packed ? static_cast<cuuint64_t>(row_bytes) : stride_of(source.strides.batch * bytes, source.batch),
      source.is_packed ? static_cast<cuuint64_t>((int64_t{1} << 34) - row_bytes) : 16};
  const cuuint32_t box_lengths[kTensorMapAxes] = {static_cast<cuuint32_t>(box.cols), static_cast<cuuint32_t>(box.rows),
                                                  1, 1, 1};
  const cuuint32_t steps[kTensorMapAxes] = {1, 1, 1, 1, 1};
  const CUresult status =
      encode(&map, tensor_map_type(dtype), kTensorMapAxes, const_cast<void*>(source.data), lengths, strides,
             box_lengths, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box.cols * bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
             box.fetches_pairs ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;  // plan::tensor_map_holds() checked it
}

// Coordinates of the rows of a sequence in a tensor map.
struct TmaRows {
  int shift;  // row i of the sequence has the row coordinate i + shift
  int outer;
  int origin;

  // Rows [begin, begin + length) of a packed tensor, or all rows of sequence `batch` of a dense one.
  __device__ __forceinline__ TmaRows(bool is_packed, int batch, int begin, int length)
      : shift(is_packed ? kPackedRows - length : 0),
        outer(is_packed ? begin + length : batch),
        origin(is_packed ? kPackedRows : 0) {}
};

}  // namespace tma
}  // namespace flash
