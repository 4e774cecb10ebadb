// The shipped wgmma forward with the laboratory's tile and policy row, with a C interface, for
// benchmarks/lab/kernel_library.py. plan/tiles.h and plan/fwd_policy_sm90.h are copies with one return more
// (benchmarks/lab/sm90_designs.py); LAB_HEAD_DIM, LAB_DTYPE, LAB_VARIANT, LAB_BLOCK_M, LAB_BLOCK_N and LAB_FEATURES
// come with them.
#include "dense_call.h"
#include "kernels/sm90/fwd_config.h"
#include "kernels/sm90/fwd_launch.h"

namespace {

namespace plan = flash::plan;
constexpr flash::Dtype kDtype = flash::Dtype::LAB_DTYPE;
using Config = flash::sm90::FwdConfig<kDtype, LAB_HEAD_DIM, plan::FwdVariant::LAB_VARIANT, LAB_HEAD_DIM>;
static_assert(Config::kBlockM == LAB_BLOCK_M && Config::kBlockN == LAB_BLOCK_N &&
                  Config::kPolicy.features == (LAB_FEATURES),
              "the laboratory's headers were not the ones included");

// kPlanned: as plan_fwd() has it. kStatic: persistent CTAs with equally many tiles each. kNone: a CTA for each tile.
enum class Scheduler { kPlanned, kStatic, kNone };

Scheduler scheduler = Scheduler::kPlanned;
float rescale_threshold_log2 = flash::kRescaleThresholdLog2;

plan::FwdPlan make_plan(const DenseSizes& sizes, const plan::Device& device) {
  plan::FwdProblem problem;
  set_dense_problem(problem, sizes, kDtype);
  plan::FwdPlan made;
  made.family = plan::Family::kWgmma;
  made.variant = Config::kVariant;
  made.head_dim = made.head_dim_v = LAB_HEAD_DIM;
  made.block_m = Config::kBlockM;
  made.block_n = Config::kBlockN;
  made.consumer_groups = Config::kConsumerGroups;
  made.threads = Config::kThreads;
  made.smem_bytes = plan::sm90_fwd_smem_bytes(Config::kTile, Config::kVariant, kDtype);
  made.num_work_tiles = problem.blocks(Config::kBlockM);
  made.grid = made.num_work_tiles < device.multiprocessors ? made.num_work_tiles : device.multiprocessors;
  plan::set_tile_order(made, problem, device);
  if (scheduler != Scheduler::kPlanned) made.is_dynamic = false;
  if (scheduler == Scheduler::kNone) made.grid = made.num_work_tiles;
  made.pdl = false;  // the memset before it is no kernel
  return made;
}

}  // namespace

// Of the calls that follow: the index of a Scheduler, and how far the row max may lag (0: not at all).
LAB_EXPORT void lab_options(int scheduler_index, float threshold_log2) {
  scheduler = static_cast<Scheduler>(scheduler_index);
  rescale_threshold_log2 = threshold_log2;
}

// As set_dense_call() takes it. Returns the launch status.
LAB_EXPORT int lab_forward(const void* q, const void* k, const void* v, void* out, int batch, int seqlen_q,
                           int seqlen_k, int heads, int causal, void* raw_stream) {
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  const DenseSizes sizes{batch, seqlen_q, seqlen_k, heads, LAB_HEAD_DIM, causal != 0};
  flash::Flash_fwd_split_params params;
  params.rescale_threshold_log2 = rescale_threshold_log2;
  cudaError_t status = set_dense_call(params, q, k, v, out, sizes);
  plan::Device device;
  if (status == cudaSuccess) status = read_device(device, params.device);
  static Buffer lse, small;
  if (status == cudaSuccess) status = lse.grow(sizeof(float) * batch * heads * seqlen_q);
  if (status == cudaSuccess) status = small.grow(4 * sizeof(int64_t));
  if (status != cudaSuccess) return status;
  params.softmax_lse_ptr = static_cast<float*>(lse.memory);
  params.dropout.rng_state = static_cast<int64_t*>(small.memory);
  params.tile_count_semaphore = reinterpret_cast<int*>(params.dropout.rng_state + 2);
  const plan::FwdPlan made = make_plan(sizes, device);
  if (made.is_dynamic) status = cudaMemsetAsync(params.tile_count_semaphore, 0, sizeof(int), stream);
  if (status != cudaSuccess) return status;
  return flash::sm90::run_flash_fwd<kDtype, LAB_HEAD_DIM, Config::kVariant>(params, made, stream);
}
