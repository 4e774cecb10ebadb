// The GPU of a call: its facts as plans see them, the current device, and whether a launch succeeded. Errors name the
// kernel, its configuration and what to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <atomic>
#include <string>

#include "api/checks.h"
#include "api/environment.h"
#include "params/flash.h"
#include "plan/device.h"
#include "plan/kv_tiles.h"
#include "plan/tiles.h"

namespace flash {

// Makes a device current until the end of the scope, and creates its context: a thread that has not yet called the
// CUDA runtime has none and could encode no tensor map. CUDAGuard alone creates none for device 0.
class CallDevice {
 public:
  explicit CallDevice(c10::Device device) : guard_(device) { C10_CUDA_CHECK(cudaSetDevice(device.index())); }

 private:
  c10::cuda::CUDAGuard guard_;
};

struct DeviceFacts {
  std::atomic<int> capability{0};  // 10 * major + minor; 0 = not asked yet
  std::atomic<int> multiprocessors{0};
  std::atomic<int> smem_per_multiprocessor{0};  // bytes
  std::atomic<int> smem_per_block{0};           // bytes that one CTA may ask for
};

inline const DeviceFacts& device_facts(int device) {
  static std::array<DeviceFacts, 64> cache;
  DeviceFacts& facts = cache[device % 64];
  if (facts.capability == 0) {
    int major = 0, minor = 0, multiprocessors = 0, smem_per_multiprocessor = 0, smem_per_block = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    C10_CUDA_CHECK(
        cudaDeviceGetAttribute(&smem_per_multiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&smem_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    facts.multiprocessors = multiprocessors;
    facts.smem_per_multiprocessor = smem_per_multiprocessor;
    facts.smem_per_block = smem_per_block;
    facts.capability = 10 * major + minor;
  }
  return facts;
}

inline int compute_capability(int device) { return device_facts(device).capability; }

// The head dims of plan::kFwdTiles whose wgmma kernels kernel_build_info() lists.
inline uint32_t built_wgmma_head_dims() {
  const std::string info = kernel_build_info();
  const auto list = [&info](const char* name) {
    const size_t begin = info.find('[', info.find(name)) + 1;
    return " " + info.substr(begin, info.find(']', begin) - begin) + ",";
  };
  uint32_t built = 0;
  if (list("\"archs\"").find("\"90\"") == std::string::npos) return built;
  const std::string head_dims = list("\"head_dims\"");
  for (int i = 0; i < plan::kNumHeadDims; ++i) {
    const std::string head_dim = " " + std::to_string(plan::kFwdTiles[0][i].head_dim) + ",";
    if (head_dims.find(head_dim) != std::string::npos) built |= uint32_t{1} << i;
  }
  return built;
}

// Every plan of a call takes its device from here.
inline plan::Device device_of(int device, int64_t sm_margin) {
  if (sm_margin < 0) checks::fail("sm_margin", "expected a value >= 0, got ", sm_margin);
  static const uint32_t wgmma_head_dims = built_wgmma_head_dims();
  const DeviceFacts& facts = device_facts(device);
  const plan::Device whole{facts.capability, facts.multiprocessors, facts.smem_per_multiprocessor, facts.smem_per_block,
                           wgmma_head_dims};
  return plan::with_margin(plan::limited(whole, CallEnvironment::smem_limit()), sm_margin);
}

inline void check_device_supported(const at::Tensor& q) {
  const int64_t capability = compute_capability(q.device().index());
  if (capability < 80) {
    checks::fail("q", "expected a tensor on a GPU of compute capability 8.0 or higher, got one on ", q.device(),
                 " of compute capability ", capability / 10, ".", capability % 10);
  }
}

// kv_dtype: of 8-bit K and V that the kernel reads.
inline void check_launch(cudaError_t status, const char* kernel, const at::Tensor& q, Dtype kv_dtype = Dtype::kBf16) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // a launch error is not sticky: clear it
  const int64_t head_dim = q.size(-1), capability = compute_capability(q.device().index());
  const std::string what =
      std::string(kernel) + " (" + checks::dtype_name(q.scalar_type()) + ", head dim " + std::to_string(head_dim) + ")";
  const std::string build = std::string(" (this build: ") + kernel_build_info() + ")";
  if (status == cudaErrorNotSupported) {
    const bool is_8bit = is_eight_bit(kv_dtype);
    const int64_t tile = is_8bit ? plan::kv8_tile(static_cast<int>(head_dim), 0).head_dim
                                 : plan::fwd_tile(static_cast<int>(head_dim), plan::FwdVariant::kPlain).head_dim;
    checks::fail(what.c_str(), "this build has no such kernel. Rebuild flash_attn with FLASH_ATTN_HEAD_DIMS including ",
                 tile, " and FLASH_ATTN_DTYPES including ", flash::dtype_name(is_8bit ? kv_dtype : dtype_of(q)), build);
  }
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    checks::fail(what.c_str(), "this build has no code for compute capability ", capability / 10, ".", capability % 10,
                 ". Rebuild flash_attn with FLASH_ATTN_CUDA_ARCHS including ", capability, build);
  }
  if (status == cudaErrorInvalidConfiguration) {
    checks::fail(what.c_str(), "this GPU (compute capability ", capability / 10, ".", capability % 10,
                 ") has too little shared memory per block for this head dim, or the grid is too large");
  }
  checks::fail(what.c_str(), "launch failed: ", cudaGetErrorString(status));
}

}  // namespace flash
