// The emulator's mbarrier.
#pragma once

namespace flash {
namespace tma {

struct Barrier {
  int expected, pending;
  uint32_t phase;

  void init(int arrivals) { expected = pending = arrivals, phase = 0; }
  static void fence_init() {}
  void arrive() {
    ++emulation::progress;
    if (--pending == 0) phase ^= 1, pending = expected;
  }
  void wait(uint32_t parity) const {
    emulation::wait_until([&] { return phase != parity; });
  }
};

inline void fence_buffer() {}

}  // namespace tma
}  // namespace flash
