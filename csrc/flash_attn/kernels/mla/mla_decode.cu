// Launch of the MLA decode kernels.
#include "core/static_switch.h"
#include "kernels/common/launch.h"
#include "kernels/mla/kernel.h"
#include "plan/mla_plan.h"

namespace flash {
namespace {

template <Dtype kDtype, int kRows, int kStages>
cudaError_t launch_tiles(const Flash_mla_params& params, cudaStream_t stream) {
  using Config = mla::MlaConfig<kDtype, kRows, kStages>;
  static_assert(Config::kKeys == plan::kMlaKeys);
  static_assert(sizeof(mla::MlaStorage<Config>) <= (kStages > 2 ? plan::kMlaLargeSmem : 99 * 1024));
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t matrices = params.segments_q == nullptr ? params.b : 1;
  const int64_t blocks = matrices * params.row_tiles * params.splits;
  return launch(mla::mla_decode_kernel<Config>, blocks, Config::kThreads, sizeof(mla::MlaStorage<Config>), params,
                params.device, stream, configured_devices);
}

template <Dtype kDtype>
cudaError_t run(const Flash_mla_params& params, int tile_rows, int stages, cudaStream_t stream) {
  if (tile_rows == plan::kMlaWgmmaRows) return run_mha_mla_wgmma_<kDtype, kMlaRopeDim, kMlaLatentDim>(params, stream);
  if (tile_rows == 16 && stages == 2) return launch_tiles<kDtype, 16, 2>(params, stream);
  if (tile_rows == 16 && stages == 3) return launch_tiles<kDtype, 16, 3>(params, stream);
  if (tile_rows == 32 && stages == 3) return launch_tiles<kDtype, 32, 3>(params, stream);
  return cudaErrorInvalidConfiguration;
}

}  // namespace

cudaError_t run_mla_decode(const Flash_mla_params& params, Dtype dtype, int tile_rows, int stages,
                           cudaStream_t stream) {
  return FP16_SWITCH(dtype, [&] { return run<kDtype>(params, tile_rows, stages, stream); });
}

}  // namespace flash
