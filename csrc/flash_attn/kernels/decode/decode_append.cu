// Writes new keys and values into the KV cache, keys rotated if the call asks for it. Writes nothing for an invalid
// request.
#include <atomic>

#include "core/static_switch.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/common/pdl.h"
#include "kernels/decode/request.h"
#include "kernels/decode/rotary.h"

namespace flash {
namespace {

using namespace decode;

constexpr int kThreads = 256;
constexpr int kVectorsPerThread = 4;

// 16-byte vectors of one request: seqlen_new x h_k x (K, V) rows of `row_vectors`.
struct AppendShape {
  int row_vectors;
  int64_t vectors;
  int64_t blocks;  // CTAs of a request

  __host__ __device__ explicit AppendShape(const Flash_kvcache_params& params)
      : row_vectors((params.d + 7) / 8),
        vectors(2 * static_cast<int64_t>(params.seqlen_new) * params.h_k * row_vectors),
        blocks((vectors + kThreads * kVectorsPerThread - 1) / (kThreads * kVectorsPerThread)) {}
};

struct NewRow {
  int token;
  int head;
};

template <class Element>
struct Append {
  const Flash_kvcache_params& params;
  const KvRequest& request;

  __device__ static const Element* source(const void* base, const MatrixStrides& strides, int batch,
                                          const NewRow& row) {
    return static_cast<const Element*>(base) + batch * strides.batch + row.token * strides.row +
           row.head * strides.head;
  }

  __device__ Element* target(void* base, const MatrixStrides& strides, const NewRow& row) const {
    int64_t batch = request.cache_row;
    int at = request.cached + row.token;
    if (params.paged.block_table != nullptr) {
      const int slot = params.paged.page_size.divide(at);
      batch = params.paged.block_table[request.index * params.paged.block_table_stride + slot];
      at -= slot * params.paged.page_size.divisor;
    }
    return static_cast<Element*>(base) + batch * strides.batch + at * strides.row + row.head * strides.head;
  }

  // One vector, from column `col` on.
  __device__ void copy(const Element* from, Element* to, int col) const {
    if (params.new_vectors) {
      *reinterpret_cast<uint4*>(to + col) = *reinterpret_cast<const uint4*>(from + col);
      return;
    }
    for (int i = col; i < min(col + 8, params.d); ++i) to[i] = from[i];
  }

  __device__ void copy_rotated(const Element* from, Element* to, int col, int token) const {
    const Rotary& rotary = params.rotary;
    for (int i = col; i < min(col + 8, params.d); ++i) {
      if (i >= 2 * rotary.pairs) {
        to[i] = from[i];
        continue;
      }
      const int pair = rotary.interleaved ? i / 2 : i % rotary.pairs;
      const RotaryPair cols = rotary_pair(rotary, pair);
      Element a = from[cols.first], b = from[cols.second];
      rotate_pair(rotary, request.cached + token, pair, a, b);
      to[i] = i == cols.first ? a : b;
    }
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads) kvcache_append_kernel(const __grid_constant__ Flash_kvcache_params params) {
  allow_next_kernel();
  const AppendShape shape(params);
  const int index = static_cast<int>(blockIdx.x / shape.blocks);
  const KvRequest request = kv_request(params, index);
  if (!request.is_valid()) return;
  if (params.paged.block_table != nullptr && __syncthreads_or(needs_invalid_page(params, request, kThreads))) return;
  const Append<Element> append{params, request};
  const int64_t first = (blockIdx.x % shape.blocks) * (kThreads * kVectorsPerThread) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int64_t vector = first + i * kThreads;
    if (vector >= shape.vectors) return;
    const int64_t row = vector / shape.row_vectors;
    const int col = static_cast<int>(vector - row * shape.row_vectors) * 8;
    const bool is_value = row >= shape.vectors / shape.row_vectors / 2;
    const int key_row = static_cast<int>(is_value ? row - shape.vectors / shape.row_vectors / 2 : row);
    const NewRow at{key_row / params.h_k, key_row % params.h_k};
    if (is_value) {
      append.copy(append.source(params.vnew_ptr, params.vnew_strides, index, at),
                  append.target(params.vcache_ptr, params.v_strides, at), col);
    } else {
      const Element* const from = append.source(params.knew_ptr, params.knew_strides, index, at);
      Element* const to = append.target(params.kcache_ptr, params.k_strides, at);
      if (params.rotary.cos_ptr != nullptr && col < 2 * params.rotary.pairs) {
        append.copy_rotated(from, to, col, at.token);
      } else {
        append.copy(from, to, col);
      }
    }
  }
}

template <class Element>
cudaError_t run(const Flash_kvcache_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  return launch(kvcache_append_kernel<Element>, params.b * AppendShape(params).blocks, kThreads, 0, params,
                params.device, stream, configured_devices);
}

}  // namespace

cudaError_t run_kvcache_append(const Flash_kvcache_params& params, Dtype dtype, cudaStream_t stream) {
  return FP16_SWITCH(dtype, [&] { return run<ElementOf<kDtype>>(params, stream); });
}

}  // namespace flash
