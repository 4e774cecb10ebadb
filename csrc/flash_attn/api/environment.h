// Environment variables of a call. Read at entry points under the GIL, under which os.environ changes them: the calls
// themselves run without it.
#pragma once

#include <cstdlib>
#include <optional>
#include <string>

namespace flash {

// FLASH_ATTN_FAMILY for this thread's call, and FLASH_ATTN_TRACE for the process. A copy, because a change frees the
// string.
class CallEnvironment {
 public:
  CallEnvironment() {
    if (const char* value = std::getenv("FLASH_ATTN_FAMILY")) forced_family_ = value;
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
  static bool is_traced() { return current_ != nullptr && current_->is_traced_; }

 private:
  std::optional<std::string> forced_family_;
  bool is_traced_ = false;
  static inline thread_local const CallEnvironment* current_ = nullptr;
};

inline const char* forced_family() { return CallEnvironment::forced_family(); }

}  // namespace flash
