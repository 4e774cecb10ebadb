#include "emulation.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <vector>

emulation::Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace flash {
alignas(128) char smem[232448];
}

// Saves the callee-saved registers on the stack of one fiber and continues another.
extern "C" void switch_fiber(void** save, void* load);
asm(R"(
.text
.globl switch_fiber
switch_fiber:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

namespace emulation {
namespace {

struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool valid;

  void land() const { valid ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes); }
};

struct Fiber {
  void* stack_pointer = nullptr;
  std::unique_ptr<char[]> stack;
  bool done = false;
  int warp_operations = 0;
  alignas(16) char slots[2][64];
  std::vector<Copy> open_copies;
  std::vector<std::vector<Copy>> groups;
};

struct Meeting {
  int operation = 0;
  int arrived = 0;
  std::vector<int> waiting;
};

std::mt19937 generator(1);
std::vector<Fiber> fibers;
std::vector<int> runnable;
int current = -1, alive = 0;
void* scheduler_stack = nullptr;
void (*kernel_call)(const void*) = nullptr;
const void* kernel_arguments = nullptr;
std::map<int, Meeting> barriers;
std::vector<Meeting> warps;
int or_value[2] = {0, 0}, or_turn = 0;
constexpr size_t kStackBytes = 256 * 1024;

void yield() { switch_fiber(&fibers[current].stack_pointer, scheduler_stack); }

void meet(Meeting& meeting, int operation, int threads) {
  if (meeting.arrived == 0) meeting.operation = operation;
  if (meeting.operation != operation) fail("threads meet at different operations");
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    runnable.insert(runnable.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
    runnable.push_back(current);
  } else {
    meeting.waiting.push_back(current);
  }
  yield();
}

void fiber_main() {
  kernel_call(kernel_arguments);
  Fiber& fiber = fibers[current];
  fiber.done = true;
  --alive;
  // Threads that have left count as arrived at __syncthreads().
  Meeting& all = barriers[0];
  if (alive > 0 && all.arrived == alive) {
    all.arrived = 0;
    runnable.insert(runnable.end(), all.waiting.begin(), all.waiting.end());
    all.waiting.clear();
  }
  yield();
}

void start_fiber(Fiber& fiber) {
  if (!fiber.stack) fiber.stack = std::make_unique<char[]>(kStackBytes);
  fiber.done = false;
  fiber.open_copies.clear();
  fiber.groups.clear();
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack.get()) + kStackBytes) / 16 * 16);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void run_block(int threads) {
  if (static_cast<int>(fibers.size()) < threads) fibers = std::vector<Fiber>(threads);
  runnable.clear();
  barriers.clear();
  warps.assign(threads / 32, Meeting{});
  alive = threads;
  for (int i = 0; i < threads; ++i) {
    start_fiber(fibers[i]);
    runnable.push_back(i);
  }
  while (alive > 0) {
    if (runnable.empty()) fail("deadlock");
    const int pick = random_below(static_cast<int>(runnable.size()));
    current = runnable[pick];
    runnable[pick] = runnable.back();
    runnable.pop_back();
    threadIdx.x = static_cast<unsigned>(current);
    switch_fiber(&scheduler_stack, fibers[current].stack_pointer);
  }
}

}  // namespace

void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s (block %u, thread %d)\n", what, blockIdx.x, current);
  std::abort();
}

int random_below(int bound) { return static_cast<int>(generator() % static_cast<unsigned>(bound)); }

void meet_block(int operation, int barrier, int threads) {
  meet(barriers[barrier], operation, barrier == 0 ? alive : threads);
}

int meet_warp(int operation, const void* value, int bytes) {
  Fiber& fiber = fibers[current];
  if (bytes > static_cast<int>(sizeof fiber.slots[0])) fail("value too large");
  const int parity = fiber.warp_operations++ % 2;
  std::memcpy(fiber.slots[parity], value, static_cast<size_t>(bytes));
  meet(warps[current / 32], operation, 32);
  return parity;
}

const void* lane_value(int lane, int parity) { return fibers[current / 32 * 32 + lane].slots[parity]; }

int block_or(int value) {
  if (value) or_value[0] = 1;
  meet_block(kVote, 0, 0);
  const int result = or_value[0];
  meet_block(kVote, 0, 0);
  or_value[0] = 0;
  meet_block(kVote, 0, 0);
  return result;
}

void copy_async(void* to, const void* from, int bytes, bool valid) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || (valid && reinterpret_cast<uintptr_t>(from) % bytes)) {
    fail("unaligned copy");
  }
  const Copy copy{to, from, bytes, valid};
  if (random_below(2)) {
    copy.land();
  } else {
    std::memset(to, 0x7f, static_cast<size_t>(bytes));
    fibers[current].open_copies.push_back(copy);
  }
}

void commit_copies() {
  Fiber& fiber = fibers[current];
  fiber.groups.push_back(std::move(fiber.open_copies));
  fiber.open_copies.clear();
}

void wait_for_copies(int newest) {
  auto& groups = fibers[current].groups;
  while (static_cast<int>(groups.size()) > newest) {
    for (const Copy& copy : groups.front()) copy.land();
    groups.erase(groups.begin());
  }
}

char* shared_memory() { return flash::smem; }

void run_grid(int64_t blocks, int threads, int smem_bytes, void (*call)(const void*), const void* arguments) {
  if (smem_bytes > static_cast<int>(sizeof flash::smem)) fail("too much shared memory");
  kernel_call = call;
  kernel_arguments = arguments;
  blockDim.x = static_cast<unsigned>(threads);
  gridDim.x = static_cast<unsigned>(blocks);
  std::vector<int64_t> order(static_cast<size_t>(blocks));
  for (int64_t i = 0; i < blocks; ++i) order[static_cast<size_t>(i)] = i;
  std::shuffle(order.begin(), order.end(), generator);
  for (const int64_t block : order) {
    std::memset(flash::smem, 0xff, sizeof flash::smem);
    blockIdx.x = static_cast<unsigned>(block);
    run_block(threads);
  }
}

}  // namespace emulation
