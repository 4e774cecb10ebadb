// The scalar product of two 16-byte vectors: softmax_d has the same bits wherever it is computed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash {

__device__ __forceinline__ float2 to_floats(__half2 pair) { return __half22float2(pair); }
__device__ __forceinline__ float2 to_floats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }

template <class Pair>
__device__ __forceinline__ float dot(const uint4& a, const uint4& b) {
  const Pair* x = reinterpret_cast<const Pair*>(&a);
  const Pair* y = reinterpret_cast<const Pair*>(&b);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 u = to_floats(x[i]), v = to_floats(y[i]);
    sum = __fmaf_rn(u.y, v.y, __fmaf_rn(u.x, v.x, sum));
  }
  return sum;
}

}  // namespace flash
