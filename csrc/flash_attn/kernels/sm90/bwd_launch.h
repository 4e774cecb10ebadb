// Tensor maps, grids and launches of the wgmma backward.
#pragma once

#include "core/static_switch.h"
#include "kernels/common/launch.h"
#include "kernels/sm90/bwd_kernel.h"
#include "plan/grid.h"

namespace flash {
namespace sm90 {

template <class Config>
cudaError_t make_tensor_maps(BwdLaunch& launch, Dtype dtype) {
  const Flash_bwd_params& params = launch.params;
  constexpr int kStoredRows = 16;  // of one warp
  struct Matrix {
    CUtensorMap& map;
    const void* data;
    const MatrixStrides& strides;
    bool is_query;
    int rows;
    int head_dim;
  };
  const Matrix matrices[] = {
      {launch.q_map, params.q_ptr, params.q_strides, true, Config::kBlockM, params.d},
      {launch.do_map, params.do_ptr, params.do_strides, true, Config::kBlockM, params.d_v},
      {launch.k_map, params.k_ptr, params.k_strides, false, Config::kBlockN / Config::kKvParts, params.d},
      {launch.v_map, params.v_ptr, params.v_strides, false, Config::kBlockN / Config::kKvParts, params.d_v},
      {launch.dk_map, params.dk_ptr, params.dk_strides, false, kStoredRows, params.d},
      {launch.dv_map, params.dv_ptr, params.dv_strides, false, kStoredRows, params.d_v},
  };
  for (const Matrix& matrix : matrices) {
    const cudaError_t status = make_tensor_map(
        matrix.map, tensor_map_source(params, matrix.data, matrix.strides, matrix.is_query, matrix.head_dim), dtype,
        {Config::kAtomCols, matrix.rows});
    if (status != cudaSuccess) return status;
  }
  if constexpr (Config::kDqInSmem) {
    return make_tensor_map(launch.dq_map, tensor_map_source(params, params.dq_ptr, params.dq_strides, true, params.d),
                           dtype, {Config::kDqCols, kStoredRows});
  }
  return cudaSuccess;
}

// softmax_d, and the kernel that computes all gradients of whole heads.
template <class Config, Dtype kDtype>
cudaError_t run_flash_bwd_heads(BwdLaunch& launch, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const Flash_bwd_params& params = launch.params;
  cudaError_t status = make_tensor_maps<Config>(launch, kDtype);
  if (status == cudaSuccess) status = run_softmax_d_<kDtype>(params, stream);
  if (status != cudaSuccess) return status;
  launch.grid.heads_k = FastDiv(params.h_k);
  launch.grid.blocks = std::min<int64_t>(static_cast<int64_t>(params.b) * params.h_k, params.multiprocessors);
  return flash::launch(flash_bwd_heads_kernel<Config>, launch.grid.blocks, Config::kThreads,
                       static_cast<int>(sizeof(BwdStorage<Config>)), launch, params.device, stream, configured_devices);
}

template <class Config>
cudaError_t run_flash_bwd(BwdLaunch& launch, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const Flash_bwd_params& params = launch.params;
  const int64_t rows = params.is_varlen() && params.b > 0 ? params.seqlen_q / params.b : params.seqlen_q;
  const int running = plan::running_key_blocks(params.dq_semaphore_ptr != nullptr, params.window.right != kUnbounded,
                                               rows / Config::kBlockM, Config::kBlockN);
  launch.grid = plan::bwd_grid(params.is_varlen(), params.b, params.h_k, params.seqlen_k, Config::kBlockN,
                               params.multiprocessors, running);
  const bool is_dynamic = launch.grid.blocks > params.multiprocessors;
  launch.tile_count_semaphore = is_dynamic ? params.tile_count_semaphore : nullptr;
  if (launch.grid.blocks > plan::kMaxGridBlocks) return cudaErrorInvalidConfiguration;
  const int64_t thread_blocks = is_dynamic ? params.multiprocessors : launch.grid.blocks;
  return flash::launch(flash_bwd_kernel<Config>, thread_blocks, Config::kThreads,
                       static_cast<int>(sizeof(BwdStorage<Config>)), launch, params.device, stream, configured_devices);
}

template <class Config>
cudaError_t run_flash_bwd_convert_dq(const Flash_bwd_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t blocks = params.h * plan::m_blocks(params.is_varlen(), params.b, params.seqlen_q, Config::kBlockM);
  return flash::launch(flash_bwd_convert_dq_kernel<Config>, blocks, 32 * Config::kDqWarps,
                       Config::kSmemQ * static_cast<int>(sizeof(typename Config::Element)), params, params.device,
                       stream, configured_devices);
}

}  // namespace sm90

// cudaErrorNotSupported: not for this family, nothing was launched.
template <Dtype kDtype, int kHeadDim, int kHeadDimV = kHeadDim>
cudaError_t run_mha_bwd_sm90(const Flash_bwd_params& params, cudaStream_t stream) {
  using Plain = sm90::BwdConfig<kDtype, kHeadDim, sm90::BwdVariant::kPlain, sm90::DqLocation::kGlobal, kHeadDimV>;
  using General = sm90::BwdConfig<kDtype, kHeadDim, sm90::BwdVariant::kGeneral, sm90::DqLocation::kGlobal, kHeadDimV>;
  if (params.seqlen_q == 0 || params.seqlen_k == 0) return cudaErrorNotSupported;
  sm90::BwdLaunch launch{};
  launch.params = params;
  if constexpr (kHeadDim == plan::kSm90SharedDqTile.head_dim) {
    using Short = sm90::BwdConfig<kDtype, kHeadDim, sm90::BwdVariant::kPlain, sm90::DqLocation::kShared>;
    if (params.dq_accum_ptr == nullptr) return sm90::run_flash_bwd_heads<Short, kDtype>(launch, stream);
  }
  cudaError_t status = sm90::make_tensor_maps<Plain>(launch, kDtype);
  if (status == cudaSuccess) status = run_softmax_d_<kDtype>(params, stream);
  if (status != cudaSuccess) return status;
  status = params.has_dropout || params.has_score_mod ? sm90::run_flash_bwd<General>(launch, stream)
                                                      : sm90::run_flash_bwd<Plain>(launch, stream);
  return status == cudaSuccess ? sm90::run_flash_bwd_convert_dq<Plain>(params, stream) : status;
}

}  // namespace flash
