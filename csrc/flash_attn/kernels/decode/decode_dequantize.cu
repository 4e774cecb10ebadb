// Gathers and dequantises to fp16 the visible K and V of a cache, of pages or of packed rows, for the prefill kernels,
// which take 16-bit K and V.
#include <algorithm>
#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/launch.h"
#include "kernels/common/paged_kv.h"
#include "kernels/decode/descales.h"
#include "kernels/decode/request.h"
#include "kernels/decode/row_vectors.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 256;
constexpr int kThreadVectors = 4;  // of a thread; their reads are in flight together
constexpr int kBlockVectors = 2 * kThreads * kThreadVectors;
constexpr int kBlocksPerSm = 3;
constexpr int kWaves = 8;  // of CTAs at most: capacities are far above lengths, and CTAs without keys cost time
constexpr int kMostBlockKeys = 256;  // keys of an n_block: masked rows in the same block are loaded too

// A vector times one descale, or times one for each column.
template <Dtype kQuantized>
__device__ __forceinline__ uint4 dequantize(uint2 packed, float descale, const float* of_channels, int64_t stride) {
  float values[kRowVectorCols];
  unpack_vector<kQuantized>(packed, values);
#pragma unroll
  for (int i = 0; i < kRowVectorCols; ++i) values[i] *= of_channels == nullptr ? descale : of_channels[i * stride];
  return pack_vector<Dtype::kFp16>(values);
}

struct DequantizeArguments {
  Flash_kvcache_params params;
  DequantizedKv to;
  FastDiv vectors_of_row, vectors_of_head;
  int rows_of_block;
  int ctas_of_sequence;  // CTAs of a sequence for K; V has as many. Each takes every ctas_of_sequence-th block

  DequantizeArguments(const Flash_kvcache_params& params_, const DequantizedKv& to_)
      : params(params_),
        to(to_),
        vectors_of_row(params.h_k * params.d / kRowVectorCols),
        vectors_of_head(params.d / kRowVectorCols),
        rows_of_block(kBlockVectors / vectors_of_row.divisor) {
    if (rows_of_block == 0) rows_of_block = 1;
    const int rows = to.rows_per_sequence > 0 ? to.rows_per_sequence : params.seqlen_k;
    const int blocks = (rows + rows_of_block - 1) / rows_of_block;
    const int most = kWaves * kBlocksPerSm * to.multiprocessors / (2 * sequences());
    ctas_of_sequence = std::min(blocks, std::max(most, 1));
  }

  int sequences() const { return to.rows_per_sequence > 0 ? params.b : 1; }
};

// The keys of a sequence that are dequantised.
struct SourceKeys {
  KvRequest request;  // unused for packed rows
  int begin = 0;
  int end = 0;
  int zeros_begin = 0, zeros_end = 0;  // rows around them that are written as zeros
};

__device__ __forceinline__ SourceKeys packed_rows(const Flash_kvcache_params& params) {
  SourceKeys keys;
  keys.end = keys.zeros_end = params.seqlen_k;
  return keys;
}

// All threads together.
__device__ __forceinline__ SourceKeys sequence_keys(const DequantizeArguments& arguments, int index, bool is_first) {
  const Flash_kvcache_params& params = arguments.params;
  const int room = arguments.to.rows_per_sequence;
  SourceKeys keys;
  keys.request = params.is_varlen() ? packed_request(params, index + 1) : kv_request(params, index);
  const int count = min(keys.request.seqlen_k, room);  // the results of longer sequences are not used
  if (is_first && arguments.to.key_ranges != nullptr) {
    // In packed sequences, keys in invalid pages become zeros.
    const bool has_keys = params.is_varlen() || is_active(params, keys.request);
    if (threadIdx.x == 0) {
      arguments.to.key_ranges[2 * index] = index * room;
      arguments.to.key_ranges[2 * index + 1] = has_keys ? count : 0;
    }
  }
  const int queries = kv_queries<true>(params, index).count;
  if (!keys.request.is_valid() || queries == 0) return keys;
  keys.end = keys.zeros_end = count;
  const Visibility visibility{queries, count, params.window};
  keys.begin = visibility.key_begin(0);
  keys.end = visibility.key_end(queries - 1);
  keys.zeros_begin = max(keys.begin - kMostBlockKeys, 0);
  keys.zeros_end = min(keys.end + kMostBlockKeys, count);
  return keys;
}

// Where the values and descales of a key are.
struct KeyPlace {
  int64_t batch;  // page, or sequence of the cache
  int64_t row;
  bool valid;

  __device__ __forceinline__ KeyPlace(const Flash_kvcache_params& params, const KvRequest& request, int key)
      : batch(request.cache_row), row(request.first_row + key), valid(true) {
    if (params.paged.block_table == nullptr) return;
    const int* const table = params.paged.block_table + request.index * params.paged.block_table_stride;
    const PageRow at = page_row(params.paged, table, static_cast<int>(row), true);
    batch = at.valid ? at.page : 0;
    row = at.row;
    valid = at.valid;
  }
};

// Rows of K, or of V, of one sequence.
template <Dtype kQuantized>
struct Dequantizer {
  const DequantizeArguments& arguments;
  const SourceKeys& keys;
  const uint8_t* from;
  const MatrixStrides& strides;
  const KvDescale& descale;
  bool by_power;  // only by the power of two of a head's descale, see DequantizedKv
  __half* to;     // row of key 0

  struct Vector {
    uint2 packed;
    float descale;
    int64_t at;  // in `to`; -1: none
    const float* of_channels;
  };

  __device__ __forceinline__ Vector load(int first_key, int vector) const {
    const Flash_kvcache_params& params = arguments.params;
    const int block_row = arguments.vectors_of_row.divide(vector), key = first_key + block_row;
    Vector result{{0, 0}, 1.0f, -1, nullptr};
    if (block_row >= arguments.rows_of_block || key < keys.zeros_begin || key >= keys.zeros_end) return result;
    const int of_row = vector - block_row * arguments.vectors_of_row.divisor;
    const int head = arguments.vectors_of_head.divide(of_row);
    const int col = (of_row - head * arguments.vectors_of_head.divisor) * kRowVectorCols;
    result.at = (static_cast<int64_t>(key) * arguments.vectors_of_row.divisor + of_row) * kRowVectorCols;
    if (key < keys.begin || key >= keys.end) return result;
    const KeyPlace place(params, keys.request, key);
    if (!place.valid) return result;
    const int64_t offset = place.batch * strides.batch + place.row * strides.row + head * strides.head + col;
    result.packed = load_quantized(from + offset, params.kv_vector_bytes, kRowVectorCols);
    if (descale.ptr == nullptr) return result;
    if (descale.by_row) {
      result.descale = *descale.of_row(place.batch, place.row, head);
      return result;
    }
    const bool searches = arguments.to.rows_per_sequence == 0 && descale.batch != 0;
    const float* const of_head =
        descale.of_head(searches ? sequence_of_row(params.varlen.segments_k, params.b, key) : keys.request.index, head);
    if (descale.col == 0) {
      result.descale = by_power ? key_power(*of_head) : *of_head;
    } else {
      result.of_channels = of_head + col * descale.col;
    }
    return result;
  }

  __device__ __forceinline__ void store(const Vector& vector) const {
    if (vector.at < 0) return;
    *reinterpret_cast<uint4*>(to + vector.at) =
        dequantize<kQuantized>(vector.packed, vector.descale, vector.of_channels, descale.col);
  }

  // A thread block's share of the keys from first_key on.
  __device__ __forceinline__ void run(int first_key) const {
    const int all_vectors = arguments.rows_of_block * arguments.vectors_of_row.divisor;
#pragma unroll 1
    for (int first = threadIdx.x; first < all_vectors; first += kThreads * kThreadVectors) {
      Vector vectors[kThreadVectors];
#pragma unroll
      for (int i = 0; i < kThreadVectors; ++i) vectors[i] = load(first_key, first + i * kThreads);
#pragma unroll
      for (int i = 0; i < kThreadVectors; ++i) store(vectors[i]);
    }
  }
};

// Never calls allow_next_kernel(): the forward, which may be launched as this kernel's dependent, reads all of its
// results.
template <Dtype kQuantized>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dequantize_kv_kernel(const __grid_constant__ DequantizeArguments arguments) {
  const Flash_kvcache_params& params = arguments.params;
  const int ctas = arguments.ctas_of_sequence, rows = arguments.rows_of_block;
  const int index = static_cast<int>(blockIdx.x) / (2 * ctas);
  int cta = static_cast<int>(blockIdx.x) - index * 2 * ctas;
  const bool is_packed = arguments.to.rows_per_sequence == 0;
  const SourceKeys keys = is_packed ? packed_rows(params) : sequence_keys(arguments, index, cta == 0);
  const bool is_value = cta >= ctas;
  if (is_value) cta -= ctas;
  const int64_t first_row = static_cast<int64_t>(index) * arguments.to.rows_per_sequence;
  const int64_t offset = first_row * arguments.vectors_of_row.divisor * kRowVectorCols;
  const Dequantizer<kQuantized> dequantizer{
      arguments,
      keys,
      static_cast<const uint8_t*>(is_value ? params.v_ptr : params.k_ptr),
      is_value ? params.v_strides : params.k_strides,
      is_value ? params.v_descale : params.k_descale,
      !is_value && arguments.to.k_by_power,
      static_cast<__half*>(is_value ? arguments.to.v_ptr : arguments.to.k_ptr) + offset};
  const int begin = keys.zeros_begin / rows * rows, step = ctas * rows;
  for (int first_key = begin + cta * rows; first_key < keys.zeros_end; first_key += step) dequantizer.run(first_key);
}

template <Dtype kQuantized>
cudaError_t run_kv(const DequantizeArguments& arguments, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t ctas = int64_t{2} * arguments.sequences() * arguments.ctas_of_sequence;
  return launch(dequantize_kv_kernel<kQuantized>, ctas, kThreads, 0, arguments, arguments.params.device, stream,
                configured_devices);
}

}  // namespace

cudaError_t run_dequantize_kv(const Flash_kvcache_params& params, const DequantizedKv& to, cudaStream_t stream) {
  const DequantizeArguments arguments(params, to);
  return E4M3_SWITCH(params.kv_dtype, [&] { return run_kv<kDtype>(arguments, stream); });
}

}  // namespace flash
