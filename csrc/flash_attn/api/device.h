// The environment and the GPU of a call: environment variables, the GPU's facts as plans see them, the current device,
// and whether a launch succeeded. Errors name the kernel, its configuration and what to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>

#include "api/checks.h"
#include "params/flash.h"
#include "plan/device.h"
#include "plan/explain.h"
#include "plan/kv_tiles.h"
#include "plan/tiles.h"

namespace flash {

// ---- environment variables ----

// FLASH_ATTN_FAMILY, FLASH_ATTN_ROW_MAX and FLASH_ATTN_SMEM_LIMIT for this thread's call, and FLASH_ATTN_TRACE for the
// process. Read at entry points under the GIL, under which os.environ changes them: the calls themselves run without
// it. Copies, because a change frees the string.
class CallEnvironment {
 public:
  CallEnvironment() {
    if (is_any_set()) {  // one pass over the environment where none is
      if (const char* value = std::getenv("FLASH_ATTN_FAMILY")) forced_family_ = value;
      if (const char* value = std::getenv("FLASH_ATTN_SMEM_LIMIT")) smem_limit_ = bytes("FLASH_ATTN_SMEM_LIMIT", value);
      if (const char* value = std::getenv("FLASH_ATTN_ROW_MAX")) exact_row_max_ = is_exact(value);
    }
    static const bool traced = [] {
      const char* const value = std::getenv("FLASH_ATTN_TRACE");
      return value != nullptr && std::string(value) == "1";
    }();
    is_traced_ = traced;
    current_ = this;
  }
  ~CallEnvironment() { current_ = nullptr; }
  CallEnvironment(const CallEnvironment&) = delete;
  CallEnvironment& operator=(const CallEnvironment&) = delete;

  // Null: not set.
  static const char* forced_family() {
    return current_ != nullptr && current_->forced_family_ ? current_->forced_family_->c_str() : nullptr;
  }
  // Bytes of shared memory that a thread block may have; as many as the GPU says where it is not set.
  static int smem_limit() { return current_ != nullptr ? current_->smem_limit_ : kNoLimit; }
  static bool exact_row_max() { return current_ != nullptr && current_->exact_row_max_; }
  static bool is_traced() { return current_ != nullptr && current_->is_traced_; }

 private:
  static constexpr int kNoLimit = 1 << 30;

  static bool is_any_set() {
    if (environ == nullptr) return false;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      if (**variable == 'F' && std::strncmp(*variable, "FLASH_ATTN_", 11) == 0) return true;
    }
    return false;
  }

  static int bytes(const char* name, const char* value) {
    char* end = nullptr;
    const long long count = std::strtoll(value, &end, 10);
    if (end == value || *end != '\0' || count <= 0)
      checks::fail(name, "expected a number of bytes, got \"", value, "\"");
    return count < kNoLimit ? static_cast<int>(count) : kNoLimit;
  }

  static bool is_exact(const std::string& row_max) {
    if (row_max != "exact" && row_max != "lagging")
      checks::fail("FLASH_ATTN_ROW_MAX", "expected \"exact\" or \"lagging\", got \"", row_max, "\"");
    return row_max == "exact";
  }

  std::optional<std::string> forced_family_;
  int smem_limit_ = kNoLimit;
  bool exact_row_max_ = false;
  bool is_traced_ = false;
  static inline thread_local const CallEnvironment* current_ = nullptr;
};

// Of every entry point: reads the environment under the GIL, then releases it.
struct CallGuard {
  CallEnvironment environment;
  py::gil_scoped_release release;
};

inline std::string one_line(const MatrixStrides& strides) {
  return std::to_string(strides.batch) + "," + std::to_string(strides.row) + "," + std::to_string(strides.head);
}

// Sizes and strides of q, k and v as the kernel reads them: a packed batch as one sequence, pages of no cache by the
// page.
inline plan::Explanation sizes(const Flash_fwd_params& params, int64_t seqlen_k) {
  plan::Explanation result;
  result["batch"] = int64_t{params.b};
  result["seqlen_q"] = int64_t{params.seqlen_q};
  result["seqlen_k"] = seqlen_k;
  result["heads"] = int64_t{params.h};
  result["heads_k"] = int64_t{params.h_k};
  result["q_strides"] = one_line(params.q_strides);
  result["k_strides"] = one_line(params.k_strides);
  result["v_strides"] = one_line(params.v_strides);
  return result;
}

// FLASH_ATTN_TRACE=1: one line to stderr for each attention that is launched, with its plan and its sizes.
template <class... Plans>
void trace(const Flash_fwd_params& params, int64_t seqlen_k, const Plans&... plans) {
  if (!CallEnvironment::is_traced()) return;
  const std::string plan = one_line(plan::explain(plans...)), call = one_line(sizes(params, seqlen_k));
  std::fprintf(stderr, "flash_attn: %s %s\n", plan.c_str(), call.c_str());
}

inline const char* forced_family() { return CallEnvironment::forced_family(); }

// ---- the GPU ----

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
