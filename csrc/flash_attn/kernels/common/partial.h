// Partial results of a row and how two are combined. A partial result is the unnormalised output with its row max (of
// raw scores) and row sum. All combining of decode goes through these functions, so that the bits do not depend on
// where it happens, in a thread block or in a kernel of its own.
#pragma once

#include "core/host_device.h"

namespace flash {

struct RowStats {
  float max;  // -inf: no visible key
  float sum;  // kRejected: the request is invalid and must not be served

  static constexpr float kRejected = -1.0f;

  __device__ __forceinline__ bool rejected() const { return sum < 0.0f; }
};

// The scale of a partial result with row max `own` relative to the row max `top` >= own.
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

// Combines (b, b_stats) of the same row into (a, a_stats). Both products of the row sum are rounded, as in the combine
// over many partial results.
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

// The scale from a combined result to the output; 0 for a fully masked or rejected row.
__device__ __forceinline__ float output_factor(const RowStats& stats) {
  return stats.rejected() || stats.sum == 0.0f ? 0.0f : __frcp_rn(stats.sum);
}

// LSE, base e; +inf for a fully masked or rejected row.
__device__ __forceinline__ float natural_lse(const RowStats& stats, float scale) {
  constexpr float kLn2 = 0.69314718055994531f;
  return stats.rejected() || stats.sum == 0.0f ? INFINITY : (stats.max * scale + log2f(stats.sum)) * kLn2;
}

}  // namespace flash
