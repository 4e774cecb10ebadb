// Grids, shared memory and launches of the mma.sync backward.
#pragma once

#include "core/static_switch.h"
#include "kernels/common/launch.h"
#include "kernels/sm80/bwd_kernel.h"
#include "plan/grid.h"

namespace flash {

// Two buffers of Q and dO where shared memory has room for them.
inline cudaError_t choose_stages(const plan::BwdTile& tile, int device, int& stages) {
  int limit = 0;
  const cudaError_t status = cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  stages = plan::bwd_smem_bytes(tile, 2) <= limit ? 2 : 1;
  if (status == cudaSuccess && plan::bwd_smem_bytes(tile, stages) > limit) return cudaErrorInvalidConfiguration;
  return status;
}

template <class Config>
cudaError_t run_flash_bwd(BwdLaunch arguments, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const Flash_bwd_params& params = arguments.params;
  arguments.grid = plan::bwd_grid(params.is_varlen(), params.b, params.h_k, params.seqlen_k, Config::kBlockN,
                                  params.multiprocessors * Config::kBlocksPerSm);
  if (arguments.grid.blocks == 0) return cudaSuccess;
  return launch(flash_bwd_kernel<Config>, arguments.grid.blocks, Config::kThreads,
                plan::bwd_smem_bytes(Config::kTile, arguments.stages), arguments, params.device, stream,
                configured_devices);
}

template <class Config>
cudaError_t run_flash_bwd_convert_dq(const Flash_bwd_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t blocks = params.h * plan::m_blocks(params.is_varlen(), params.b, params.seqlen_q, Config::kBlockM);
  return launch(flash_bwd_convert_dq_kernel<Config>, blocks, Config::kThreads,
                Config::kSmemQ * static_cast<int>(sizeof(typename Config::Element)), params, params.device, stream,
                configured_devices);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_bwd_sm80(const Flash_bwd_params& params, cudaStream_t stream) {
  using Plain = BwdConfig<kDtype, kHeadDim, BwdVariant::kPlain>;
  BwdLaunch arguments{params, 2, {}};
  cudaError_t status = choose_stages(Plain::kTile, params.device, arguments.stages);
  if (status == cudaSuccess) status = run_softmax_d_<kDtype>(params, stream);
  if (status != cudaSuccess) return status;
  status = BOOL_SWITCH(params.has_dropout, kHasDropout, [&] {
    constexpr BwdVariant kVariant = kHasDropout ? BwdVariant::kDropout : BwdVariant::kPlain;
    return run_flash_bwd<BwdConfig<kDtype, kHeadDim, kVariant>>(arguments, stream);
  });
  return status == cudaSuccess ? run_flash_bwd_convert_dq<Plain>(params, stream) : status;
}

}  // namespace flash
