// A shipped backward, of the wgmma family with LAB_WGMMA, else of mma.sync, with the laboratory's tile, LAB_TILE of
// dtype LAB_DTYPE, with a C interface, for benchmarks/lab/kernel_library.py. plan/tiles.h is a copy with one return
// more (benchmarks/lab/tile_designs.py).
#include "dense_call.h"
#if LAB_WGMMA
#include "kernels/sm90/bwd_launch.h"
#include "kernels/sm90/bwd_one_pass/config.h"
#include "kernels/sm90/bwd_two_pass/config.h"
#else
#include "kernels/sm80/bwd_config.h"
#include "kernels/sm80/bwd_launch.h"
#endif

namespace {

namespace plan = flash::plan;
constexpr flash::Dtype kDtype = flash::Dtype::LAB_DTYPE;

#if LAB_WGMMA
constexpr plan::Sm90BwdTile kWanted = LAB_TILE;
constexpr auto kVariant = flash::sm90::BwdVariant::kPlain;
using Config = std::conditional_t<
    plan::has_dq_pass(kWanted), flash::sm90::BwdTwoPassConfig<kDtype, kWanted.head_dim, kVariant, kWanted.head_dim>,
    flash::sm90::BwdOnePassConfig<kDtype, kWanted.head_dim, kVariant, flash::sm90::DqLocation::kGlobal>>;

template <class Config>
cudaError_t run_wgmma(const flash::Flash_bwd_mask_params& params, const plan::BwdPlan& made, cudaStream_t stream) {
  if constexpr (plan::has_dq_pass(Config::kTile)) {
    return flash::sm90::run_flash_bwd_two_pass<Config, Config>(params, made, stream);
  } else {
    return flash::sm90::run_flash_bwd<kDtype, kWanted.head_dim, kVariant, flash::sm90::DqLocation::kGlobal>(
        params, made, stream);
  }
}

static_assert(Config::kStages == kWanted.stages);
constexpr const char* kForced = nullptr;
#else
constexpr plan::BwdTile kWanted = LAB_TILE;
using Config = flash::sm80::BwdConfig<kDtype, kWanted.head_dim, flash::sm80::BwdVariant::kPlain, false>;
static_assert(Config::kTile.warps == kWanted.warps && Config::kTile.blocks_per_sm == kWanted.blocks_per_sm);
constexpr const char* kForced = "mma_sync";
#endif
static_assert(Config::kBlockM == kWanted.block_m && Config::kBlockN == kWanted.block_n,
              "the laboratory's header was not the one included");

cudaError_t run(const flash::Flash_bwd_mask_params& params, const plan::BwdPlan& made, cudaStream_t stream) {
#if LAB_WGMMA
  return run_wgmma<Config>(params, made, stream);
#else
  if (made.stages == 0) return cudaErrorInvalidConfiguration;
  cudaError_t status = flash::run_softmax_d(params, kDtype, stream);
  if (status == cudaSuccess) status = flash::sm80::run_flash_bwd<Config>(params, made, stream);
  return status == cudaSuccess ? flash::sm80::run_flash_bwd_convert_dq<Config>(params, made, stream) : status;
#endif
}

}  // namespace

// tensors: q, k, v, out, lse (fp32 (batch, heads, seqlen_q)), dout, dq, dk, dv, contiguous as set_dense_call() takes
// them; the last three are written. Returns the launch status.
LAB_EXPORT int lab_backward(void* const* tensors, int batch, int seqlen_q, int seqlen_k, int heads, int causal,
                            void* stream) {
  const DenseSizes sizes{batch, seqlen_q, seqlen_k, heads, LAB_HEAD_DIM, causal != 0};
  flash::Flash_bwd_mask_params params;
  cudaError_t status = set_dense_call(params, tensors[0], tensors[1], tensors[2], tensors[3], sizes);
  params.softmax_lse_ptr = static_cast<float*>(tensors[4]);
  params.do_ptr = tensors[5];
  params.dq_ptr = tensors[6];
  params.dk_ptr = tensors[7];
  params.dv_ptr = tensors[8];
  params.do_strides = params.dq_strides = params.q_strides;
  params.dk_strides = params.dv_strides = params.k_strides;
  plan::Device device;
  if (status == cudaSuccess) status = read_device(device, params.device);
  if (status != cudaSuccess) return status;
  plan::BwdProblem problem;
  set_dense_problem(problem, sizes, kDtype);
  problem.batch_invariant = true;  // dQ never in shared memory: that is another kernel
  const plan::BwdPlan made = plan::plan_bwd(problem, device, kForced);
  static Buffer softmax_d, workspace;
  params.d_rows = made.softmax_d_rows;
  params.workspace_vectors = made.workspace_vectors();
  status = softmax_d.grow(sizeof(float) * batch * heads * params.d_rows);
  if (status == cudaSuccess) status = workspace.grow(sizeof(float4) * params.workspace_vectors);
  if (status != cudaSuccess) return status;
  params.softmax_d_ptr = static_cast<float*>(softmax_d.memory);
  params.workspace_ptr = static_cast<float4*>(workspace.memory);
  params.dq_accum_ptr = static_cast<float*>(workspace.memory);
  params.tile_count_semaphore = reinterpret_cast<int*>(params.dq_accum_ptr + made.accum_words());
  return run(params, made, static_cast<cudaStream_t>(stream));
}
