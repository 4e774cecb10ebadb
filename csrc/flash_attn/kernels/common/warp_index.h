// A thread's warp or warpgroup, shuffled: only so does ptxas see that branches on the index are uniform.
#pragma once

namespace flash {

__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }
__device__ __forceinline__ int warpgroup_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); }

}  // namespace flash
