// The kernels of the one-pass wgmma backward: the main one, a work tile per (n_block, K/V head), and the conversion of
// dQ.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/convert_dq.h"
#include "kernels/common/pdl.h"
#include "kernels/sm90/bwd_one_pass/bands.h"
#include "kernels/sm90/bwd_one_pass/dq_reduce_warp.h"
#include "kernels/sm90/bwd_one_pass/dq_warpgroup.h"
#include "kernels/sm90/bwd_one_pass/loader.h"
#include "kernels/sm90/bwd_one_pass/mainloop.h"
#include "kernels/sm90/bwd_statistics_warp.h"

namespace flash {
namespace sm90 {

enum ProducerWarp { kLoadWarp = 0, kStatisticsWarp = 1, kFirstDqReduceWarp = 2 };

// dK or dV of the batch. map: for TMA stores of Elements; data, strides: of an fp32 matrix to add to.
struct DkvMatrix {
  const CUtensorMap& map;
  void* data;
  const MatrixStrides& strides;
  int cols;
};

// Adds this warpgroup's keys to the fp32 matrix.
template <class Config, class Accumulator>
__device__ __forceinline__ void add_dkv(const BwdMainloop<Config>& mainloop, Accumulator& acc,
                                        const DkvMatrix& matrix) {
  const BwdWorkTile& tile = mainloop.tile;
  const int key = mainloop.key_begin();
  const int64_t offset =
      matrix_offset(matrix.strides, mainloop.params.is_varlen(), tile.batch, tile.k_begin + key, tile.head_k);
  add_rows(row_col_view(acc), AccumulatorCoords<4>(mainloop.thread), static_cast<float*>(matrix.data) + offset,
           matrix.strides.row, tile.seqlen_k - key, matrix.cols);
}

// Stores this warp's 16 rows of dK or dV by TMA, staged in a tile of shared memory that nobody reads any more; or adds
// the warpgroup's rows to an fp32 matrix.
template <class Config, class Accumulator>
__device__ __forceinline__ void store_dkv(const BwdMainloop<Config>& mainloop, Accumulator& acc, float scale,
                                          const DkvMatrix& matrix, typename Config::Element* smem_tile) {
  using namespace cute;
  using Element = typename Config::Element;
  using Store = Copy_Atom<SM90_U32x4_STSM_N, Element>;
  const BwdWorkTile& tile = mainloop.tile;
#pragma unroll
  for (int i = 0; i < size(acc); ++i) acc(i) *= scale;
  if (Config::kMayAccumulate && mainloop.params.accumulates_dkv) {
    add_dkv(mainloop, acc, matrix);
    return;
  }
  const auto store = make_tiled_copy_C(Store{}, typename Config::MmaDkv{}).get_thread_slice(mainloop.thread);
  const auto values = convert<Element>(acc);
  auto staged = mainloop.local_kv(smem_tile);
  copy(Store{}, store.retile_S(values), store.partition_D(staged));
  tma_store_fence();
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  const int warp_row = 64 * mainloop.group + mainloop.thread / 32 * 16;
  const TmaRows k_rows(mainloop.params.is_varlen(), tile.batch, tile.k_begin, tile.seqlen_k);
#pragma unroll
  for (int atom = 0; atom < Config::kHeadDim / Config::kAtomCols; ++atom) {
    SM90_TMA_STORE_5D::copy(&matrix.map, smem_tile + (atom * Config::kBlockN + warp_row) * Config::kAtomCols,
                            atom * Config::kAtomCols, tile.n_block * Config::kBlockN + warp_row + k_rows.shift,
                            tile.head_k, k_rows.outer, k_rows.origin);
  }
  tma_store_arrive();
}

// A consumer warpgroup; pipeline states persist from one work tile to the next.
template <class Config>
struct BwdConsumer {
  const BwdLaunch& launch;
  BwdStorage<Config>& storage;
  const int group;
  PipelineState<Config::kStages> state;
  PipelineState<Config::kKStages> kv_state;
  PipelineState<2> ds_state;
  typename Config::template IfBiased<PipelineState<2>> bias_state;

  __device__ __forceinline__ BwdConsumer(const BwdLaunch& launch_, BwdStorage<Config>& storage_, int group_)
      : launch(launch_), storage(storage_), group(group_) {
    if constexpr (Config::kHasDqWarpgroup) {
      if (group == 1) arrive_at_order_barrier<Config>(group);
    }
  }

  // dK and dV of one n_block, and its contribution to dQ.
  __device__ __forceinline__ void compute_dk_dv_1colblock(const BwdWorkTile& tile) {
    BwdMainloop<Config> mainloop(launch, storage, tile, group, state, kv_state, ds_state);
    mainloop.bias_state = bias_state;
    mainloop.run();
    const bool has_rows = mainloop.order.count() > 0;
    if (!has_rows || Config::kSeparateDkvSmem) mainloop.wait_for_tma_stores();  // else the first step has waited
    if (!has_rows && Config::kEarlyK) wait_for_dq_buffer<Config>(storage, ds_state);
    const Flash_bwd_params& params = launch.params;
    store_dkv(mainloop, mainloop.acc_dv, params.dropout.keep_scale,
              {launch.dv_map, params.dv_ptr, params.dv_strides, params.d_v}, storage.staged_dv());
    __syncwarp();
    store_dkv(mainloop, mainloop.acc_dk, params.scale_softmax,
              {launch.dk_map, params.dk_ptr, params.dk_strides, params.d},
              storage.staged_dk(has_rows ? storage.k[Config::k_stage(mainloop.kv_state)] : nullptr));
    __syncwarp();
    state = mainloop.state;
    ds_state = mainloop.ds_state;
    bias_state = mainloop.bias_state;
    if (has_rows) kv_state.advance();
  }

  // Shared memory must outlive the reads of the last TMA stores.
  __device__ __forceinline__ void finish() const {
    if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
  }
};

// Launched as a dependent of softmax_d_kernel(), of whose results it needs softmax_d and the cleared workspace: the
// statistics and reduce warps wait for them, and the load warp before it fetches from the semaphore. All that is older
// is complete by then: Q, K, V and dO are loaded at once, and nobody reads dK and dV any more. Packed sequences have
// their segments from the kernel before, which may be cached as it was before that; so have calls with lists theirs.
// In bands all threads have waited (prepare_bands()).
template <class Config>
__device__ __forceinline__ BwdStorage<Config>& begin_kernel(const BwdLaunch& launch, char* smem) {
  BwdStorage<Config>& storage = *reinterpret_cast<BwdStorage<Config>*>(smem);
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&launch.q_map, &launch.do_map, &launch.k_map, &launch.v_map}) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(map));
    }
    storage.init_barriers();
  }
  if (Config::kListed || launch.params.is_varlen()) wait_for_previous_kernel();
  __syncthreads();
  return storage;
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) flash_bwd_kernel(const __grid_constant__ BwdLaunch launch) {
  static_assert(
      sizeof(BwdStorage<Config>) == plan::sm90_bwd_smem_bytes(Config::kTile, Config::kMayDrop, Config::kDqInSmem,
                                                              Config::kDtype, Config::kListed, Config::kBiased),
      "plan and kernel agree on the shared memory");
  extern __shared__ __align__(1024) char smem[];
  if constexpr (Config::kMayHaveBands) {
    if (launch.preparing_shares > 0) prepare_bands<Config>(launch, smem);
  }
  BwdStorage<Config>& storage = begin_kernel<Config>(launch, smem);
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // warp-uniform, so that branches on it are
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    PipelineState<Config::kStages> state;
    if (warp == kLoadWarp) BwdLoader<Config>(launch, storage).run_all();
    if (warp == kStatisticsWarp) {
      wait_for_previous_kernel();
      for_each_work_tile(launch, storage,
                         [&](const BwdWorkTile& tile) { load_statistics<Config>(launch, storage, tile, state); });
    }
    if constexpr (Config::kHasDqReduceWarps) {
      if (warp >= kFirstDqReduceWarp) {
        wait_for_previous_kernel();
        DqReduceWarp<Config> dq_reduce_warp{launch, launch.params, storage, warp - kFirstDqReduceWarp};
        for_each_work_tile(launch, storage, [&](const BwdWorkTile& tile) { dq_reduce_warp.run(tile); });
      }
    }
  } else if (Config::kHasDqWarpgroup && warp_group == 3) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kDqWarpgroupRegisters>();
    if constexpr (Config::kHasDqWarpgroup) {
      DqWarpgroup<Config> dq_warpgroup(launch, storage);
      for_each_work_tile(launch, storage, [&](const BwdWorkTile& tile) { dq_warpgroup.run(tile); });
      dq_warpgroup.finish();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    BwdConsumer<Config> consumer(launch, storage, warp_group - 1);
    for_each_work_tile(launch, storage, [&](const BwdWorkTile& tile) { consumer.compute_dk_dv_1colblock(tile); });
    consumer.finish();
  }
}

// DqLocation::kShared: a thread block visits all n_blocks of a (sequence, head) pair of a dense batch, then those of
// the next pair.
template <class Config, class Visit>
__device__ __forceinline__ void for_each_n_block(const BwdLaunch& launch, const Visit& visit) {
  const Flash_bwd_params& params = launch.params;
  for (int index = blockIdx.x; index < params.b * params.h_k; index += gridDim.x) {
    BwdWorkTile tile;
    tile.batch = launch.grid.heads_k.divide(index);
    tile.head_k = index - tile.batch * params.h_k;
    tile.seqlen_q = params.seqlen_q;
    tile.seqlen_k = params.seqlen_k;
    for (; !tile.empty(Config::kBlockN); ++tile.n_block) visit(tile);
  }
}

// The backward of short dense batches (DqLocation::kShared): no fp32 dQ in global memory, nothing to clear or convert.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_bwd_heads_kernel(const __grid_constant__ BwdLaunch launch) {
  static_assert(
      sizeof(BwdStorage<Config>) == plan::sm90_bwd_smem_bytes(Config::kTile, Config::kMayDrop, Config::kDqInSmem,
                                                              Config::kDtype, Config::kListed, Config::kBiased),
      "plan and kernel agree on the shared memory");
  extern __shared__ __align__(1024) char smem[];
  BwdStorage<Config>& storage = begin_kernel<Config>(launch, smem);
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == kLoadWarp) {
      BwdLoader<Config> loader(launch, storage);
      for_each_n_block<Config>(launch, [&](const BwdWorkTile& tile) { loader.run(tile); });
    } else if (warp == kStatisticsWarp) {
      wait_for_previous_kernel();
      PipelineState<Config::kStages> state;
      for_each_n_block<Config>(launch,
                               [&](const BwdWorkTile& tile) { load_statistics<Config>(launch, storage, tile, state); });
    }
  } else if (warp_group == 3) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kDqWarpgroupRegisters>();
    DqWarpgroup<Config> dq_warpgroup(launch, storage);
    for_each_n_block<Config>(launch, [&](const BwdWorkTile& tile) { dq_warpgroup.run(tile); });
    dq_warpgroup.finish();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    BwdConsumer<Config> consumer(launch, storage, warp_group - 1);
    for_each_n_block<Config>(launch, [&](const BwdWorkTile& tile) { consumer.compute_dk_dv_1colblock(tile); });
    consumer.finish();
  }
}

template <class Config>
__global__ void __launch_bounds__(32 * Config::kDqWarps)
    flash_bwd_convert_dq_kernel(const __grid_constant__ Flash_bwd_params params) {
  using namespace cute;
  using Element = typename Config::Element;
  using Store = Copy_Atom<SM90_U32x4_STSM_N, Element>;
  extern __shared__ __align__(1024) char smem[];
  const auto staged = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem)), typename Config::SmemLayoutQ{});
  const auto store = make_tiled_copy_C(Store{}, typename Config::MmaDq{}).get_thread_slice(threadIdx.x % 128);
  if (params.is_varlen()) wait_for_previous_kernel();  // segments
  convert_dq<Config>(params, staged, [&](const float* dq_tile) {
    wait_for_previous_kernel();
    typename BwdMainloop<Config>::AccDq acc_dq;
    load_dq<32>(acc_dq, dq_tile + Config::dq_offset(threadIdx.x / 32), threadIdx.x % 32);
    __syncthreads();  // all loads are issued before the first is waited for: ptxas would save registers
#pragma unroll
    for (int i = 0; i < size(acc_dq); ++i) acc_dq(i) *= params.scale_softmax;
    const auto values = convert<Element>(acc_dq);
    copy(Store{}, store.retile_S(values), store.partition_D(staged));
  });
}

}  // namespace sm90
}  // namespace flash
