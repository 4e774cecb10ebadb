// Codes as 16-bit numbers, for the kernel families that read no codes: the keys and values that a call sees, gathered
// from a cache, from pages or from packed rows; and queries.
#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/convert.h"
#include "kernels/common/launch.h"
#include "kernels/common/paged_kv.h"
#include "kernels/decode/descales.h"
#include "kernels/decode/request.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 256;
constexpr int kUnitCols = 8;  // columns that a thread converts at once: 8 bytes are read, 16 written
constexpr int kUnits = 4;     // of a thread, whose reads are in flight together
constexpr int kBlockUnits = 2 * kThreads * kUnits;
constexpr int kBlocksPerSm = 3;
constexpr int kMostBlockKeys = 256;  // keys of an n_block: rows beside those that are seen are loaded with them

// ---- conversion ----

template <Dtype kCodes>
__device__ __forceinline__ void decode_word(uint32_t word, float (&values)[4]) {
  uint32_t pairs[2];
  decode_keys<kCodes>(word, pairs[0], pairs[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[i]));
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// vector_bytes: 8 or more, 4, or less.
__device__ __forceinline__ uint2 load_codes(const uint8_t* from, int vector_bytes, int count) {
  uint2 codes{0, 0};
  if (vector_bytes >= 8) return *reinterpret_cast<const uint2*>(from);
  if (vector_bytes == 4) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
    return {words[0], words[1]};
  }
#pragma unroll
  for (int i = 0; i < kUnitCols; ++i) {
    if (i < count) (i < 4 ? codes.x : codes.y) |= uint32_t{from[i]} << 8 * (i % 4);
  }
  return codes;
}

// A unit times a descale, or times one for each of its columns.
template <Dtype kCodes, class Element>
__device__ __forceinline__ uint4 dequantize(uint2 codes, float descale, const float* of_channels, int64_t stride) {
  float values[2][4];
  decode_word<kCodes>(codes.x, values[0]);
  decode_word<kCodes>(codes.y, values[1]);
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float low = values[i / 2][i % 2 * 2] * descale, high = values[i / 2][i % 2 * 2 + 1] * descale;
    if (of_channels != nullptr) {
      low *= of_channels[2 * i * stride];
      high *= of_channels[(2 * i + 1) * stride];
    }
    words[i] = pack_pair(low, high, Element{});
  }
  return {words[0], words[1], words[2], words[3]};
}

// ---- keys and values ----

struct DequantizeArguments {
  Flash_kvcache_params params;
  DequantizedKv to;
  FastDiv units_of_row, units_of_head;
  int rows_of_block;
  int blocks_of_sequence;  // of K; V has as many

  DequantizeArguments(const Flash_kvcache_params& params_, const DequantizedKv& to_)
      : params(params_),
        to(to_),
        units_of_row(params.h_k * params.d / kUnitCols),
        units_of_head(params.d / kUnitCols),
        rows_of_block(kBlockUnits / units_of_row.divisor) {
    if (rows_of_block == 0) rows_of_block = 1;
    const int rows = to.rows_per_sequence > 0 ? to.rows_per_sequence : params.seqlen_k;
    blocks_of_sequence = (rows + rows_of_block - 1) / rows_of_block;
  }
};

// The keys of a sequence that are dequantised.
struct SourceKeys {
  KvRequest request;  // of packed rows: of none
  int begin = 0;
  int end = 0;
  int zeros_begin = 0, zeros_end = 0;  // the rows around them that are written too
  bool is_too_long = false;            // more keys than there is room for
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
  keys.is_too_long = keys.request.seqlen_k > room;
  const int count = keys.is_too_long ? room : keys.request.seqlen_k;
  if (is_first && arguments.to.key_ranges != nullptr) {
    // Of packed sequences, keys in invalid pages are zeros.
    const bool has_keys = params.is_varlen() || takes_part(params, keys.request);
    if (threadIdx.x == 0) {
      arguments.to.key_ranges[2 * index] = index * room;
      arguments.to.key_ranges[2 * index + 1] = has_keys ? count : 0;
    }
  }
  const int queries = kv_queries<true>(params, index).count;
  if (!keys.request.is_valid() || queries == 0) return keys;
  keys.end = keys.zeros_end = count;
  if (keys.is_too_long) return keys;
  const Visibility visibility{queries, count, params.window};
  keys.begin = visibility.key_begin(0);
  keys.end = visibility.key_end(queries - 1);
  keys.zeros_begin = max(keys.begin - kMostBlockKeys, 0);
  keys.zeros_end = min(keys.end + kMostBlockKeys, count);
  return keys;
}

// A key: where its codes and its descales lie.
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

// The sequence of a packed row, any one for rows of none.
__device__ __forceinline__ int sequence_of_row(const Flash_kvcache_params& params, int row) {
  const int* const segments = params.varlen.segments_k;
  int low = 0, high = params.b + 2;  // segments[low] <= row < segments[high], were there no empty ones
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (segments[middle] <= row ? low : high) = middle;
  }
  return clamp(low - 1, 0, params.b - 1);
}

// Rows of K, or of V, of one sequence.
template <Dtype kCodes, class Element>
struct Dequantizer {
  const DequantizeArguments& arguments;
  const SourceKeys& keys;
  const uint8_t* from;
  const MatrixStrides& strides;
  const KvDescale& descale;
  Element* to;  // row of key 0

  struct Unit {
    uint2 codes;
    float descale;
    int64_t at;  // in `to`; -1: none
    const float* of_channels;
  };

  __device__ __forceinline__ Unit load(int first_key, int unit) const {
    const Flash_kvcache_params& params = arguments.params;
    const int block_row = arguments.units_of_row.divide(unit), key = first_key + block_row;
    Unit result{{0, 0}, 1.0f, -1, nullptr};
    if (block_row >= arguments.rows_of_block || key < keys.zeros_begin || key >= keys.zeros_end) return result;
    const int of_row = unit - block_row * arguments.units_of_row.divisor;
    const int head = arguments.units_of_head.divide(of_row);
    const int col = (of_row - head * arguments.units_of_head.divisor) * kUnitCols;
    result.at = (static_cast<int64_t>(key) * arguments.units_of_row.divisor + of_row) * kUnitCols;
    if (key < keys.begin || key >= keys.end) return result;
    const KeyPlace place(params, keys.request, key);
    if (!place.valid) return result;
    const int64_t offset = place.batch * strides.batch + place.row * strides.row + head * strides.head + col;
    result.codes = load_codes(from + offset, params.kv_vector_bytes, kUnitCols);
    if (descale.ptr == nullptr) return result;
    if (descale.by_row) {
      result.descale = *descale.of_row(place.batch, place.row, head);
      return result;
    }
    const bool searches = arguments.to.rows_per_sequence == 0 && descale.batch != 0;
    const float* const of_head = descale.of_head(searches ? sequence_of_row(params, key) : keys.request.index, head);
    if (descale.col == 0) {
      result.descale = *of_head;
    } else {
      result.of_channels = of_head + col * descale.col;
    }
    return result;
  }

  __device__ __forceinline__ void store(const Unit& unit) const {
    if (unit.at < 0) return;
    const float factor = keys.is_too_long ? __int_as_float(0x7fc00000) : unit.descale;
    *reinterpret_cast<uint4*>(to + unit.at) =
        dequantize<kCodes, Element>(unit.codes, factor, unit.of_channels, descale.col);
  }

  // Of the keys from first_key on, those of a thread block.
  __device__ __forceinline__ void run(int first_key) const {
    const int all_units = arguments.rows_of_block * arguments.units_of_row.divisor;
#pragma unroll 1
    for (int first = threadIdx.x; first < all_units; first += kThreads * kUnits) {
      Unit units[kUnits];
#pragma unroll
      for (int i = 0; i < kUnits; ++i) units[i] = load(first_key, first + i * kThreads);
#pragma unroll
      for (int i = 0; i < kUnits; ++i) store(units[i]);
    }
  }
};

// No call of allow_next_kernel(): the forward, which may be launched as this kernel's dependent, reads all of it.
template <Dtype kCodes, class Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    dequantize_kv_kernel(const __grid_constant__ DequantizeArguments arguments) {
  const Flash_kvcache_params& params = arguments.params;
  const unsigned sequence_blocks = 2 * static_cast<unsigned>(arguments.blocks_of_sequence);
  const int index = static_cast<int>(blockIdx.x / sequence_blocks);
  int block = static_cast<int>(blockIdx.x - index * sequence_blocks);
  const bool is_packed = arguments.to.rows_per_sequence == 0;
  const SourceKeys keys = is_packed ? packed_rows(params) : sequence_keys(arguments, index, block == 0);
  const bool is_value = block >= arguments.blocks_of_sequence;
  if (is_value) block -= arguments.blocks_of_sequence;
  const int first_key = block * arguments.rows_of_block;
  if (first_key >= keys.zeros_end || first_key + arguments.rows_of_block <= keys.zeros_begin) return;
  const int64_t first_row = static_cast<int64_t>(index) * arguments.to.rows_per_sequence;
  const int64_t offset = first_row * arguments.units_of_row.divisor * kUnitCols;
  Element* const to = static_cast<Element*>(is_value ? arguments.to.v_ptr : arguments.to.k_ptr) + offset;
  const uint8_t* const from = static_cast<const uint8_t*>(is_value ? params.v_ptr : params.k_ptr);
  Dequantizer<kCodes, Element>{arguments,
                               keys,
                               from,
                               is_value ? params.v_strides : params.k_strides,
                               is_value ? params.v_descale : params.k_descale,
                               to}
      .run(first_key);
}

// ---- queries ----

struct QueryArguments {
  Flash_kvcache_params params;
  QueryCodes codes;
  void* to;
  FastDiv units_of_row;
};

template <class Element>
__global__ void __launch_bounds__(kThreads) dequantize_query_kernel(const __grid_constant__ QueryArguments arguments) {
  const Flash_kvcache_params& params = arguments.params;
  const QueryCodes& codes = arguments.codes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = index / arguments.units_of_row.divisor;  // of (b, seqlen_q, h)
  const int col = static_cast<int>(index - row * arguments.units_of_row.divisor) * kUnitCols;
  const int64_t token_row = row / params.h, batch = token_row / params.seqlen_q;
  if (batch >= params.b) return;
  const int head = static_cast<int>(row - token_row * params.h);
  const uint8_t* const from = static_cast<const uint8_t*>(codes.ptr) + batch * codes.strides.batch +
                              (token_row - batch * params.seqlen_q) * codes.strides.row + head * codes.strides.head +
                              col;
  const int descale_head = codes.of_kv_heads ? params.group.divide(head) : head;
  const float descale = head_descale(codes.descale, static_cast<int>(batch), descale_head);
  const int count = min(params.d - col, kUnitCols);
  const uint4 values = dequantize<Dtype::kE4m3, Element>(
      load_codes(from, codes.vectors && count == kUnitCols ? 8 : 1, count), descale, nullptr, 0);
  Element* const to = static_cast<Element*>(arguments.to) + row * params.d + col;
  if (params.d % kUnitCols == 0) {
    *reinterpret_cast<uint4*>(to) = values;
    return;
  }
  const Element* const elements = reinterpret_cast<const Element*>(&values);
#pragma unroll
  for (int i = 0; i < kUnitCols; ++i) {
    if (i < count) to[i] = elements[i];
  }
}

template <Dtype kCodes, class Element>
cudaError_t run_kv(const DequantizeArguments& arguments, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t sequences = arguments.to.rows_per_sequence > 0 ? arguments.params.b : 1;
  return launch(dequantize_kv_kernel<kCodes, Element>, 2 * sequences * arguments.blocks_of_sequence, kThreads, 0,
                arguments, arguments.params.device, stream, configured_devices);
}

template <class Element>
cudaError_t run_query(const QueryArguments& arguments, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const Flash_kvcache_params& params = arguments.params;
  const int64_t rows = static_cast<int64_t>(params.b) * params.seqlen_q * params.h;
  return launch(dequantize_query_kernel<Element>, (rows * arguments.units_of_row.divisor + kThreads - 1) / kThreads,
                kThreads, 0, arguments, params.device, stream, configured_devices);
}

}  // namespace

cudaError_t run_dequantize_kv(const Flash_kvcache_params& params, const DequantizedKv& to, cudaStream_t stream) {
  const DequantizeArguments arguments(params, to);
  return FP16_SWITCH(params.q_dtype, [&] {
    using Element = ElementOf<kDtype>;
    return params.kv_dtype == Dtype::kE4m3 ? run_kv<Dtype::kE4m3, Element>(arguments, stream)
                                           : run_kv<Dtype::kInt8, Element>(arguments, stream);
  });
}

cudaError_t run_dequantize_query(const Flash_kvcache_params& params, const QueryCodes& codes, void* to,
                                 cudaStream_t stream) {
  const QueryArguments arguments{params, codes, to, FastDiv((params.d + kUnitCols - 1) / kUnitCols)};
  return FP16_SWITCH(params.q_dtype, [&] { return run_query<ElementOf<kDtype>>(arguments, stream); });
}

}  // namespace flash
