// The mma.sync backward kernels: the main one, a thread block per (n_block, K/V head), and the conversion of dQ.
#pragma once

#include "kernels/common/convert_dq.h"
#include "kernels/common/row_store.h"
#include "kernels/sm80/bwd_mainloop.h"
#include "kernels/sm80/stage_accumulator.h"

namespace flash {
namespace sm80 {

// Stores dK or dV, staged in the shared memory of K or V, which nobody reads any more, or adds it to an fp32 matrix.
template <class Config, class Accumulator>
__device__ __forceinline__ void store_dkv(const BwdMainloop<Config>& mainloop, Accumulator& acc, float scale,
                                          void* data, const MatrixStrides& strides, typename Config::Element* smem) {
  using namespace cute;
  using Element = typename Config::Element;
  const BwdWorkTile& tile = mainloop.tile;
#pragma unroll
  for (int i = 0; i < size(acc); ++i) acc(i) *= scale;
  const int key = tile.n_block * Config::kBlockN;
  const int64_t offset = matrix_offset(strides, mainloop.is_varlen(), tile.batch, tile.k_begin + key, tile.head_k);
  const int rows = tile.seqlen_k - key, cols = mainloop.params.d;
  if constexpr (Config::kAccumulatesDkv) {
    add_rows(row_col_view(acc), typename Config::DkvCoords(), static_cast<float*>(data) + offset, strides.row, rows,
             cols);
  } else {
    auto staged = make_tensor(make_smem_ptr(smem), typename Config::SmemLayoutKv{});
    stage_accumulator<Element>(typename Config::MmaDkv{}, acc, staged);
    __syncthreads();
    store_rows<typename Config::RowCopyT>(staged, static_cast<Element*>(data) + offset, strides.row, rows, cols);
  }
}

// dK and dV of one n_block, and its contribution to dQ.
template <class Config>
__device__ __forceinline__ void compute_dk_dv_1colblock(const BwdLaunch& launch, const BwdWorkTile& tile) {
  extern __shared__ __align__(128) char smem[];
  auto* const tiles = reinterpret_cast<typename Config::Element*>(smem);
  const Flash_bwd_params& params = launch.params;
  BwdMainloop<Config> mainloop(launch, tile, tiles);
  mainloop.run();
  __syncthreads();  // every warp has read K and V
  store_dkv(mainloop, mainloop.acc_dk, params.scale_softmax, params.dk_ptr, params.dk_strides, tiles);
  store_dkv(mainloop, mainloop.acc_dv, params.dropout.keep_scale, params.dv_ptr, params.dv_strides,
            tiles + Config::kSmemKv);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    flash_bwd_kernel(const __grid_constant__ BwdLaunch launch) {
  const BwdWorkTile tile = bwd_work_tile_at(launch.params, Config::kBlockN, blockIdx.x, launch.grid);
  if (!tile.empty(Config::kBlockN)) compute_dk_dv_1colblock<Config>(launch, tile);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads)
    flash_bwd_convert_dq_kernel(const __grid_constant__ Flash_bwd_params params) {
  using namespace cute;
  using Element = typename Config::Element;
  extern __shared__ __align__(128) char smem[];
  auto staged = make_tensor(make_smem_ptr(reinterpret_cast<Element*>(smem)), typename Config::SmemLayoutDq{});
  convert_dq<Config>(params, staged, [&](const float* dq_tile) {
    typename BwdMainloop<Config>::AccDq acc_dq;
    load_dq<Config::kThreads>(acc_dq, dq_tile, threadIdx.x);
#pragma unroll
    for (int i = 0; i < size(acc_dq); ++i) acc_dq(i) *= params.scale_softmax;
    stage_accumulator<Element>(typename Config::MmaDq{}, acc_dq, staged);
  });
}

}  // namespace sm80
}  // namespace flash
