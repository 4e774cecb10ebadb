// Final rows of attention over a KV cache: normalised, converted and stored, with their LSE.
#pragma once

#include "kernels/common/element.h"
#include "kernels/common/partial.h"
#include "kernels/decode/packed_rows.h"
#include "kernels/decode/request.h"

namespace flash {
namespace decode {

// Address of four columns of a row. Separate from the result, so that a kernel can compute it before a wait.
template <class Element>
struct OutputAddress {
  Element* to = nullptr;
  float* lse = nullptr;  // only for the thread of column 0
  int cols = 0;          // how many of the four exist
  bool vector = false;   // stored as one 8-byte vector
};

template <class Element>
__device__ __forceinline__ OutputAddress<Element> output_address(const Flash_kvcache_params& params,
                                                                 const KvQueries& queries, const PackedRow& row,
                                                                 int col) {
  OutputAddress<Element> address;
  const int token = queries.first + row.token;
  address.to = static_cast<Element*>(params.o_ptr) + queries.batch * params.o_strides.batch +
               token * params.o_strides.row + row.head * params.o_strides.head + col;
  address.cols = min(params.d - col, 4);
  address.vector = params.o_vectors && address.cols > 0;
  if (col == 0) {
    address.lse =
        params.softmax_lse_ptr + (static_cast<int64_t>(queries.batch) * params.h + row.head) * params.seqlen_q + token;
  }
  return address;
}

// The sink logit of a query head, base e; -inf: none.
__device__ __forceinline__ float head_sink(const Flash_kvcache_params& params, int head) {
  return params.sinks_ptr != nullptr ? params.sinks_ptr[head] : -INFINITY;
}

template <class Element>
__device__ __forceinline__ void store_output(const OutputAddress<Element>& address, const RowEnd& row,
                                             const float4& value) {
  // A fully masked row, or a row of an invalid request, is 0 even if its sum is NaN.
  const float4 result = row.has_keys() ? scaled(row.o_scale(), value) : float4{};
  const uint2 packed{pack_pair(result.x, result.y, Element{}), pack_pair(result.z, result.w, Element{})};
  if (address.vector) {
    *reinterpret_cast<uint2*>(address.to) = packed;
  } else {
    const Element* const elements = reinterpret_cast<const Element*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < address.cols) address.to[i] = elements[i];
    }
  }
  if (address.lse != nullptr) *address.lse = row.lse();
}

// Four columns of a row; the thread of column 0 also writes the LSE.
template <class Element>
__device__ __forceinline__ void write_output_row(const Flash_kvcache_params& params, const KvQueries& queries,
                                                 const PackedRow& row, int col, const RowStats& stats,
                                                 const float4& value) {
  const RowEnd end{stats, params.softmax_scale_log2, head_sink(params, row.head)};
  store_output(output_address<Element>(params, queries, row, col), end, value);
}

}  // namespace decode
}  // namespace flash
