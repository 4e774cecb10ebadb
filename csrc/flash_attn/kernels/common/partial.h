// Partial results of a row and their merge. A partial result is the unnormalised output with the maximum of the raw
// scores that it refers to and the sum of the exponentials. Every merge goes through these functions, so that where it
// happens (in a thread block or in a kernel of its own) makes no difference to a single bit.
#pragma once

#include "core/host_device.h"

namespace flash {

struct RowStats {
  float max;  // -inf: nothing seen
  float sum;  // kRejected: the request must not be served

  static constexpr float kRejected = -1.0f;

  __device__ __forceinline__ bool rejected() const { return sum < 0.0f; }
};

// The factor of a partial result when it is referred to `top` >= own.
__device__ __forceinline__ float partial_weight(float own, float top, float scale) {
  return own == -INFINITY ? 0.0f : exp2f((own - top) * scale);
}

__device__ __forceinline__ float4 scaled(float weight, const float4& value) {
  return {__fmul_rn(weight, value.x), __fmul_rn(weight, value.y), __fmul_rn(weight, value.z),
          __fmul_rn(weight, value.w)};
}

__device__ __forceinline__ float4 add_scaled(const float4& sum, float weight, const float4& value) {
  return {__fmaf_rn(weight, value.x, sum.x), __fmaf_rn(weight, value.y, sum.y), __fmaf_rn(weight, value.z, sum.z),
          __fmaf_rn(weight, value.w, sum.w)};
}

// (a, a_stats) and (b, b_stats) of one row into a. Both products of the sum are rounded, as where warps add up many.
__device__ __forceinline__ void combine_partials(RowStats& a_stats, float4& a, const RowStats& b_stats, const float4& b,
                                                 float scale) {
  const float top = fmaxf(a_stats.max, b_stats.max);
  const float a_weight = partial_weight(a_stats.max, top, scale), b_weight = partial_weight(b_stats.max, top, scale);
  const bool rejected = a_stats.rejected() || b_stats.rejected();
  const float sum = __fadd_rn(__fmul_rn(a_weight, a_stats.sum), __fmul_rn(b_weight, b_stats.sum));
  a_stats.sum = rejected ? RowStats::kRejected : sum;
  a_stats.max = top;
  a = add_scaled(scaled(a_weight, a), b_weight, b);
}

// The factor that turns a merged result into the output; 0 for a row that saw nothing or is refused.
__device__ __forceinline__ float output_factor(const RowStats& stats) {
  return stats.rejected() || stats.sum == 0.0f ? 0.0f : __frcp_rn(stats.sum);
}

// Natural-log LSE; +inf marks a row that saw nothing or is refused.
__device__ __forceinline__ float natural_lse(const RowStats& stats, float scale) {
  constexpr float kLn2 = 0.69314718055994531f;
  return stats.rejected() || stats.sum == 0.0f ? INFINITY : (stats.max * scale + log2f(stats.sum)) * kLn2;
}

}  // namespace flash
