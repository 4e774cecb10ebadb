// Which rows see some key, and which keys some row sees, under a mask as data: bits that its plan pass has made.
#pragma once

#include <type_traits>

#include "core/block_range.h"
#include "params/flash.h"

namespace flash {

// The first strip of a sequence. Those of a packed batch are numbered by slots; first: the sequence's first row or key
// in the packed tensor.
__device__ __forceinline__ int first_strip(const Flash_fwd_params& params, int first, int segment) {
  return params.is_varlen() ? varlen_first_slot(first, segment, kMaskStrip) : 0;
}

// Of its keys. With seqused_k sequences may share slots: each has strips for the keys of all.
template <class Params>
__device__ __forceinline__ int first_key_strip(const Params& params, int k_begin, int segment) {
  if constexpr (!std::is_base_of_v<Flash_bwd_params, Params>) {  // which has no seqused_k
    if (params.varlen.seqused_k != nullptr) return (segment - 1) * key_strips_of_sequence(params.seqlen_k);
  }
  return first_strip(params, k_begin, segment);
}

// matrix_strips: strips of a mask matrix.
__device__ __forceinline__ const uint32_t* seen_words(const uint32_t* words, int matrix, int matrix_strips, int strip) {
  return words + (static_cast<int64_t>(matrix) * matrix_strips + strip) * (kMaskStrip / kMaskWordKeys);
}

__device__ __forceinline__ const uint32_t* seen_rows(const Flash_fwd_params& params, const MaskParams& mask, int batch,
                                                     int head, int q_begin, int segment) {
  const int matrix = mask.matrices.index(batch, head);
  return seen_words(mask.seen.rows, matrix, mask.seen.row_strips, first_strip(params, q_begin, segment));
}

template <class Params>
__device__ __forceinline__ const uint32_t* seen_keys(const Params& params, const MaskParams& mask, int batch, int head,
                                                     int k_begin, int segment) {
  const int matrix = mask.matrices.index(batch, head);
  return seen_words(mask.seen.keys, matrix, mask.seen.key_strips, first_key_strip(params, k_begin, segment));
}

__device__ __forceinline__ bool is_seen(const uint32_t* seen, int index) {
  return seen[index / kMaskWordKeys] >> (index % kMaskWordKeys) & 1u;
}

}  // namespace flash
