// The shipped wgmma forward with the laboratory's tile and policy row, behind a C function, for
// benchmarks/lab_build.py. plan/tiles.h and plan/fwd_policy_sm90.h are copies with one return more
// (benchmarks/lab_sm90.py); LAB_HEAD_DIM, LAB_VARIANT, LAB_BLOCK_M, LAB_BLOCK_N and LAB_FEATURES come with them.
#include "dense_call.h"
#include "kernels/sm90/fwd_launch.h"

#define LAB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

namespace plan = flash::plan;
using Config = flash::sm90::FwdConfig<flash::Dtype::kBf16, LAB_HEAD_DIM, plan::FwdVariant::LAB_VARIANT>;
static_assert(Config::kBlockM == LAB_BLOCK_M && Config::kBlockN == LAB_BLOCK_N &&
                  Config::kPolicy.features == (LAB_FEATURES),
              "the laboratory's headers were not the ones included");

// kPlanned: as plan_fwd() has it. kStatic: persistent CTAs with equally many tiles each. kNone: a CTA for each tile.
enum class Scheduler { kPlanned, kStatic, kNone };

Scheduler scheduler = Scheduler::kPlanned;
float rescale_threshold_log2 = flash::kRescaleThresholdLog2;

// A buffer of the device that grows; calls are of one stream.
struct Buffer {
  void* memory = nullptr;
  size_t bytes = 0;

  cudaError_t grow(size_t wanted) {
    if (wanted <= bytes) return cudaSuccess;
    if (const cudaError_t status = cudaFree(memory); status != cudaSuccess) return status;
    memory = nullptr;
    bytes = 0;
    const cudaError_t status = cudaMalloc(&memory, wanted);
    if (status == cudaSuccess) bytes = wanted;
    return status;
  }
};

plan::FwdPlan make_plan(const flash::Flash_fwd_split_params& params, const plan::Device& device) {
  plan::FwdProblem problem;
  problem.batch = params.b;
  problem.heads = problem.heads_k = params.h;
  problem.head_dim = problem.head_dim_v = LAB_HEAD_DIM;
  problem.seqlen_q = params.seqlen_q;
  problem.seqlen_k = params.seqlen_k;
  problem.window = params.window;
  plan::FwdPlan made;
  made.family = plan::Family::kWgmma;
  made.variant = Config::kVariant;
  made.head_dim = made.head_dim_v = LAB_HEAD_DIM;
  made.block_m = Config::kBlockM;
  made.block_n = Config::kBlockN;
  made.consumer_groups = Config::kConsumerGroups;
  made.smem_bytes = plan::sm90_fwd_smem_bytes(Config::kTile, Config::kVariant, flash::Dtype::kBf16);
  made.num_work_tiles = problem.blocks(Config::kBlockM);
  made.grid = made.num_work_tiles < device.multiprocessors ? made.num_work_tiles : device.multiprocessors;
  plan::set_tile_order(made, problem, device);
  if (scheduler != Scheduler::kPlanned) made.is_dynamic = false;
  if (scheduler == Scheduler::kNone) made.grid = made.num_work_tiles;
  made.pdl = false;  // the memset ahead of it is no kernel
  return made;
}

}  // namespace

// Of the calls that follow: the index of a Scheduler, and how far the row max may lag (0: not at all).
LAB_EXPORT void lab_options(int scheduler_index, float threshold_log2) {
  scheduler = static_cast<Scheduler>(scheduler_index);
  rescale_threshold_log2 = threshold_log2;
}

// bf16, as set_dense_call() takes it. Returns the launch status.
LAB_EXPORT int lab_forward(const void* q, const void* k, const void* v, void* out, int batch, int seqlen_q,
                           int seqlen_k, int heads, int causal, void* raw_stream) {
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  flash::Flash_fwd_split_params params;
  params.rescale_threshold_log2 = rescale_threshold_log2;
  cudaError_t status =
      set_dense_call(params, q, k, v, out, batch, seqlen_q, seqlen_k, heads, LAB_HEAD_DIM, causal != 0);
  plan::Device device;
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, params.device);
  }
  static Buffer lse, small;
  if (status == cudaSuccess) status = lse.grow(sizeof(float) * batch * heads * seqlen_q);
  if (status == cudaSuccess) status = small.grow(4 * sizeof(int64_t));
  if (status != cudaSuccess) return status;
  params.softmax_lse_ptr = static_cast<float*>(lse.memory);
  params.dropout.rng_state = static_cast<int64_t*>(small.memory);
  params.tile_count_semaphore = reinterpret_cast<int*>(params.dropout.rng_state + 2);
  const plan::FwdPlan made = make_plan(params, device);
  if (made.is_dynamic) status = cudaMemsetAsync(params.tile_count_semaphore, 0, sizeof(int), stream);
  if (status != cudaSuccess) return status;
  return flash::sm90::run_flash_fwd<Config, flash::Dtype::kBf16>(params, made, stream);
}
