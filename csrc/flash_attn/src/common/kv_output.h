// Finished rows of attention against a KV cache: normalised, converted and written, with their LSE.
#pragma once

#include "common/convert.h"
#include "common/kv_request.h"
#include "common/packed_rows.h"
#include "common/partial.h"

namespace flash {

// Four columns of a row; the thread of column 0 also writes the LSE.
template <class Element>
__device__ __forceinline__ void write_output_row(const Flash_kvcache_params& params, const KvQueries& queries,
                                                 const PackedRow& row, int col, const RowStats& stats,
                                                 const float4& value) {
  const float factor = output_factor(stats);
  // A row that counts as unseen is 0 even where its sum is not a number.
  const float4 result = factor == 0.0f ? float4{} : scaled(factor, value);
  const int token = queries.first + row.token;
  Element* const to = static_cast<Element*>(params.o_ptr) + queries.batch * params.o_strides.batch +
                      token * params.o_strides.row + row.head * params.o_strides.head + col;
  const uint2 packed{pack_pair(result.x, result.y, Element{}), pack_pair(result.z, result.w, Element{})};
  if (params.o_vectors && col < params.d) {
    *reinterpret_cast<uint2*>(to) = packed;
  } else {
    const Element* const elements = reinterpret_cast<const Element*>(&packed);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (col + i < params.d) to[i] = elements[i];
    }
  }
  if (col == 0) {
    params.softmax_lse_ptr[(static_cast<int64_t>(queries.batch) * params.h + row.head) * params.seqlen_q + token] =
        natural_lse(stats, params.softmax_scale_log2);
  }
}

}  // namespace flash
