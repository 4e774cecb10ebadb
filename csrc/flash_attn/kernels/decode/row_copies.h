// Copies of rows of K or V into a stage of the ring.
#pragma once

#include "kernels/decode/warp_group.h"
#include "kernels/sm80/warp_ops.h"
#include "params/kvcache.h"

namespace flash {
namespace decode {

template <class Config>
struct RowCopies {
  using Stored = typename Config::Stored;
  using Swizzle = typename Config::KvSwizzle;
  static constexpr int kLanesPerRow = Config::kLanesPerRow;
  static constexpr cute::true_type kBounded{};
  static constexpr cute::false_type kWhole{};

  struct Row {
    const Stored* data;
    bool valid;
  };

  const Flash_kvcache_params& params;
  const GroupStep<Config> group_step;

  __device__ __forceinline__ static int group() { return threadIdx.x / Config::kGroupThreads; }
  __device__ __forceinline__ static int group_warp() { return threadIdx.x / 32 % Config::kGroupWarps; }
  __device__ __forceinline__ static int row_warp() { return threadIdx.x / 32 % Config::kRowWarps; }
  __device__ __forceinline__ static int col_warp() { return group_warp() / Config::kRowWarps; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // rows(row of the step, iteration) -> Row, of the head that this thread copies. kBounded: zero-fills invalid rows and
  // columns beyond the head dim.
  template <class Bounded, class Rows>
  __device__ __forceinline__ void copy(Bounded, const Rows& rows, Stored* to) const {
    // Written out twice: with a function call the kernels of 64 packed rows spill.
    const int lane_row = Config::kMayPairHeads ? group_step.copy_row() : lane() / kLanesPerRow;
    const int lane_vector = lane() % kLanesPerRow;
    const int row0 = group_warp() * Config::kWarpRows + lane_row;
    const int swizzled0 = lane_vector ^ Swizzle::key(lane_row);
    to += group_step.copy_offset();
#pragma unroll
    for (int i = 0; i < Config::kRowIterations; ++i) {
      // lane_row and the first row of an iteration share no bits of the swizzle key.
      const int swizzled = swizzled0 ^ Swizzle::key(i * Config::kRowsPerIteration);
      const int row = row0 + i * Config::kRowsPerIteration;
      const Row from = rows(row, i);
#pragma unroll
      for (int j = 0; j < Config::kColIterations; ++j) {
        const int col = (lane_vector + j * kLanesPerRow) * Config::kVectorCols;
        Stored* const vector =
            to + row * Config::kHeadDim + Swizzle::next(swizzled, j * kLanesPerRow) * Config::kVectorCols;
        if constexpr (Bounded::value) {
          copy16_async(vector, from.data + col, from.valid && (Config::kPlain || col < params.d));
        } else {
          copy16_async(vector, from.data + col);
        }
      }
    }
  }

  // Rows [first, keys) of a strided matrix.
  template <class Bounded>
  __device__ __forceinline__ void copy_rows(Bounded bounded, const Stored* rows, int64_t stride, int first, int keys,
                                            Stored* to) const {
    const int lane_row = Config::kMayPairHeads ? group_step.copy_row() : lane() / kLanesPerRow;
    const int row0 = group_warp() * Config::kWarpRows + lane_row;
    const Stored* const from = rows + row0 * stride;
    const int64_t iteration_stride = Config::kRowsPerIteration * stride;
    copy(bounded, [&](int row, int i) { return Row{from + i * iteration_stride, row >= first && row < keys}; }, to);
  }

  __device__ __forceinline__ void copy_vector(const Stored* from, int count, Stored* to) const {
    if (params.kv_vector_bytes == 4) {
#pragma unroll
      for (int i = 0; i < Config::kVectorCols; i += Config::kVectorCols / 4) copy4_async(to + i, from + i, i < count);
    } else {
#pragma unroll
      for (int i = 0; i < Config::kVectorCols; ++i) to[i] = i < count ? from[i] : Stored(0.0f);
    }
  }
};

}  // namespace decode
}  // namespace flash
