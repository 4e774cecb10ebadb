// Partial results of a row over disjoint splits of its keys, and how they are combined. The decode kernels' are an
// unnormalised output with its row max (of raw scores) and row sum. All code combines them by these functions, so that
// the bits are the same whether the attention kernel or a combine kernel does it. Those of the wgmma forward and of the
// caller are normalised: output and LSE (CombinedRow).
#pragma once

#include "core/host_device.h"

namespace flash {

struct RowStats {
  float max;  // -inf: no visible key
  float sum;  // kInvalid: the request is invalid and its result must not be used

  static constexpr float kInvalid = -1.0f;

  __device__ __forceinline__ bool invalid() const { return sum < 0.0f; }
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

// A thread's columns of a row.
template <int kQuads>
struct RowValue {
  float4 quads[kQuads];

  __device__ __forceinline__ void clear() {
    for (float4& quad : quads) quad = float4{};
  }

  __device__ __forceinline__ void scale(float weight) {
    for (float4& quad : quads) quad = scaled(weight, quad);
  }

  __device__ __forceinline__ void add(float weight, const RowValue& value) {
    for (int i = 0; i < kQuads; ++i) quads[i] = add_scaled(quads[i], weight, value.quads[i]);
  }
};

// Combines (b, b_stats) of the same row into (a, a_stats). The two products of the row sum are rounded before they are
// added (no FMA): the bits are then those of combining many.
__device__ __forceinline__ void combine_partials(RowStats& a_stats, float4& a, const RowStats& b_stats, const float4& b,
                                                 float scale) {
  const float top = fmaxf(a_stats.max, b_stats.max);
  const float a_weight = partial_weight(a_stats.max, top, scale), b_weight = partial_weight(b_stats.max, top, scale);
  const bool invalid = a_stats.invalid() || b_stats.invalid();
  const float sum = __fadd_rn(__fmul_rn(a_weight, a_stats.sum), __fmul_rn(b_weight, b_stats.sum));
  a_stats.sum = invalid ? RowStats::kInvalid : sum;
  a_stats.max = top;
  a = add_scaled(scaled(a_weight, a), b_weight, b);
}

// The end of a row, after all partial results are combined. `sink`: natural-log logit of one more key without a value,
// -inf for none. A sink above the row max replaces it as reference of the sum, as in Softmax::finalize(). Roundings are
// explicit, because several kernels finish rows.
struct RowEnd {
  const RowStats& stats;
  const float scale, sink;
  float sum;                // with the sink
  float correction = 1.0f;  // from the row max to the reference of the sum
  bool sink_is_largest = false;

  __device__ __forceinline__ RowEnd(const RowStats& stats_, float scale_, float sink_)
      : stats(stats_), scale(scale_), sink(sink_), sum(stats_.sum) {
    constexpr float kLog2e = 1.4426950408889634f;
    if (sink == -INFINITY) return;
    const float above = __fmaf_rn(sink, kLog2e, -__fmul_rn(stats.max, scale));  // log2 distance from the row max
    const float weight = exp2f(-fabsf(above));                                  // of the lower one of the two
    sink_is_largest = above > 0.0f;
    sum = sink_is_largest ? __fmaf_rn(weight, stats.sum, 1.0f) : __fadd_rn(stats.sum, weight);
    if (sink_is_largest) correction = weight;
  }

  __device__ __forceinline__ bool has_keys() const { return !stats.invalid() && stats.sum != 0.0f; }

  // The factor from a combined result to the output, for a row that has keys.
  __device__ __forceinline__ float o_scale() const { return __fmul_rn(correction, __frcp_rn(sum)); }

  // LSE, base e. Without keys it is the sink, or +inf; for an invalid request it is +inf.
  __device__ __forceinline__ float lse() const {
    constexpr float kLn2 = 0.69314718055994531f;
    if (!has_keys()) return stats.invalid() || sink == -INFINITY ? INFINITY : sink;
    const float log_sum = log2f(sum);
    return sink_is_largest ? __fmaf_rn(log_sum, kLn2, sink) : __fmul_rn(__fmaf_rn(stats.max, scale, log_sum), kLn2);
  }
};

// LSE of a normalised partial result; -inf if it has no key, which an infinity of either sign means.
__device__ __forceinline__ float partial_lse(float lse) { return lse == INFINITY ? -INFINITY : lse; }

// Sum so far of a row's normalised partial results, relative to their greatest LSE, stats.max. A NaN among the LSEs
// makes stats.sum NaN, and so the whole row.
template <int kQuads>
struct CombinedRow {
  static constexpr float kLog2e = 1.4426950408889634f;

  RowStats stats{-INFINITY, 0.0f};
  RowValue<kQuads> value{};

  __device__ __forceinline__ void update_max(float lse) {
    if (lse <= stats.max) return;
    const float correction = partial_weight(stats.max, lse, kLog2e);
    stats.sum *= correction;
    value.scale(correction);
    stats.max = lse;
  }

  // Call update_max() with this LSE before. A partial result without keys adds nothing, whatever `partial` holds.
  __device__ __forceinline__ void add(float lse, RowValue<kQuads> partial) {
    const float weight = partial_weight(lse, stats.max, kLog2e);
    if (lse == -INFINITY) partial.clear();
    stats.sum += weight;
    value.add(weight, partial);
  }

  // Adds a key without a value: -inf for none; +inf has all the weight.
  __device__ __forceinline__ void add_sink(float logit) {
    if (logit == -INFINITY) return;
    update_max(logit);
    stats.sum += logit == stats.max ? 1.0f : partial_weight(logit, stats.max, kLog2e);
  }

  __device__ __forceinline__ void normalize() { value.scale(stats.sum == 0.0f ? 0.0f : 1.0f / stats.sum); }
  __device__ __forceinline__ float lse() const { return stats.sum == 0.0f ? INFINITY : stats.max + logf(stats.sum); }
};

}  // namespace flash
