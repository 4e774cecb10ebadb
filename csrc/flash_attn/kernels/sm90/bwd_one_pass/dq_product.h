// dQ of one step, all columns by one warpgroup: dQ = dS K from the consumers' dS in shared memory, and the handover of
// the fp32 tile to DqReduceWarp.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/tensor.hpp>

#include "kernels/common/dq_tile.h"
#include "kernels/sm90/bwd_one_pass/storage.h"
#include "kernels/sm90/gemm.h"
#include "kernels/tma/swizzle.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

// kBiased: the store of a step's dS, from which the gradient of attn_bias is made, by one thread. The bulk copy starts
// after that thread's fence_buffer().
template <class Config>
struct DsStore {
  const BwdLaunch& launch;
  const BwdWorkTile& tile;
  const QStep at;

  __device__ __forceinline__ void start(const typename Config::Element* ds, int thread) const {
    if constexpr (Config::kBiased) {
      if (thread == 0 && launch.stores_ds) {
        const TmaRows rows(launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
        store_tile<Config::kBlockN / Config::kAtomCols, Config::kAtomCols, Config::kBlockM>(
            launch.ds_map, ds, rows, at.m_block * Config::kBlockM, at.head, tile.n_block * Config::kBlockN);
      }
      __syncwarp();
    }
  }
  // The copy has read shared memory.
  __device__ __forceinline__ void wait(int thread) const {
    if constexpr (Config::kBiased) {
      if (thread == 0) cute::tma_store_wait<0>();
      __syncwarp();
    }
  }
};

// Stores dS^T of a consumer warp's 16 keys transposed, as rows of queries (stmatrix.trans): a 16-byte vector holds 8
// keys of one query. Rows 16 apart have the same swizzle. The wgmma that reads dS is of the async proxy: fence_buffer()
// must follow.
template <class Config, class Values>
__device__ __forceinline__ void write_ds(const Values& values, typename Config::Element* ds, int group, int thread) {
  constexpr int kAtomCols = Config::kAtomCols;
  const int lane = thread % 32, row = lane / 16 * 8 + lane % 8;
  const int key = 64 * group + thread / 32 * 16 + lane / 8 % 2 * kVectorCols;
  typename Config::Element* const first = ds + key / kAtomCols * Config::kBlockM * kAtomCols +
                                          swizzle_offset(kAtomCols, row, key % kAtomCols / kVectorCols);
  const auto pairs = cute::recast<uint32_t>(values);  // pairs of queries; then keys 8 apart, then queries 8 apart
#pragma unroll
  for (int i = 0; i < decltype(cute::size(pairs))::value; i += 4) {
    cute::SM90_U16x8_STSM_T::copy(pairs(i), pairs(i + 1), pairs(i + 2), pairs(i + 3),
                                  *reinterpret_cast<cute::uint128_t*>(first + i / 4 * 16 * kAtomCols));
  }
}

// dQ = dS K. Waits for ds_full[stage] (arrived on by both consumers), arrives on ds_empty[stage].
template <class Config, class Accumulator>
__device__ __forceinline__ void compute_dq(BwdStorage<Config>& storage, const PipelineState<2>& state, int kv_stage,
                                           int thread, const DsStore<Config>& ds_store, Accumulator& acc_dq) {
  using namespace cute;
  typename Config::MmaDq mma;
  const auto thread_mma = mma.get_slice(thread);
  const auto ds = make_tensor(make_smem_ptr(storage.ds[state.stage]), typename Config::SmemLayoutDs{});  // (M, N)
  const auto k = make_tensor(make_smem_ptr(storage.k[kv_stage]), typename Config::SmemLayoutKt{});       // (D, N)
  storage.ds_full[state.stage].wait(state.phase);
  fence_buffer();  // orders the consumers' generic-proxy stores of dS before the wgmma
  ds_store.start(storage.ds[state.stage], thread);
  start_gemm(mma, thread_mma.partition_fragment_A(ds), thread_mma.partition_fragment_B(k), acc_dq, true);
  wait_for<0>(acc_dq);
  ds_store.wait(thread);
  storage.ds_empty[state.stage].arrive();
}

// Waits until the bulk reduction has read the buffer that the dQ tile of `state` overwrites.
template <class Config>
__device__ __forceinline__ void wait_for_dq_buffer(const BwdStorage<Config>& storage, const PipelineState<2>& state) {
  if constexpr (Config::kDqBuffers == 2) {
    storage.dq_empty[state.stage].wait(state.phase ^ 1);
  } else {  // one buffer: the previous tile, which the other DqReduceWarp has reduced
    storage.dq_empty[state.stage ^ 1].wait(state.phase ^ (state.stage ^ 1));
  }
}

// Writes the dQ tile to shared memory and arrives on dq_full[stage], which DqReduceWarp waits for. By all threads that
// computed it.
template <class Config, class Accumulator>
__device__ __forceinline__ void stage_dq_tile(BwdStorage<Config>& storage, const PipelineState<2>& state,
                                              const Accumulator& acc_dq, int thread) {
  wait_for_dq_buffer<Config>(storage, state);
  stage_dq(acc_dq, storage.dq_tile(state.stage) + Config::dq_offset(thread / 32), thread % 32);
  storage.dq_full[state.stage].arrive();
}

}  // namespace sm90
}  // namespace flash
