// Tensor maps and launch of the e4m3 forward.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/sm90/fp8_fwd_kernel.h"
#include "plan/fp8_fwd_plan.h"

namespace flash {
namespace sm90 {

// A matrix for each K/V head, of a row for each column of V.
template <class Config>
cudaError_t make_vt_map(CUtensorMap& map, const Flash_fwd_fp8_params& params) {
  MatrixStrides strides;
  strides.row = params.vt_keys;
  strides.head = params.d_v * strides.row;
  strides.batch = params.h_k * strides.head;
  const TensorMapSource source{params.vt_ptr,
                               strides,
                               false,
                               params.is_varlen() ? 1 : params.b,
                               params.d_v,
                               params.h_k,
                               static_cast<int>(params.vt_keys)};
  return make_tensor_map(map, source, Dtype::kE4m3, {Config::kBlockN, Config::kHeadDimV});
}

template <class Config>
cudaError_t make_fp8_tensor_maps(FwdLaunch& launch, const Flash_fwd_fp8_params& params, Dtype out) {
  const auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, bool is_query, Dtype dtype,
                        TensorMapBox box, int head_dim) {
    return make_tensor_map(map, tensor_map_source(params, data, strides, is_query, head_dim), dtype, box);
  };
  cudaError_t status =
      make(launch.q_map, params.q_ptr, params.q_strides, true, Dtype::kE4m3, {Config::kAtomCols, 64}, params.d);
  if (status == cudaSuccess) {
    status = make(launch.o_map, params.o_ptr, params.o_strides, true, out, {Config::kOutAtomCols, 16}, params.d_v);
  }
  if (status != cudaSuccess || params.seqlen_k == 0) return status;  // no key is ever loaded
  status = make(launch.k_map, params.k_ptr, params.k_strides, false, Dtype::kE4m3, {Config::kAtomCols, Config::kBlockN},
                params.d);
  return status == cudaSuccess ? make_vt_map<Config>(launch.v_map, params) : status;
}

template <class Config, Dtype kOut>
cudaError_t run_flash_fwd_fp8(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  static_assert(sizeof(FwdStorage<Config>) == plan::sm90_fp8_fwd_smem_bytes(Config::kTile),
                "plan and kernel agree on the shared memory");
  static_assert(sizeof(WorkTile) == plan::kWorkTileBytes);
  static std::atomic<uint64_t> configured_devices{0};
  Fp8FwdLaunch launch{};
  launch.params = params;
  launch.tiles = static_cast<int>(plan.num_work_tiles);
  launch.short_tiles = plan.short_tiles;
  launch.sort_varlen_tiles = plan.sort_varlen_tiles;
  launch.order = plan.order;
  launch.heads_of_batch = FastDiv(params.h);
  launch.unmasked_blocks = FastDiv(plan.unmasked_blocks);
  launch.group = FastDiv(params.h_h_k_ratio);
  launch.tile_count_semaphore = plan.is_dynamic ? params.tile_count_semaphore : nullptr;
  launch.params.softmax_scale_log2 = 1.0f;  // row_max is one of scaled scores
  launch.q_descale = params.q_descale;
  launch.k_descale = params.k_descale;
  launch.v_descale = params.v_descale;
  launch.code_shift = e4m3::twice(e4m3::kCodeShift);
  const cudaError_t status = make_fp8_tensor_maps<Config>(launch, params, kOut);
  if (status != cudaSuccess) return status;
  return launch_dependent(flash_fwd_fp8_kernel<Config>, plan.grid, Config::kThreads, plan.smem_bytes, launch,
                          params.device, stream, configured_devices);
}

template <Dtype kOut, int kHeadDim>
cudaError_t run_mha_fwd_fp8(const Flash_fwd_fp8_params& params, const plan::FwdPlan& plan, cudaStream_t stream) {
  if constexpr (plan::fp8_has_codes(kHeadDim)) {
    if (params.exp_codes) return run_flash_fwd_fp8<Fp8FwdConfig<kOut, kHeadDim, true>, kOut>(params, plan, stream);
  }
  return run_flash_fwd_fp8<Fp8FwdConfig<kOut, kHeadDim, false>, kOut>(params, plan, stream);
}

}  // namespace sm90
}  // namespace flash
