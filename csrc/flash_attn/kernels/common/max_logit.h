// Largest logit of each head, for all kernel families; NaN where a row's sum of probabilities is NaN.
#pragma once

#include "kernels/common/sequence.h"
#include "kernels/common/softmax.h"

namespace flash {

// Non-negative floats order like their bits as integers, negative ones in reverse. Branching on the sign bit handles
// -0; a NaN with sign bit 0 is above all others.
__device__ __forceinline__ void atomic_max(float* address, float value) {
  const int bits = __float_as_int(value);
  if (bits >= 0) {
    atomicMax(reinterpret_cast<int*>(address), bits);
  } else {
    atomicMin(reinterpret_cast<unsigned*>(address), static_cast<unsigned>(bits));
  }
}

// Call before finalize(), after a loop with rescale_threshold 0: then row_max holds the true maxima. `row_begin`: row
// of coords' row 0 within the sequence.
template <int kRows, class Flag, int kSums, class Coords>
__device__ __forceinline__ void store_max_logit(const Softmax<kRows, Flag, kSums>& softmax,
                                                const Flash_fwd_params& params, const WorkTile& tile,
                                                const Coords& coords, int row_begin) {
  if (params.max_logit_ptr == nullptr) return;
  float largest = -INFINITY;
  bool is_nan = false;  // fmaxf ignores NaN, sums do not
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    // Rows beyond the sequence are zeros in shared memory: their scores must not count.
    if (row_begin + coords.row(mi) >= tile.row_end) continue;
    if (softmax.row_max[mi] > softmax.kLowest) largest = fmaxf(largest, softmax.row_max[mi]);
#pragma unroll
    for (int i = 0; i < kSums; ++i) is_nan |= isnan(softmax.row_sum[mi][i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
  }
  if (__any_sync(0xffffffffu, is_nan)) largest = NAN;
  if (threadIdx.x % 32 != 0 || largest == -INFINITY) return;
  atomic_max(params.max_logit_ptr + tile.head, largest * params.softmax_scale_log2 * Softmax<kRows, Flag, kSums>::kLn2);
}

}  // namespace flash
