// Blocks of keys of V^T for the e4m3 forward (core/e4m3.h), and where each comes from.
#pragma once

#include "core/e4m3.h"
#include "core/visible_range.h"
#include "kernels/common/mask.h"
#include "kernels/common/sequence.h"
#include "params/fp8.h"

namespace flash {

// A block of keys of one K/V head.
struct VtTile {
  int begin = 0, end = 0;  // keys within the block that the head's queries see; none when end <= begin
  int64_t source = 0;      // element offset of key 0 in V
  int64_t target = 0;      // of column 0, key 0 in V^T
};

// The block from key `first` of a sequence on.
__device__ __forceinline__ VtTile vt_tile_of(const Flash_fwd_params& params, const Visibility& mask, int first,
                                             int64_t source, int64_t target) {
  const int begin = mask.may_mask_left() ? max(first_visible_key(mask) - first, 0) : 0;
  return {begin, min(mask.seqlen_k - first, e4m3::kVtKeys), source, target};
}

// Block `slot` of a matrix of V^T of a dense batch.
__device__ __forceinline__ VtTile dense_vt_tile(const Flash_fwd_params& params, int64_t vt_keys, int matrix, int slot) {
  const int first = slot * e4m3::kVtKeys, batch = matrix / params.h_k, head = matrix - batch * params.h_k;
  return vt_tile_of(params, {params.seqlen_q, params.seqlen_k, params.window}, first,
                    matrix_offset(params.v_strides, false, batch, first, head), matrix * params.d_v * vt_keys + first);
}

// Transposes four words: word j becomes byte j of each.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(words[0], words[1], 0x5140), low23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high01 = __byte_perm(words[0], words[1], 0x7362), high23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

}  // namespace flash
