// The emulator's mbarrier. It fails where more arrives than a phase expects.
#pragma once

namespace flash {
namespace tma {

struct Barrier {
  int expected, pending, bytes;
  uint32_t phase;

  void init(int arrivals) { expected = pending = arrivals, bytes = 0, phase = 0; }
  static void fence_init() {}
  void arrive() {
    if (--pending < 0) emulation::fail("an arrival too many");
    advance();
  }
  void arrive_after_copies() {
    std::vector<emulation::Copy> begun;
    begun.swap(emulation::fibers[emulation::current].open_copies);
    emulation::start_copy([this, begun] {
      for (const emulation::Copy& copy : begun) emulation::land(copy);
      arrive();
    });
  }
  void arrive_and_expect(int count) {
    bytes += count;
    arrive();
  }
  void complete(int count) {
    bytes -= count;
    advance();
  }
  void advance() {
    ++emulation::progress;
    if (pending == 0 && bytes == 0) phase ^= 1, pending = expected;
  }
  bool test(uint32_t parity) const { return phase != parity; }
  void wait(uint32_t parity) const {
    emulation::wait_until([&] {
      emulation::land_some();
      return phase != parity;
    });
  }
};

inline void fence_buffer() { emulation::finish_loads(); }

}  // namespace tma
}  // namespace flash
