// One forward kernel of a tile configuration behind two C functions, for sweep.py. Compiled with SWEEP_HEAD_DIM and,
// for another tile than that of plan/tiles.h, FLASH_ATTN_SWEEP_M, _N, _WARPS and _BLOCKS_PER_SM.
#include <cmath>

#include "kernels/sm80/fwd_launch.h"

#define SWEEP_EXPORT extern "C" __attribute__((visibility("default")))

using SweepConfig = flash::sm80::FwdConfig<flash::Dtype::kBf16, SWEEP_HEAD_DIM, flash::plan::FwdVariant::kPlain>;

// block_m, block_n, warps, blocks_per_sm, bytes of shared memory.
SWEEP_EXPORT void sweep_tile(int* fields) {
  constexpr flash::plan::FwdTile kTile = SweepConfig::kTile;
  const int values[] = {kTile.block_m, kTile.block_n, kTile.warps, kTile.blocks_per_sm, SweepConfig::kSmemBytes};
  for (int i = 0; i < 5; ++i) fields[i] = values[i];
}

// The forward writes its random state; one buffer serves every call of the process.
static int64_t* rng_state() {
  static int64_t* const state = [] {
    void* memory = nullptr;
    return cudaMalloc(&memory, 2 * sizeof(int64_t)) == cudaSuccess ? static_cast<int64_t*>(memory) : nullptr;
  }();
  return state;
}

// q, k, v, out: contiguous (batch, seqlen, heads, SWEEP_HEAD_DIM) bf16; lse: (batch, heads, seqlen) fp32. Returns the
// launch status.
SWEEP_EXPORT int sweep_forward(const void* q, const void* k, const void* v, void* out, float* lse, int batch,
                               int seqlen, int heads, int causal, void* stream) {
  flash::Flash_fwd_params params;
  params.q_ptr = q;
  params.k_ptr = k;
  params.v_ptr = v;
  params.o_ptr = out;
  params.softmax_lse_ptr = lse;
  flash::MatrixStrides strides;
  strides.head = SWEEP_HEAD_DIM;
  strides.row = strides.head * heads;
  strides.batch = strides.row * seqlen;
  params.q_strides = params.k_strides = params.v_strides = params.o_strides = strides;
  params.b = batch;
  params.h = params.h_k = heads;
  params.h_h_k_ratio = 1;
  params.d = SWEEP_HEAD_DIM;
  params.seqlen_q = params.seqlen_k = seqlen;
  if (causal) params.window.right = 0;
  params.scale_softmax = 1.0f / std::sqrt(static_cast<float>(SWEEP_HEAD_DIM));
  params.softmax_scale_log2 = params.scale_softmax * 1.44269504f;
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  params.device = static_cast<int16_t>(device);
  params.dropout.rng_state = rng_state();
  if (params.dropout.rng_state == nullptr) return cudaErrorMemoryAllocation;
  flash::plan::FwdPlan plan;
  plan.grid = int64_t{heads} * flash::plan::m_blocks(false, batch, seqlen, SweepConfig::kBlockM);
  return flash::sm80::run_flash_fwd<SweepConfig>(params, plan, static_cast<cudaStream_t>(stream));
}
