// Multiprocessors that a call leaves to other kernels. Without torch: tests/cpp/test_sm_margin.cpp.
#pragma once

#include <cstdint>

#include "plan/device.h"

namespace flash {

// FlashAttention-2 has none: the module's functions take it by name.
struct LaunchOptions {
  int64_t sm_margin = 0;

  template <class Visitor>
  void visit_named(Visitor&& visit) {
    visit("sm_margin", sm_margin, "an int");
  }
};

// The device as plans see it, of fewer multiprocessors, at least one: then no persistent grid takes more of them.
constexpr plan::Device with_margin(plan::Device device, int64_t sm_margin) {
  const bool leaves_some = sm_margin < device.multiprocessors;
  device.multiprocessors = leaves_some ? device.multiprocessors - static_cast<int>(sm_margin) : 1;
  device.has_margin = sm_margin > 0;
  return device;
}

}  // namespace flash
