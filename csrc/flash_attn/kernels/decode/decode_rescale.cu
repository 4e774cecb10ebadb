// Multiplies queries and results by descales and converts their dtype: around prefill kernels that read the fp16 K and
// V of decode_dequantize.cu, and for e4m3 queries.
#include <algorithm>
#include <atomic>

#include "kernels/common/launch.h"
#include "kernels/decode/row_vectors.h"
#include "params/kvcache.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 256;
constexpr int kThreadVectors = 4;  // of a thread; their reads are in flight together
constexpr int kBlockVectors = kThreads * kThreadVectors;

struct RescaleArguments {
  Flash_kvcache_params params;
  RescaledRows rows;
  FastDiv vectors_of_token, vectors_of_row;
  FastDiv tokens;  // tokens of a batch element; a packed batch counts as one element
  int64_t all_vectors;
  bool finds_sequences;  // finds the sequences of packed rows, for their descales

  RescaleArguments(const Flash_kvcache_params& params_, const RescaledRows& rows_) : params(params_), rows(rows_) {
    vectors_of_row = FastDiv((params.d + kRowVectorCols - 1) / kRowVectorCols);
    vectors_of_token = FastDiv(std::max(params.h, 1) * vectors_of_row.divisor);
    tokens = FastDiv(std::max(params.seqlen_q, 1));
    const int64_t batch = params.is_varlen() ? 1 : params.b;
    all_vectors = batch * params.seqlen_q * params.h * vectors_of_row.divisor;
    finds_sequences =
        params.is_varlen() && params.b > 0 && (rows.descales[0].batch != 0 || rows.descales[1].batch != 0);
  }
};

// The block's first row.
struct FirstToken {
  int64_t batch;
  int token;
  int vector;  // of its row

  __device__ __forceinline__ explicit FirstToken(const RescaleArguments& arguments) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kBlockVectors;
    const int64_t row = first / arguments.vectors_of_token.divisor;
    batch = row / arguments.tokens.divisor;
    token = static_cast<int>(row - batch * arguments.tokens.divisor);
    vector = static_cast<int>(first - row * arguments.vectors_of_token.divisor);
  }
};

// Eight columns of a query head.
struct RowVector {
  int64_t batch;
  int token, head, col;

  __device__ __forceinline__ RowVector(const RescaleArguments& arguments, const FirstToken& first, int index) {
    const int vector = first.vector + index;
    const int tokens = arguments.vectors_of_token.divide(vector);
    const int of_token = vector - tokens * arguments.vectors_of_token.divisor;
    const int batches = arguments.tokens.divide(first.token + tokens);
    batch = first.batch + batches;
    token = first.token + tokens - batches * arguments.tokens.divisor;
    head = arguments.vectors_of_row.divide(of_token);
    col = (of_token - head * arguments.vectors_of_row.divisor) * kRowVectorCols;
  }

  __device__ __forceinline__ int64_t offset(const MatrixStrides& strides) const {
    return batch * strides.batch + token * strides.row + head * strides.head + col;
  }
};

// The factor of a vector.
struct VectorFactor {
  float factor = 1.0f;
  const float* of_channels = nullptr;
  int64_t stride = 0;

  __device__ __forceinline__ VectorFactor(const RescaleArguments& arguments, const RowVector& vector) {
    const Flash_kvcache_params& params = arguments.params;
    int64_t sequence = vector.batch;
    if (arguments.finds_sequences) sequence = sequence_of_row(params.varlen.segments_q, params.b, vector.token);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const KvDescale& descale = arguments.rows.descales[i];
      if (descale.ptr == nullptr) continue;
      const int head = arguments.rows.of_kv_heads[i] ? params.group.divide(vector.head) : vector.head;
      const float* const of_head = descale.of_head(sequence, head);
      if (descale.col == 0) {
        factor *= i == 1 && arguments.rows.without_key_power ? without_key_power(*of_head) : *of_head;
      } else {
        of_channels = of_head + vector.col * descale.col;
        stride = descale.col;
      }
    }
  }

  // Zeros stay zeros: a sequence without keys may have any descale.
  __device__ __forceinline__ float times(float value, int i) const {
    const float all = of_channels == nullptr ? factor : factor * of_channels[i * stride];
    return value == 0.0f ? value : value * all;
  }
};

template <Dtype kFrom>
__device__ __forceinline__ void load_vector(const RescaledRows& rows, const RowVector& vector, int cols,
                                            float (&values)[kRowVectorCols]) {
  if constexpr (is_eight_bit(kFrom)) {
    const uint8_t* const from = static_cast<const uint8_t*>(rows.from_ptr) + vector.offset(rows.from_strides);
    unpack_vector<kFrom>(load_quantized(from, rows.from_vectors && cols == kRowVectorCols ? 8 : 1, cols), values);
  } else {
    const uint16_t* const from = static_cast<const uint16_t*>(rows.from_ptr) + vector.offset(rows.from_strides);
    unpack_vector<kFrom>(*reinterpret_cast<const uint4*>(from), values);
  }
}

__device__ __forceinline__ void store_vector(uint16_t* to, const uint4& vector, int cols, bool vectors) {
  if (vectors) {
    *reinterpret_cast<uint4*>(to) = vector;
    return;
  }
  const uint16_t* const elements = reinterpret_cast<const uint16_t*>(&vector);
#pragma unroll
  for (int i = 0; i < kRowVectorCols; ++i) {
    if (i < cols) to[i] = elements[i];
  }
}

// Rows may be rewritten in place: a thread reads its vectors before it writes them.
template <Dtype kFrom, Dtype kTo>
__global__ void __launch_bounds__(kThreads) rescale_rows_kernel(const __grid_constant__ RescaleArguments arguments) {
  const RescaledRows& rows = arguments.rows;
  const int head_dim = arguments.params.d;
  const FirstToken first(arguments);
  const int64_t left = arguments.all_vectors - static_cast<int64_t>(blockIdx.x) * kBlockVectors;
  const int count = static_cast<int>(min(left, int64_t{kBlockVectors}));
  float values[kThreadVectors][kRowVectorCols];
#pragma unroll
  for (int i = 0; i < kThreadVectors; ++i) {
    const int index = threadIdx.x + i * kThreads;
    if (index >= count) break;
    const RowVector vector(arguments, first, index);
    load_vector<kFrom>(rows, vector, min(head_dim - vector.col, kRowVectorCols), values[i]);
  }
#pragma unroll
  for (int i = 0; i < kThreadVectors; ++i) {
    const int index = threadIdx.x + i * kThreads;
    if (index >= count) break;
    const RowVector vector(arguments, first, index);
    const VectorFactor factor(arguments, vector);
#pragma unroll
    for (int col = 0; col < kRowVectorCols; ++col) {
      if (vector.col + col < head_dim) values[i][col] = factor.times(values[i][col], col);
    }
    uint16_t* const to = static_cast<uint16_t*>(rows.to_ptr) + vector.offset(rows.to_strides);
    store_vector(to, pack_vector<kTo>(values[i]), min(head_dim - vector.col, kRowVectorCols),
                 head_dim % kRowVectorCols == 0);
  }
}

template <Dtype kFrom, Dtype kTo>
cudaError_t run(const RescaleArguments& arguments, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch(rescale_rows_kernel<kFrom, kTo>, (arguments.all_vectors + kBlockVectors - 1) / kBlockVectors, kThreads,
                0, arguments, arguments.params.device, stream, configured_devices);
}

}  // namespace

cudaError_t run_rescale_rows(const Flash_kvcache_params& params, const RescaledRows& rows, cudaStream_t stream) {
  const RescaleArguments arguments(params, rows);
  const bool to_fp16 = rows.to_dtype == Dtype::kFp16;
  switch (rows.from_dtype) {
    case Dtype::kE4m3:
      return to_fp16 ? run<Dtype::kE4m3, Dtype::kFp16>(arguments, stream)
                     : run<Dtype::kE4m3, Dtype::kBf16>(arguments, stream);
    case Dtype::kBf16: return to_fp16 ? run<Dtype::kBf16, Dtype::kFp16>(arguments, stream) : cudaErrorNotSupported;
    case Dtype::kFp16: return to_fp16 ? cudaErrorNotSupported : run<Dtype::kFp16, Dtype::kBf16>(arguments, stream);
    default: return cudaErrorNotSupported;  // checks::is_8bit_query_type()
  }
}

}  // namespace flash
