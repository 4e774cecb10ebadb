// Descales of an 8-bit cache: those of rows travel through the K/V ring, one for each key; those of heads are constants
// of a tile.
#pragma once

#include "kernels/decode/eight_bit.h"
#include "kernels/sm80/warp_ops.h"
#include "params/kvcache.h"

namespace flash {
namespace decode {

// The descale of a request and K/V head; 1 if the call has no descales per request or head.
__device__ __forceinline__ float head_descale(const KvDescale& descale, int request, int head) {
  return descale.ptr == nullptr || descale.by_row || descale.col != 0 ? 1.0f : *descale.of_head(request, head);
}

// Block scales, for products of probabilities and V's descales in fp16. Products are relative to a power of two, that
// of the largest descale that the row has seen, so that they are normal numbers; O has the same scale, and is rescaled
// exactly when it grows. It depends on the row's own keys only, so that batch-invariant results stay the same.
template <int kRows>
struct BlockScales {
  static constexpr float kSmallest = 7.88860905221011805412e-31f;  // 2^-100: its reciprocal times kGain is finite
  static constexpr uint32_t kLargestBits = 0x7e800000;             // 2^126, also for infinities and NaN
  static constexpr float kGain = 4096.0f;  // products are at most 2 * kGain, so that small ones stay normal too

  float scale[kRows];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) scale[mi] = kSmallest;
  }

  // Whether the largest of the warp's descales, all of which the rows see, raises a scale; NaN may seem to.
  __device__ __forceinline__ bool is_below(float descale) const {
    const float largest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(descale))));
    bool result = false;
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) result |= scale[mi] < power_of(largest);
    return result;
  }

  // The row has met descales up to `largest`. Returns the factor for the O accumulated so far.
  __device__ __forceinline__ float raise(int mi, float largest) {
    const float raised = fmaxf(scale[mi], power_of(largest));
    const float factor = scale[mi] * reciprocal(raised);
    scale[mi] = raised;
    return factor;
  }

  __device__ __forceinline__ float inverse(int mi) const { return kGain * reciprocal(scale[mi]); }
  __device__ __forceinline__ float factor(int mi) const { return scale[mi] * (1.0f / kGain); }

 private:
  __device__ __forceinline__ static float power_of(float largest) {
    return __uint_as_float(min(__float_as_uint(largest) & 0x7f800000u, kLargestBits));
  }

  // 1 / scale, for a normal power of two.
  __device__ __forceinline__ static float reciprocal(float scale) {
    return __uint_as_float(0x7f000000u - __float_as_uint(scale));
  }
};

}  // namespace decode
}  // namespace flash
