// The emulator's warp instructions in place of CuTe's.
#pragma once

namespace emulation {

struct NamedBarrier {
  int arrived = 0, phase = 0;
};
static NamedBarrier named_barriers[16];

// Returns the phase that it arrives at.
inline int arrive_named(int id, int threads) {
  NamedBarrier& barrier = named_barriers[id];
  const int phase = barrier.phase;
  ++progress;
  if (++barrier.arrived == threads) barrier.arrived = 0, ++barrier.phase;
  return phase;
}

}  // namespace emulation

namespace flash {
namespace sm80 {

inline void load_matrices(uint32_t (&r)[4], const void* row) { ::load_matrices(r, static_cast<const bf16*>(row)); }
inline void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
  ::load_matrices_transposed(r, static_cast<const bf16*>(row));
}
inline void multiply(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bf16) { mma(acc, a, b0, b1); }
inline void copy16_async(void* to, const void* from, bool valid) {
  copy_async(static_cast<bf16*>(to), static_cast<const bf16*>(from), valid);
}
inline void prefetch_line(const void* global) { static_cast<void>(*static_cast<const volatile char*>(global)); }
inline void arrive_named(int id, int threads) { emulation::arrive_named(id, threads); }
inline void sync_named(int id, int threads) {
  const int phase = emulation::arrive_named(id, threads);
  emulation::wait_until([&] { return emulation::named_barriers[id].phase != phase; });
}
// Of both consumers, or of all threads.
inline bool any_named(int, int threads, bool value) {
  const bool of_all = threads == static_cast<int>(emulation::fibers.size());
  return emulation::any_of(of_all ? emulation::kBlock : emulation::kConsumers, value);
}
inline void commit_copies() { ::commit_copies(); }
inline void wait_for_copies_but(int newest) {
  newest == 0 ? ::wait_for_copies_but<0>() : newest == 1 ? ::wait_for_copies_but<1>() : ::wait_for_copies_but<2>();
}

}  // namespace sm80
}  // namespace flash
