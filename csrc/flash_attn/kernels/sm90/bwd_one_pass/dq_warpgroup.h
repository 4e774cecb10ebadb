// The dQ warpgroup: dQ = dS K from both consumers' dS in shared memory, while they compute the next scores.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "core/bwd_schedule.h"
#include "kernels/common/convert.h"
#include "kernels/common/dq_tile.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bwd_one_pass/dq_product.h"
#include "kernels/sm90/bwd_one_pass/storage.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/tma/swizzle.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

using namespace tma;

template <class Config>
struct DqWarpgroup {
  using Element = typename Config::Element;
  using AccDq = decltype(cute::partition_fragment_C(typename Config::MmaDq{},
                                                    cute::Shape<cute::_64, cute::Int<Config::kHeadDim>>{}));
  static_assert(Config::kBlockM == 64, "one product a step");

  const BwdLaunch& launch;
  const Flash_bwd_params& params;
  BwdStorage<Config>& storage;
  const int thread;  // of the warpgroup
  PipelineState<2> state;
  PipelineState<Config::kKStages> kv_state;

  __device__ __forceinline__ DqWarpgroup(const BwdLaunch& launch_, BwdStorage<Config>& storage_)
      : launch(launch_), params(launch_.params), storage(storage_), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ bool is_first_lane() const { return thread % 32 == 0; }

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    if (Config::kDqInSmem && tile.n_block == 0) start_head(tile);
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    const int count = order.count();
    if (count == 0) return;
    for (int i = 0; i < Config::kKvParts; ++i) storage.k_full[kv_state.stage][i].wait(kv_state.phase);
    BwdStep<Config> at = order.start();
    for (int i = 0; i < count; ++i) {
      step(tile, at);
      order.advance(at);
    }
    for (int i = 0; i < Config::kKvParts; ++i) storage.kv_empty[kv_state.stage][i].arrive();
    kv_state.advance();
  }

  __device__ __forceinline__ void step(const BwdWorkTile& tile, const QStep& at) {
    AccDq acc_dq;
    compute_dq<Config>(storage, state, kv_state.stage, thread, {launch, tile, at}, acc_dq);
    if constexpr (Config::kDqInSmem) {
      accumulate_dq(tile, at, acc_dq);
    } else {
      stage_dq_tile<Config>(storage, state, acc_dq, thread);
    }
    state.advance();
  }

  __device__ __forceinline__ BlockRange n_block_range(const BwdWorkTile& tile, int m_block) const {
    const MaskOf<Config> visibility = mask_of<Config>(params, tile);
    const int row_begin = m_block * Config::kBlockM;
    return block_range(visibility, row_begin, min(row_begin + Config::kBlockM, tile.seqlen_q), Config::kBlockN);
  }

  // This warp's floats of an m_block's dQ in shared memory: 16 rows.
  __device__ __forceinline__ float* warp_dq(int m_block) const {
    return storage.dq + m_block * Config::kDqTile + Config::dq_offset(thread / 32);
  }

  // DqLocation::kShared: accumulates in shared memory. The first visible n_block of an m_block overwrites, the last one
  // stores dQ to global memory.
  __device__ __forceinline__ void accumulate_dq(const BwdWorkTile& tile, const QStep& at, AccDq& acc_dq) const {
    const BlockRange n_blocks = n_block_range(tile, at.m_block);
    float* const warp_sums = warp_dq(at.m_block);
    if (tile.n_block != n_blocks.begin) add_staged_dq(acc_dq, warp_sums, thread % 32);
    if (tile.n_block == n_blocks.end - 1) {
      store_dq(tile, at, acc_dq);
    } else {
      stage_dq(acc_dq, warp_sums, thread % 32);
    }
  }

  // Scales and stores 16 rows of dQ by TMA; the Elements are staged over this warp's own floats.
  __device__ __forceinline__ void store_dq(const BwdWorkTile& tile, const QStep& at, AccDq& acc_dq) const {
    using namespace cute;
    static_assert(Config::kHeadDim == Config::kAtomCols, "rows of 128 bytes, 16 of them");
    const int lane = thread % 32;
#pragma unroll
    for (int i = 0; i < size(acc_dq); ++i) acc_dq(i) *= params.scale_softmax;
    const auto values = convert<Element>(acc_dq);
    const auto pairs = recast<uint32_t>(values);
    Element* const rows = reinterpret_cast<Element*>(warp_dq(at.m_block));
    __syncwarp();  // all lanes have read the floats that the staged rows overwrite
#pragma unroll
    for (int i = 0; i < size(pairs); i += 4) {
      Element* const vector = rows + swizzle_offset(Config::kHeadDim, lane % 16, i / 2 + lane / 16);
      SM90_U32x4_STSM_N::copy(pairs(i), pairs(i + 1), pairs(i + 2), pairs(i + 3),
                              *reinterpret_cast<uint128_t*>(vector));
    }
    tma_store_fence();
    __syncwarp();
    if (is_first_lane()) {
      store_tile<1, Config::kAtomCols, 16>(launch.dq_map, rows, TmaRows(false, tile.batch, 0, tile.seqlen_q),
                                           at.m_block * Config::kBlockM + thread / 32 * 16, at.head);
    }
    __syncwarp();
  }

  // At n_block 0 of a head: waits until the TMA stores have read the previous head's dQ, and stores zeros for m_blocks
  // of fully masked rows, which no n_block visits.
  __device__ __forceinline__ void start_head(const BwdWorkTile& tile) const {
    if (is_first_lane()) cute::tma_store_wait<0>();
    __syncwarp();
    const int m_blocks = (tile.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
    for (int m_block = 0; m_block < m_blocks; ++m_block) {
      if (n_block_range(tile, m_block).count() > 0) continue;
      AccDq zeros;
      cute::clear(zeros);
      store_dq(tile, {tile.head_k, m_block}, zeros);
    }
  }

  // Shared memory must outlive the reads of the last TMA stores.
  __device__ __forceinline__ void finish() const {
    if (is_first_lane()) cute::tma_store_wait<0>();
  }
};

}  // namespace sm90
}  // namespace flash
