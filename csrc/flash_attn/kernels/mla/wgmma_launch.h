// Tensor maps and launch of the wgmma MLA decode kernel.
#pragma once

#include "kernels/common/launch.h"
#include "kernels/mla/wgmma_launch_params.h"
#include "kernels/tma/tensor_map.h"
#include "plan/mla_plan.h"
#ifdef __CUDA_ARCH__
#include <cutlass/arch/reg_reconfig.h>

#include "kernels/mla/wgmma_fp8_producer.h"
#include "kernels/mla/wgmma_kernel.h"
#include "kernels/mla/wgmma_producer.h"
#include "kernels/mla/wgmma_row_producer.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace mla {

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void prefetch_tensor_maps(const MlaWgmmaLaunch& launch) {
  if (launch.params.box_rows == 0) return;
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&launch.latent_map));
  cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(&launch.rope_map));
}

template <Dtype kDtype, bool kFp8>
__global__ void __launch_bounds__(plan::kMlaWgmmaThreads, 1)
    mla_decode_wgmma_kernel(const __grid_constant__ MlaWgmmaLaunch launch) {
  using Config = MlaWgmmaConfig<kDtype, kFp8>;
  static_assert(Config::kThreads == plan::kMlaWgmmaThreads && Config::kKeys == plan::kMlaWgmmaKeys);
  static_assert(Config::kRows == plan::kMlaWgmmaRows && Config::kAtomCols == plan::kMlaBoxCols);
  static_assert(static_cast<int>(sizeof(MlaWgmmaStorage<Config>)) <= plan::kMlaWgmmaSmem);
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<MlaWgmmaStorage<Config>*>(smem);
  if (threadIdx.x == 0) {
    prefetch_tensor_maps(launch);
    init_barriers(storage, launch.params);
  }
  const Flash_mla_params& params = launch.params;
  const MlaWork work(params, Config::kRows, Config::kKeys);
  __syncthreads();
  // Shuffled, so that ptxas sees uniform branches.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warp / 4;
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if constexpr (kFp8) {
      MlaFp8Producer<Config>(params, storage, work, warp).run();
    } else if (lands_in_groups<Config>(params)) {
      end_producer<Config>(MlaRowProducer<Config>(params, storage, work, warp).run());
    } else {
      end_producer<Config>(MlaProducer<Config>(launch, storage, work, warp).run());
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if (group == 1) {
      MlaConsumer<Config, 0>(params, storage, work).run();
    } else {
      MlaConsumer<Config, 1>(params, storage, work).run();
    }
  }
}
#else  // kernels/common/host_pass.h
template <Dtype kDtype, bool kFp8>
__global__ void mla_decode_wgmma_kernel(const __grid_constant__ MlaWgmmaLaunch launch) {}
#endif

inline cudaError_t make_mla_tensor_maps(MlaWgmmaLaunch& launch, Dtype dtype) {
  const Flash_mla_params& params = launch.params;
  if (params.box_rows == 0) return cudaSuccess;
  const auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, int columns) {
    const tma::TensorMapSource pages{data, strides, false, params.paged.num_pages, params.paged.page_size.divisor,
                                     1,    columns};
    return tma::make_tensor_map(map, pages, dtype, {plan::kMlaBoxCols, params.box_rows});
  };
  const cudaError_t status = make(launch.latent_map, params.latent_ptr, params.latent_strides, kMlaLatentDim);
  if (status != cudaSuccess) return status;
  return make(launch.rope_map, params.rope_ptr, params.rope_strides, kMlaRopeDim);
}

template <Dtype kDtype, bool kFp8>
cudaError_t run_mla_wgmma(const Flash_mla_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  MlaWgmmaLaunch launched{params, {}, {}};
  const cudaError_t status = make_mla_tensor_maps(launched, kDtype);
  if (status != cudaSuccess) return status;
  const int64_t matrices = params.segments_q == nullptr ? params.b : 1;
  return launch(mla_decode_wgmma_kernel<kDtype, kFp8>, matrices * params.row_tiles * params.splits,
                plan::kMlaWgmmaThreads, plan::kMlaWgmmaSmem, launched, params.device, stream, configured_devices);
}

}  // namespace mla

template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_mla_wgmma_(const Flash_mla_params& params, cudaStream_t stream) {
  static_assert(kHeadDim == kMlaRopeDim && kHeadDimV == kMlaLatentDim);
  if (!params.has_fp8_rows) return mla::run_mla_wgmma<kDtype, false>(params, stream);
  if constexpr (kDtype == Dtype::kBf16) return mla::run_mla_wgmma<kDtype, true>(params, stream);
  return cudaErrorInvalidValue;  // rotated columns of FP8 rows are bf16
}

}  // namespace flash
