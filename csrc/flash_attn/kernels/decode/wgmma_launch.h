// Launches of the wgmma decode kernel, compute capability 9.0: the attention and, where tiles may be split, the
// combine.
#pragma once

#include "kernels/common/launch.h"
#include "params/kvcache_wgmma.h"
#include "plan/kv_wgmma.h"
#ifdef __CUDA_ARCH__
#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/dropout.h"
#include "kernels/decode/wgmma_consumer.h"
#include "kernels/decode/wgmma_producer.h"
#else
#include "kernels/common/host_pass.h"
#endif

namespace flash {
namespace decode {

#ifdef __CUDA_ARCH__
// Tiles of up to 64 packed rows, whose K and V the other decode kernel would read from shared memory once for each 32
// rows. Floor of a step of an SM, 32 KB of K and V: 885 clocks of L2 at 37 bytes each, 512 of the tensor cores for two
// tiles' products, 256 of exp2.
template <Dtype kDtype, int kHeadDim>
__global__ void __launch_bounds__(plan::kKvWgmmaThreads, 1)
    flash_fwd_split_wgmma_kernel(const __grid_constant__ Flash_kvcache_params params) {
  using Config = KvWgmmaConfig<kDtype, kHeadDim>;
  static_assert(Config::kThreads == plan::kKvWgmmaThreads);
  static_assert(static_cast<int>(sizeof(KvWgmmaStorage<Config>)) <= plan::kKvWgmmaSmem);
  extern __shared__ __align__(1024) char smem[];
  auto& storage = *reinterpret_cast<KvWgmmaStorage<Config>*>(smem);
  if (threadIdx.x == 0) {
    for (tma::Barrier& barrier : storage.full) barrier.init(Config::kProducerThreads);
    for (tma::Barrier& barrier : storage.empty) barrier.init(4);
    tma::Barrier::fence_init();
  }
  wait_for_previous_kernel();
  const CtaWork cta_work = find_cta_work(params, blockIdx.x, storage.scratch);
  if (threadIdx.x == 0) storage.cta_work = cta_work;  // in registers of both roles it would spill
  __syncthreads();
  // Shuffled, so that ptxas sees uniform branches.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  if (warp < Config::kProducerWarps) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    KvWgmmaProducer<Config>(params, storage, warp).run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    KvWgmmaConsumer<Config>(params, storage, warp / 4 - 1).run();
  }
  if (params.dropout.rng_state != nullptr) store_rng_state(params.dropout);  // of a forward
}
#else  // kernels/common/host_pass.h
template <Dtype kDtype, int kHeadDim>
__global__ void flash_fwd_split_wgmma_kernel(const __grid_constant__ Flash_kvcache_params params) {}
#endif

}  // namespace decode

template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_split_wgmma_(const Flash_kvcache_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const cudaError_t status =
      launch_dependent(decode::flash_fwd_split_wgmma_kernel<kDtype, kHeadDim>, params.thread_blocks,
                       plan::kKvWgmmaThreads, plan::kKvWgmmaSmem, params, params.device, stream, configured_devices);
  return status == cudaSuccess && params.combines ? run_decode_combine(params, kDtype, stream) : status;
}

}  // namespace flash
