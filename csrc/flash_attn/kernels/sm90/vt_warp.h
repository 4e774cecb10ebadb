// V^T of the e4m3 forward in global memory by the forward's idle warps, beside the work tiles: later tiles read what
// the pass before the forward (auxiliary/transpose_v.cu) leaves out.
#pragma once

#include "kernels/common/vt_tile.h"
#include "kernels/sm90/fp8_fwd_launch_params.h"

namespace flash {
namespace sm90 {

// Waits, by the scheduler warp, until the V^T of a work tile is filled. No thread block depends on one that has not
// started: a warp that takes a piece fills it without waiting for anything.
template <class Config>
__device__ __forceinline__ void wait_for_inputs(const Fp8FwdLaunch& launch, const WorkTile& tile) {
  if (!Config::kTransposedV || launch.vt_progress == nullptr) return;
  const int matrix = tile.batch * launch.params.h_k + launch.group.divide(tile.head);
  if (matrix < launch.vt_first) return;
  const int* const filled = launch.vt_progress + 1 + matrix;
  const int pieces = vt_pieces(launch, Config::kHeadDimV);
  int count;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(filled) : "memory");
  } while (count < pieces);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA reads it
}

// Takes pieces in turn with the warps of all thread blocks: matrices in the order of their heads, the last keys first,
// as work tiles read them.
template <class Config>
struct VtWarp {
  static constexpr int kParts = Config::kHeadDimV / kVtPieceCols;
  static constexpr int kCols = 8;  // columns of V in registers at a time: four keys of each lane

  const Fp8FwdLaunch& launch;

  // The result is that of lane 0.
  __device__ __forceinline__ int take() const { return threadIdx.x % 32 == 0 ? atomicAdd(launch.vt_progress, 1) : 0; }

  __device__ __forceinline__ void run() const {
    if (launch.vt_progress == nullptr) return;
    const int of_matrix = vt_pieces(launch, Config::kHeadDimV);
    const int pieces = (launch.params.b * launch.params.h_k - launch.vt_first) * of_matrix;
    int piece = __shfl_sync(0xffffffffu, take(), 0);
    while (piece < pieces) {
      const int taken = take();  // its latency passes meanwhile
      const int matrix = piece / of_matrix, within = piece - matrix * of_matrix;
      fill(launch.vt_first + matrix, (of_matrix - 1 - within) / kParts, within % kParts);
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        int* const filled = launch.vt_progress + 1 + launch.vt_first + matrix;
        asm volatile("fence.proxy.async.global;" ::: "memory");
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(filled) : "memory");
      }
      piece = __shfl_sync(0xffffffffu, taken, 0);
    }
  }

  // A lane holds the four keys of a word of V^T.
  __device__ __forceinline__ void fill(int matrix, int slot, int part) const {
    const VtTile at = dense_vt_tile(launch.params, launch.vt_keys, matrix, slot);
    const int lane = threadIdx.x % 32, first_key = lane / 4 * 16 + e4m3::key_at(lane % 4 * 4);
    const int64_t row = launch.params.v_strides.row;
    const auto* from =
        static_cast<const uint8_t*>(launch.params.v_ptr) + at.source + part * kVtPieceCols + first_key * row;
    uint8_t* to = launch.vt_ptr + at.target + part * kVtPieceCols * launch.vt_keys + 4 * lane;
#pragma unroll 1
    for (int col = 0; col < kVtPieceCols; col += kCols) {
      uint32_t words[kCols / 4][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = e4m3::key_at(j);
        const bool is_seen = first_key + key >= at.begin && first_key + key < at.end;
        const uint2 vector = is_seen ? __ldg(reinterpret_cast<const uint2*>(from + key * row)) : uint2{};
        words[0][j] = vector.x;
        words[1][j] = vector.y;
      }
#pragma unroll
      for (int quad = 0; quad < kCols / 4; ++quad) {
        transpose_bytes(words[quad]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          *reinterpret_cast<uint32_t*>(to) = words[quad][j];
          to += launch.vt_keys;
        }
      }
      from += kCols;
    }
  }
};

}  // namespace sm90
}  // namespace flash
