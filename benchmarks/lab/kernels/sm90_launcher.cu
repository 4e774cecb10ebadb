// The shipped wgmma forward with the laboratory's tile and policy row, with a C interface, for
// benchmarks/lab/kernel_library.py. plan/tiles.h and plan/fwd_policy_sm90.h are copies with one return more
// (benchmarks/lab/sm90_designs.py); LAB_HEAD_DIM, LAB_DTYPE, LAB_VARIANT, LAB_BLOCK_M, LAB_BLOCK_N and LAB_FEATURES
// come with them.
#include <cuda_runtime_api.h>

#include <cmath>

#include "kernels/sm90/fwd_config.h"
#include "kernels/sm90/fwd_launch.h"
#include "params/flash.h"
#include "plan/device.h"

#define LAB_EXPORT extern "C" __attribute__((visibility("default")))

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

// Of a contiguous (batch, seqlen, heads, head dim).
flash::MatrixStrides strides(int seqlen, int heads) {
  flash::MatrixStrides found;
  found.head = LAB_HEAD_DIM;
  found.row = found.head * heads;
  found.batch = found.row * seqlen;
  return found;
}

// What a plan asks of an sm_90 GPU.
cudaError_t read_device(plan::Device& device, int index) {
  device.capability = 90;
  cudaError_t status = cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&device.smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&device.smem_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
}

plan::FwdPlan make_plan(const flash::Flash_fwd_params& params, const plan::Device& device) {
  plan::FwdProblem problem;
  problem.dtype = kDtype;
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

// q, out: contiguous (batch, seqlen_q, heads, head dim); k, v: (batch, seqlen_k, heads, head dim). causal: the mask is
// aligned to the last query and key. Returns the launch status.
LAB_EXPORT int lab_forward(const void* q, const void* k, const void* v, void* out, int batch, int seqlen_q,
                           int seqlen_k, int heads, int causal, void* raw_stream) {
  flash::Flash_fwd_split_params params;
  params.q_ptr = q;
  params.k_ptr = k;
  params.v_ptr = v;
  params.o_ptr = out;
  params.q_strides = params.o_strides = strides(seqlen_q, heads);
  params.k_strides = params.v_strides = strides(seqlen_k, heads);
  params.b = batch;
  params.h = params.h_k = heads;
  params.d = params.d_v = LAB_HEAD_DIM;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  if (causal) params.window.right = 0;
  params.scale_softmax = 1.0f / std::sqrt(static_cast<float>(LAB_HEAD_DIM));
  params.softmax_scale_log2 = params.scale_softmax * 1.44269504f;
  params.rescale_threshold_log2 = rescale_threshold_log2;
  int index = 0;
  plan::Device device;
  static Buffer lse, small;
  cudaError_t status = cudaGetDevice(&index);
  if (status == cudaSuccess) status = read_device(device, index);
  if (status == cudaSuccess) status = lse.grow(sizeof(float) * batch * heads * seqlen_q);
  if (status == cudaSuccess) status = small.grow(4 * sizeof(int64_t));
  if (status != cudaSuccess) return status;
  params.device = static_cast<int16_t>(index);
  params.softmax_lse_ptr = static_cast<float*>(lse.memory);
  params.dropout.rng_state = static_cast<int64_t*>(small.memory);
  params.tile_count_semaphore = reinterpret_cast<int*>(params.dropout.rng_state + 2);
  const auto stream = static_cast<cudaStream_t>(raw_stream);
  const plan::FwdPlan made = make_plan(params, device);
  if (made.is_dynamic) status = cudaMemsetAsync(params.tile_count_semaphore, 0, sizeof(int), stream);
  if (status != cudaSuccess) return status;
  return flash::sm90::run_flash_fwd<kDtype, LAB_HEAD_DIM, Config::kVariant>(params, made, stream);
}
