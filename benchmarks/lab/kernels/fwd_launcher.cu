// One design of the laboratory's mma.sync forward with a C interface, for benchmarks/lab/kernel_library.py. Compiled
// with LAB_DESIGN, the fields of FwdDesign in braces.
#include <cmath>

#include "fwd_kernel.h"
#include "kernels/common/launch.h"

using LabConfig = flash::lab::FwdConfig;

// q, out: contiguous (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, heads, head_dim). The causal mask is
// aligned to the last query and key. Returns the launch status.
extern "C" __attribute__((visibility("default"))) int lab_forward(const void* q, const void* k, const void* v,
                                                                  void* out, int batch, int seqlen_q, int seqlen_k,
                                                                  int heads, int causal, void* stream) {
  flash::lab::FwdParams params{q, k, v, out, seqlen_q, seqlen_k, heads, {}, 0.0f};
  if (causal) params.window.right = 0;
  params.scale_log2 = 1.44269504f / std::sqrt(static_cast<float>(LabConfig::kHeadDim));
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return status;
  static std::atomic<uint64_t> configured_devices{0};
  const int64_t m_blocks = (seqlen_q + LabConfig::kBlockM - 1) / LabConfig::kBlockM;
  return flash::launch(flash::lab::lab_fwd_kernel<LabConfig>, m_blocks * batch * heads, LabConfig::kThreads,
                       LabConfig::kSmemBytes, params, device, static_cast<cudaStream_t>(stream), configured_devices);
}
