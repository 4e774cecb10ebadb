// The wgmma forward of head dims above 256: a thread block has a tile of 64 rows. O of 64 rows x 512 columns fills the
// registers of two consumers. Steps of 64 keys alternate between them:
//
//   [C0]  S0 │ P0 │ O += P0 V0 │ O += P1 V1 │ S2 │ P2 │ …      columns 0 to 255 of O
//   [C1]  S1 │ O += P0 V0 │ P1 │ O += P1 V1 │ S3 │ O += P2 V2 │ P3 │ …      the others
//
// Clocks of a step, of an SM: tensor cores 2048; shared memory 2560 (S 896, O 576, P 64, K and V written 1024); exp2
// 256; L2, 128 KB, 1490 to 3540 by how far thread blocks read the same keys at a time. So shared memory binds: chunks
// of Q in registers save 128.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "kernels/common/dropout.h"
#include "kernels/common/pdl.h"
#include "kernels/common/shared_storage.h"
#include "kernels/common/warp_index.h"
#include "kernels/sm90/wide_fwd_consumer.h"
#include "kernels/sm90/wide_fwd_producer.h"
#include "plan/sm90_smem.h"

namespace flash {
namespace sm90 {

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_fwd_wide_kernel(const __grid_constant__ WideFwdLaunch launch) {
  auto& storage = shared_storage<WideFwdStorage<Config>, plan::sm90_wide_fwd_smem_bytes(Config::kDtype)>();
  if (threadIdx.x == 0) {
    storage.init_barriers();
    tma::Barrier::fence_init();
  }
  wait_for_previous_kernel();
  store_rng_state(launch.params.dropout);
  const WideFwdWork work(launch, blockIdx.x, Config::kBlockM, Config::kBlockN);
  __syncthreads();
  if (work.tile.empty()) return;
  const int warp = warp_index(), group = warp / 4;
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    WideFwdProducer<Config>(launch, storage, work).run(warp);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if (group == 1) {
      WideFwdConsumer<Config, 0>(launch, storage, work).run();
    } else {
      WideFwdConsumer<Config, 1>(launch, storage, work).run();
    }
  }
}

}  // namespace sm90
}  // namespace flash
