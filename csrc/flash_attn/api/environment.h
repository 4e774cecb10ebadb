// Environment variables of a call. Read at entry points under the GIL, under which os.environ changes them: the calls
// themselves run without it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "api/checks.h"
#include "params/flash.h"
#include "plan/explain.h"

namespace flash {

// FLASH_ATTN_FAMILY, FLASH_ATTN_ROW_MAX and FLASH_ATTN_SMEM_LIMIT for this thread's call, and FLASH_ATTN_TRACE for the
// process. Copies, because a change frees the string.
class CallEnvironment {
 public:
  CallEnvironment() {
    if (const char* value = std::getenv("FLASH_ATTN_FAMILY")) forced_family_ = value;
    if (const char* value = std::getenv("FLASH_ATTN_SMEM_LIMIT")) smem_limit_ = bytes("FLASH_ATTN_SMEM_LIMIT", value);
    if (const char* value = std::getenv("FLASH_ATTN_ROW_MAX")) exact_row_max_ = is_exact(value);
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

}  // namespace flash
