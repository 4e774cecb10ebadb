// The shipped mma.sync forward with the laboratory's tile, LAB_TILE of dtype LAB_DTYPE, with a C interface, for
// benchmarks/lab/kernel_library.py. plan/tiles.h is a copy with one return more (benchmarks/lab/tile_designs.py).
#include "dense_call.h"
#include "kernels/sm80/fwd_config.h"
#include "kernels/sm80/fwd_launch.h"

namespace {

constexpr flash::plan::FwdTile kWanted = LAB_TILE;
using Config = flash::sm80::FwdConfig<flash::Dtype::LAB_DTYPE, kWanted.head_dim, flash::plan::FwdVariant::kPlain>;
static_assert(Config::kBlockM == kWanted.block_m && Config::kBlockN == kWanted.block_n &&
                  Config::kWarps == kWanted.warps && Config::kTile.blocks_per_sm == kWanted.blocks_per_sm,
              "the laboratory's header was not the one included");

}  // namespace

// As set_dense_call() takes it. Returns the launch status.
LAB_EXPORT int lab_forward(const void* q, const void* k, const void* v, void* out, int batch, int seqlen_q,
                           int seqlen_k, int heads, int causal, void* stream) {
  flash::Flash_fwd_params params;
  const DenseSizes sizes{batch, seqlen_q, seqlen_k, heads, LAB_HEAD_DIM, causal != 0};
  cudaError_t status = set_dense_call(params, q, k, v, out, sizes);
  static Buffer lse, rng_state;
  if (status == cudaSuccess) status = lse.grow(sizeof(float) * batch * heads * seqlen_q);
  if (status == cudaSuccess) status = rng_state.grow(2 * sizeof(int64_t));
  if (status != cudaSuccess) return status;
  params.softmax_lse_ptr = static_cast<float*>(lse.memory);
  params.dropout.rng_state = static_cast<int64_t*>(rng_state.memory);
  flash::plan::FwdPlan plan;
  plan.grid = int64_t{heads} * flash::plan::m_blocks(false, batch, seqlen_q, Config::kBlockM);
  return flash::sm80::run_flash_fwd<Config>(params, plan, static_cast<cudaStream_t>(stream));
}
