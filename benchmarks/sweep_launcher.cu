// One forward kernel of a tile configuration behind two C functions, for sweep.py. Compiled with SWEEP_HEAD_DIM and,
// for another tile than that of plan/tiles.h, FLASH_ATTN_SWEEP_M, _N, _WARPS and _BLOCKS_PER_SM.
#include "kernels/sm80/fwd_launch.h"
#include "lab/dense_call.h"

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
  params.softmax_lse_ptr = lse;
  const cudaError_t status =
      set_dense_call(params, q, k, v, out, batch, seqlen, seqlen, heads, SWEEP_HEAD_DIM, causal != 0);
  if (status != cudaSuccess) return status;
  params.dropout.rng_state = rng_state();
  if (params.dropout.rng_state == nullptr) return cudaErrorMemoryAllocation;
  flash::plan::FwdPlan plan;
  plan.grid = int64_t{heads} * flash::plan::m_blocks(false, batch, seqlen, SweepConfig::kBlockM);
  return flash::sm80::run_flash_fwd<SweepConfig>(params, plan, static_cast<cudaStream_t>(stream));
}
