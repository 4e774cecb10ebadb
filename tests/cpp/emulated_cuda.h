// Enough of CUDA on a CPU to run a few kernels: the threads of one block are fibers, which switch where they wait, for
// a collective operation or for a barrier, in the order of threads or of warps at random. Asynchronous copies land at
// once or only when they are waited for. Counts the bank conflicts of ldmatrix and stmatrix.
#pragma once

#undef _FORTIFY_SOURCE  // its longjmp() rejects jumps from one stack to another

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __launch_bounds__(...)

struct Index3 {
  int x = 0, y = 0, z = 0;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;
using std::min;

struct bf16 {
  uint16_t bits;
};

inline float to_float(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// Round to nearest, ties to even. Infinities pass; the tests feed no NaN here.
inline uint16_t to_bf16(float value) {
  uint32_t word;
  std::memcpy(&word, &value, 4);
  return static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

inline float to_float(bf16 value) { return to_float(value.bits); }

inline uint32_t pack(float low, float high) { return to_bf16(low) | static_cast<uint32_t>(to_bf16(high)) << 16; }

namespace emulation {

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

// What a lane shows to its warp at a collective operation.
struct Slot {
  int operation = 0;
  uint32_t a[4] = {}, b[2] = {};
  float value = 0.0f;
  uint64_t bits = 0;
  const bf16* row = nullptr;
};

// Who takes part in an operation. kConsumers: all but the first 128 threads. kFirstConsumer: the 128 after these.
enum Scope { kWarp, kFirstConsumer, kConsumers, kBlock, kScopes };

constexpr size_t kStackBytes = 256 * 1024;

struct Fiber {
  ucontext_t start;  // of the thread in each block; swapcontext() for every switch would call the kernel
  jmp_buf place;     // where the thread waits
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  Slot slots[kScopes][2];    // alternate: a lane may reach the next operation before another has read this one
  int counts[kScopes] = {};  // of operations so far
  bool started = false, done = false;
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> groups;
  std::vector<std::function<void()>> loads;  // not complete yet
};

static std::vector<Fiber> fibers;
static int current = 0;
static jmp_buf scheduler;
static std::function<void()> body;
static long bank_conflicts = 0, votes = 0, yes_votes = 0;  // votes of warps
static long progress = 0;                                  // what fibers have done so far
static bool at_random = false, lands_early = false;

struct BulkCopy {
  std::function<void()> land;
  int due;  // not before so many calls of land_some()
};
static std::vector<BulkCopy> copies;  // by TMA, in flight
static int landing_calls = 0;

inline void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::exit(2);
}

inline void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

inline void switch_to(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void enter() {
  body();
  fibers[current].done = true;
  yield();
}

template <class Condition>
void wait_until(const Condition& condition) {
  while (!condition()) yield();
  ++progress;
}

// A plain load of shared memory takes until its registers are read or a proxy fence: an arrival waits for none.
inline void start_load(const std::function<void()>& load) { fibers[current].loads.push_back(load); }
inline void finish_loads() {
  for (const auto& load : fibers[current].loads) load();
  fibers[current].loads.clear();
}

// By TMA: some copies take much longer than others.
inline void start_copy(const std::function<void()>& land) {
  static std::mt19937 generator(3);
  copies.push_back({land, landing_calls + (generator() % 4 == 0 ? static_cast<int>(generator() % 200000) : 0)});
}

// Lands a copy now and then, in any order.
inline void land_some() {
  static std::mt19937 generator(2);
  if (copies.empty()) return;
  ++progress;  // time passes
  if (++landing_calls % (lands_early ? 1 : 16) != 0) return;
  const size_t chosen = generator() % copies.size();
  if (copies[chosen].due > landing_calls) return;
  const BulkCopy copy = std::move(copies[chosen]);
  copies.erase(copies.begin() + static_cast<std::ptrdiff_t>(chosen));
  copy.land();
}

// Publishes a slot and returns when every thread of the scope has published one for the same operation.
inline int meet(const Slot& slot, Scope scope = kWarp) {
  const int warp_begin = current / 32 * 32, begin = scope == kWarp ? warp_begin : scope == kBlock ? 0 : 128;
  const int all = static_cast<int>(fibers.size());
  const int end = scope == kWarp ? warp_begin + 32 : scope == kFirstConsumer ? 256 : all;
  Fiber& fiber = fibers[current];
  const int count = ++fiber.counts[scope], parity = count % 2;
  fiber.slots[scope][parity] = slot;
  ++progress;
  int first = begin;  // that has not come
  wait_until([&] {
    while (first < end && fibers[first].counts[scope] >= count) ++first;
    return first == end;
  });
  for (int i = begin; i < end; ++i) {
    if (fibers[i].slots[scope][parity].operation != slot.operation) fail("threads at different operations");
  }
  return parity;
}

inline const Slot& lane_slot(int lane, int parity) { return fibers[current / 32 * 32 + lane].slots[kWarp][parity]; }

// Eight 16-byte accesses are served at once if they fall on eight different groups of four banks.
inline void count_conflicts(const bf16* const (&rows)[8]) {
  int hits[8] = {};
  for (const bf16* row : rows) ++hits[reinterpret_cast<uintptr_t>(row) / 16 % 8];
  for (int group = 0; group < 8; ++group) bank_conflicts += std::max(hits[group] - 1, 0);
}

inline void run_block(int threads, const std::function<void()>& work) {
  body = work;
  blockDim.x = threads;
  fibers.resize(threads);
  for (Fiber& fiber : fibers) {
    fiber.started = fiber.done = false;
    for (int scope = 0; scope < kScopes; ++scope) {
      fiber.counts[scope] = 0;
      fiber.slots[scope][0] = fiber.slots[scope][1] = {};
    }
    fiber.open_copies.clear(), fiber.groups.clear(), fiber.loads.clear();
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, enter, 0);
  }
  static std::mt19937 generator(1);
  int left = threads;
  const auto resume = [&](int first, int end) {
    for (current = first; current < end; ++current) {
      if (fibers[current].done) continue;
      threadIdx.x = current;
      switch_to(fibers[current]);
      left -= fibers[current].done, progress += fibers[current].done;
    }
  };
  while (left > 0) {
    for (int i = 0; at_random && i < 64; ++i) {
      const int first = static_cast<int>(generator() % (threads / 32)) * 32;
      for (int turns = generator() % 16; turns > 0; --turns) resume(first, first + 32);
    }
    const long before = progress;
    resume(0, threads);
    if (left > 0 && progress == before) fail("all threads wait");
  }
}

inline void load(uint32_t (&r)[4], const bf16* row, bool transposed) {
  Slot slot;
  slot.operation = transposed ? 3 : 2;
  slot.row = row;
  const int parity = meet(slot), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const bf16* rows[8];
    for (int j = 0; j < 8; ++j) rows[j] = lane_slot(8 * i + j, parity).row;
    if (lane == 0) count_conflicts(rows);
    const bf16 low = transposed ? rows[2 * t][g] : rows[g][2 * t];
    const bf16 high = transposed ? rows[2 * t + 1][g] : rows[g][2 * t + 1];
    r[i] = low.bits | static_cast<uint32_t>(high.bits) << 16;
  }
}

inline float half_of(uint32_t pair, int index) { return to_float(static_cast<uint16_t>(pair >> 16 * index)); }

// Element (row, k) of the warp's 16 x 16 A operand, element (k, n) of its 16 x 8 B operand.
inline float a_element(int row, int k, int parity) {
  return half_of(lane_slot(row % 8 * 4 + k % 8 / 2, parity).a[row / 8 + k / 8 * 2], k % 2);
}
inline float b_element(int k, int n, int parity) {
  return half_of(lane_slot(n * 4 + k % 8 / 2, parity).b[k / 8], k % 2);
}

}  // namespace emulation

inline void mma(float (&acc)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulation::Slot slot;
  slot.operation = 1;
  std::copy(a, a + 4, slot.a);
  slot.b[0] = b0, slot.b[1] = b1;
  const int parity = emulation::meet(slot), lane = threadIdx.x % 32;
  float rows[2][16], columns[2][16];
  for (int i = 0; i < 2; ++i) {
    for (int k = 0; k < 16; ++k) {
      rows[i][k] = emulation::a_element(lane / 4 + 8 * i, k, parity);
      columns[i][k] = emulation::b_element(k, lane % 4 * 2 + i, parity);
    }
  }
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < 16; ++k) acc[i] += rows[i / 2][k] * columns[i % 2][k];
  }
}

inline void load_matrices(uint32_t (&r)[4], const bf16* row) { emulation::load(r, row, false); }
inline void load_matrices_transposed(uint32_t (&r)[4], const bf16* row) { emulation::load(r, row, true); }

inline float __shfl_xor_sync(uint32_t, float value, int mask) {
  emulation::Slot slot;
  slot.operation = 4;
  slot.value = value;
  const int parity = emulation::meet(slot);
  return emulation::lane_slot(threadIdx.x % 32 ^ mask, parity).value;
}

inline bool __any_sync(uint32_t, bool value) {
  emulation::Slot slot;
  slot.operation = 6;
  slot.value = value;
  const int parity = emulation::meet(slot);
  bool any = false;
  for (int lane = 0; lane < 32; ++lane) any |= emulation::lane_slot(lane, parity).value != 0.0f;
  if (threadIdx.x % 32 == 0) ++emulation::votes, emulation::yes_votes += any;
  return any;
}

inline uint32_t __ballot_sync(uint32_t, bool value) {
  emulation::Slot slot;
  slot.operation = 7;
  slot.value = value;
  const int parity = emulation::meet(slot);
  uint32_t votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= (emulation::lane_slot(lane, parity).value != 0.0f ? 1u : 0u) << lane;
  return votes;
}

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }

inline void __syncthreads() {
  emulation::Slot slot;
  slot.operation = 5;
  emulation::meet(slot, emulation::kBlock);
}

namespace emulation {

inline bool any_of(Scope scope, bool value) {
  Slot slot;
  slot.operation = 8;
  slot.value = value;
  const int parity = meet(slot, scope);
  bool any = false;
  for (const Fiber& fiber : fibers) any |= fiber.slots[scope][parity].value != 0.0f;
  return any;
}

// stmatrix.x4
inline void store_matrices(bf16* row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  Slot slot;
  slot.operation = 11;
  slot.row = row;
  const int parity = meet(slot), lane = threadIdx.x % 32;
  const uint32_t registers[4] = {r0, r1, r2, r3};
  for (int i = 0; i < 4; ++i) {
    const bf16* rows[8];
    for (int j = 0; j < 8; ++j) rows[j] = lane_slot(8 * i + j, parity).row;
    if (lane == 0) count_conflicts(rows);
    std::memcpy(const_cast<bf16*>(rows[lane / 4]) + lane % 4 * 2, &registers[i], 4);
  }
}

}  // namespace emulation

inline bool __syncthreads_or(bool value) { return emulation::any_of(emulation::kBlock, value); }

inline void __syncwarp() {
  emulation::Slot slot;
  slot.operation = 9;
  emulation::meet(slot);
}

template <class Value>
Value __shfl_sync(uint32_t, Value value, int lane) {
  emulation::Slot slot;
  slot.operation = 10;
  std::memcpy(&slot.bits, &value, sizeof(Value));
  const int parity = emulation::meet(slot);
  std::memcpy(&value, &emulation::lane_slot(lane, parity).bits, sizeof(Value));
  return value;
}

namespace emulation {

inline void land(const Copy& copy) { copy.valid ? std::memcpy(copy.to, copy.from, 16) : std::memset(copy.to, 0, 16); }

}  // namespace emulation

inline void copy_async(bf16* to, const bf16* from, bool valid) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulation::fail("unaligned copy");
  if (emulation::lands_early) return emulation::land({to, from, valid});
  emulation::fibers[emulation::current].open_copies.push_back({to, from, valid});
}

inline void commit_copies() {
  emulation::Fiber& fiber = emulation::fibers[emulation::current];
  fiber.groups.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
}

template <int kNewest>
inline void wait_for_copies_but() {
  auto& groups = emulation::fibers[emulation::current].groups;
  while (groups.size() > kNewest) {
    for (const auto& copy : groups.front()) emulation::land(copy);
    groups.erase(groups.begin());
  }
}
