// Writes new keys and values into an 8-bit KV cache: rotates keys if the call asks for it, then quantises both by the
// cache's descales, or by a new descale of each row, which it also writes. Rows that are quantised already are copied.
// Writes nothing for an invalid request.
#include <atomic>
#include <type_traits>

#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/decode/descales.h"
#include "kernels/decode/request.h"
#include "kernels/decode/rotary.h"
#include "plan/kv_tiles.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 256;
constexpr int kLaneCols = 8;
constexpr int kRowsPerGroup = 4;

// The new rows of K, or of V, of one request: seqlen_new x h_k, each by a group of lanes.
struct QuantizedShape {
  int lane_bits;  // log2 of the lanes of a row, kLaneCols columns each
  int64_t rows;
  int64_t blocks;  // CTAs of K; V has as many

  __host__ __device__ explicit QuantizedShape(const Flash_kvcache_params& params)
      : lane_bits(params.d <= 64    ? 3
                  : params.d <= 128 ? 4
                                    : 5),
        rows(static_cast<int64_t>(params.seqlen_new) * params.h_k) {
    blocks = (rows + groups() * kRowsPerGroup - 1) >> (10 - lane_bits);
    static_assert(kThreads * kRowsPerGroup == 1 << 10, "rows of a CTA are a power of two");
    static_assert(plan::kMaxKv8HeadDim <= 32 * kLaneCols, "the lanes of a row are of one warp");
  }
  __host__ __device__ int lanes() const { return 1 << lane_bits; }
  __host__ __device__ int groups() const { return kThreads >> lane_bits; }
};

// Where a new row goes.
struct CachePlace {
  int64_t batch;  // page, or sequence of the cache
  int64_t row;

  __device__ CachePlace(const Flash_kvcache_params& params, const KvRequest& request, int token)
      : batch(request.cache_row), row(request.cached + token) {
    if (params.paged.block_table == nullptr) return;
    const int slot = params.paged.page_size.divide(static_cast<int>(row));
    batch = params.paged.block_table[request.index * params.paged.block_table_stride + slot];
    row -= slot * params.paged.page_size.divisor;
  }
};

// One row of K or V: this lane's columns [col, col + kLaneCols). All lanes of a warp together; those without a row pass
// false.
template <class Element, bool kIsKey>
struct QuantizedRow {
  const Flash_kvcache_params& params;
  const KvRequest& request;
  int token, head, col, lanes;
  bool exists;

  __device__ void write() const {
    if constexpr (std::is_same_v<Element, uint8_t>) {
      copy();
    } else {
      quantize();
    }
  }

 private:
  // Copies quantised values.
  __device__ void copy() const {
    if (!exists || col >= params.d) return;
    const uint8_t* const from = source() + col;
    uint32_t packed[2] = {};
    for (int i = 0; i < min(params.d - col, kLaneCols); ++i) packed[i / 4] |= uint32_t{from[i]} << 8 * (i % 4);
    store(CachePlace(params, request, token), packed);
  }

  __device__ void quantize() const {
    float values[kLaneCols] = {};
    if (exists) load(values);
    float* const token_descale = kIsKey ? params.k_token_descale_ptr : params.v_token_descale_ptr;
    const float own = token_descale != nullptr ? descale_of_row(values) : 1.0f;
    if (!exists || col >= params.d) return;
    const CachePlace place(params, request, token);
    const KvDescale& descale = given();
    if (token_descale != nullptr && col == 0) {
      token_descale[descale.of_row(place.batch, place.row, head) - descale.ptr] = own;
    }
    float factor = reciprocal_ieee(token_descale != nullptr ? own : given_descale(place));
    uint32_t packed[2] = {};
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) {
      if (descale.ptr != nullptr && descale.col != 0 && col + i < params.d) {
        factor = reciprocal_ieee(descale.of_head(request.index, head)[(col + i) * descale.col]);
      }
      packed[i / 4] |= quantized(multiply_ieee(values[i], factor), params.kv_dtype) << 8 * (i % 4);
    }
    store(place, packed);
  }

  __device__ const KvDescale& given() const { return kIsKey ? params.k_descale : params.v_descale; }

  __device__ const Element* source() const {
    const MatrixStrides& strides = kIsKey ? params.knew_strides : params.vnew_strides;
    return static_cast<const Element*>(kIsKey ? params.knew_ptr : params.vnew_ptr) + request.index * strides.batch +
           token * strides.row + head * strides.head;
  }

  __device__ bool rotates() const {
    return kIsKey && params.rotary.cos_ptr != nullptr && col < 2 * params.rotary.pairs;
  }

  // Columns beyond the head dim are zeros.
  __device__ void load(float (&values)[kLaneCols]) const {
    const Element* const from = source();
    if (params.new_vectors && !rotates()) {
      if (col >= params.d) return;
      const uint4 vector = *reinterpret_cast<const uint4*>(from + col);
      const Element* const elements = reinterpret_cast<const Element*>(&vector);
#pragma unroll
      for (int i = 0; i < kLaneCols; ++i) values[i] = static_cast<float>(elements[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) {
      if (col + i < params.d) values[i] = static_cast<float>(rotated(from, col + i));
    }
  }

  // Rounded to the element's dtype, as a cache of that dtype would hold it.
  __device__ Element rotated(const Element* from, int i) const {
    const Rotary& rotary = params.rotary;
    if (!rotates() || i >= 2 * rotary.pairs) return from[i];
    const int pair = rotary.interleaved ? i / 2 : i % rotary.pairs;
    const RotaryPair cols = rotary_pair(rotary, pair);
    Element a = from[cols.first], b = from[cols.second];
    rotate_pair(rotary, request.cached + token, pair, a, b);
    return i == cols.first ? a : b;
  }

  __device__ float descale_of_row(const float (&values)[kLaneCols]) const {
    float amax = 0.0f;
    int has_nan = 0;
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) {
      amax = fmaxf(amax, fabsf(values[i]));
      has_nan |= values[i] != values[i];
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
      has_nan |= __shfl_xor_sync(0xffffffffu, has_nan, distance);
    }
    return descale_of(amax, has_nan != 0, params.kv_dtype);
  }

  __device__ float given_descale(const CachePlace& place) const {
    const KvDescale& descale = given();
    return descale.ptr != nullptr && descale.by_row ? *descale.of_row(place.batch, place.row, head)
                                                    : head_descale(descale, request.index, head);
  }

  __device__ void store(const CachePlace& place, const uint32_t (&packed)[2]) const {
    const MatrixStrides& strides = kIsKey ? params.k_strides : params.v_strides;
    uint8_t* const to = static_cast<uint8_t*>(kIsKey ? params.kcache_ptr : params.vcache_ptr) +
                        place.batch * strides.batch + place.row * strides.row + head * strides.head + col;
    if (params.new_vectors) {
      *reinterpret_cast<uint2*>(to) = {packed[0], packed[1]};
      return;
    }
    for (int i = 0; i < min(params.d - col, kLaneCols); ++i) to[i] = packed[i / 4] >> 8 * (i % 4) & 0xff;
  }
};

// The rows of one CTA, `block`-th of its request.
template <class Element, bool kIsKey>
__device__ void write_rows(const Flash_kvcache_params& params, const KvRequest& request, const QuantizedShape& shape,
                           int64_t block) {
  const int col = threadIdx.x % shape.lanes() * kLaneCols;
  int64_t row = (block << (10 - shape.lane_bits)) + (threadIdx.x >> shape.lane_bits);
#pragma unroll 1
  for (int i = 0; i < kRowsPerGroup; ++i, row += shape.groups()) {
    const int at = static_cast<int>(row), token = at / params.h_k;
    QuantizedRow<Element, kIsKey>{params, request, token, at - token * params.h_k, col, shape.lanes(), row < shape.rows}
        .write();
  }
}

template <class Element>
__global__ void __launch_bounds__(kThreads)
    kvcache_quantize_kernel(const __grid_constant__ Flash_kvcache_params params) {
  allow_next_kernel();
  const QuantizedShape shape(params);
  const unsigned request_blocks = 2 * static_cast<unsigned>(shape.blocks);
  const int index = static_cast<int>(blockIdx.x / request_blocks);
  const KvRequest request = kv_request(params, index);
  if (!request.is_valid()) return;
  if (params.paged.block_table != nullptr && __syncthreads_or(needs_invalid_page(params, request, kThreads))) return;
  const int64_t block = blockIdx.x - index * request_blocks;
  if (block < shape.blocks) {
    write_rows<Element, true>(params, request, shape, block);
  } else {
    write_rows<Element, false>(params, request, shape, block - shape.blocks);
  }
}

template <class Element>
cudaError_t run(const Flash_kvcache_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch(kvcache_quantize_kernel<Element>, 2 * params.b * QuantizedShape(params).blocks, kThreads, 0, params,
                params.device, stream, configured_devices);
}

}  // namespace

cudaError_t run_kvcache_append_quantized(const Flash_kvcache_params& params, cudaStream_t stream) {
  switch (params.new_dtype) {
    case Dtype::kFp16: return run<ElementOf<Dtype::kFp16>>(params, stream);
    case Dtype::kBf16: return run<ElementOf<Dtype::kBf16>>(params, stream);
    default: return run<uint8_t>(params, stream);
  }
}

}  // namespace flash
