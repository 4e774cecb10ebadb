// V^T of the e4m3 forward from V in shared memory: both operands of an e4m3 product are contiguous along the keys. Two
// warps transpose a block while the consumers multiply by the blocks before.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>

#include "core/transpose_lane.h"
#include "kernels/sm90/fwd_storage.h"

namespace flash {
namespace sm90 {

template <class Config>
struct TransposeWarp {
  using Lane = TransposeLane<Config::kHeadDimV>;
  static constexpr int kWarps = Config::kTransposeWarps;
  static constexpr int kKeySteps = Config::kBlockN / Lane::kKeys;
  static constexpr int kColSteps = Config::kHeadDimV / Lane::kCols;
  static_assert(Config::kBlockN == e4m3::kVtKeys && kColSteps % kWarps == 0);

  FwdStorage<Config>& storage;
  const int warp;  // of kWarps

  __device__ __forceinline__ void transpose(const char* v, char* vt) const {
    const Lane lane(threadIdx.x % 32);
#pragma unroll 1
    for (int j = warp; j < kColSteps; j += kWarps) {
#pragma unroll
      for (int first = 0; first < kKeySteps; first += 2) {
        uint32_t words[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) load(v + lane.source(first + i, j), words[i]);
#pragma unroll
        for (int i = 0; i < 2; ++i) store(vt + lane.target(first + i, j), words[i]);
      }
    }
  }

  __device__ __forceinline__ static void load(const char* from, uint32_t (&words)[4]) {
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2],
                                  words[3]);
  }
  __device__ __forceinline__ static void store(char* to, const uint32_t (&words)[4]) {
    cute::SM90_U32x4_STSM_N::copy(__byte_perm(words[0], words[1], Lane::kEven),
                                  __byte_perm(words[0], words[1], Lane::kOdd),
                                  __byte_perm(words[2], words[3], Lane::kEven),
                                  __byte_perm(words[2], words[3], Lane::kOdd), *reinterpret_cast<cute::uint128_t*>(to));
  }

  __device__ __forceinline__ void run() const {
    WorkPipeline<Config> pipeline(storage);
    PipelineState<Config::kRawVStages> raw;
    PipelineState<Config::kKvStages> state;
    for (FwdWork<Config> work = pipeline.wait_and_release(); work.exists(); work = pipeline.wait_and_release()) {
      const int count = work.order.count();
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        storage.raw_v_full[raw.stage].wait(raw.phase);
        storage.v_empty[state.stage].wait(state.phase ^ 1);
        transpose(storage.raw_v[raw.stage], reinterpret_cast<char*>(storage.v[state.stage]));
        fence_buffer();  // of the loads too: TMA writes over V next
        storage.raw_v_empty[raw.stage].arrive();
        __syncwarp();
        if (threadIdx.x % 32 == 0) storage.v_full[state.stage].arrive();
        raw.advance();
        state.advance();
      }
    }
  }
};

}  // namespace sm90
}  // namespace flash
