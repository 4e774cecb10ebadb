// A model of warps, TMA copies and mbarriers that runs on the CPU in random interleavings: agents are lists of
// operations, mbarriers count arrivals and phases, and every buffer knows what it holds and who uses it. A run fails if
// agents wait for ever, if a buffer is written while it is in use, or if one reads something else than it expects.
// `mutant` names operations to leave out, which shows that a test would notice.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace model {

struct State {  // PipelineState<2>
  int stage = 0;
  uint32_t phase = 0;
  void advance() {
    stage ^= 1;
    phase ^= stage == 0;
  }
  State previous() const { return {stage ^ 1, phase ^ static_cast<uint32_t>(stage ^ 1)}; }
};

struct Barrier {
  int count = 0, pending = 0, copies = 0;  // arrivals of a phase, missing ones; TMA copies in flight
  uint32_t phase = 0;
  void init(int arrivals) { count = pending = arrivals; }
  void complete() {
    if (pending > 0 || copies > 0) return;
    pending = count;
    phase ^= 1;
  }
};

struct Buffer {
  int readers = 0, writers = 0;
  int64_t content = -1;
  bool needs_fence = false;  // written by the generic proxy, not yet ordered before the async one
};

struct Failure {
  std::string what;
};

struct Agent;
using Op = std::function<bool(Agent&)>;  // false: it has to wait

struct Agent {
  std::deque<Op> ops;
  int stores = 0;  // TMA stores that have not read their buffer
  int slowness = 1;
};

class Machine {
 public:
  Machine(std::string mutant, unsigned seed) : mutant_(std::move(mutant)), random_(seed) {}

  // An empty string, or what went wrong.
  std::string run() {
    try {
      while (!agents_.empty()) advance();
      check_results();
    } catch (const Failure& failure) {
      return failure.what;
    }
    return "";
  }

  virtual ~Machine() = default;

 protected:
  virtual void check_results() const {}

  static void require(bool condition, const char* what) {
    if (!condition) throw Failure{what};
  }
  bool leaves_out(const char* name) const { return !mutant_.empty() && mutant_ == name; }

  void advance() {
    Agent& agent = *agents_[random_() % agents_.size()];
    if (random_() % agent.slowness == 0 && step(agent)) return idle_ = 0, remove_done();
    if (++idle_ < 2000) return;
    idle_ = 0;
    for (auto& other : agents_) {
      if (step(*other)) return remove_done();
    }
    throw Failure{"deadlock"};
  }

  bool step(Agent& agent) {
    if (agent.ops.empty()) return false;
    const Op op = agent.ops.front();
    agent.ops.pop_front();
    std::deque<Op> rest;
    rest.swap(agent.ops);
    const bool done = op(agent);  // may append what follows it
    if (agent.ops.empty()) {
      agent.ops.swap(rest);
    } else {
      agent.ops.insert(agent.ops.end(), rest.begin(), rest.end());
    }
    if (!done) agent.ops.push_front(op);
    return done;
  }

  void remove_done() {
    for (size_t i = 0; i < agents_.size();) {
      if (agents_[i]->ops.empty()) {
        agents_[i] = agents_.back();
        agents_.pop_back();
      } else {
        ++i;
      }
    }
  }

  Agent& add_agent() {
    all_.push_back(std::make_shared<Agent>());
    agents_.push_back(all_.back());
    agents_.back()->slowness = random_() % 4 == 0 ? 1 + random_() % 60 : 1;
    return *agents_.back();
  }

  // What agents do. Each appends to `a`.
  void wait(Agent& a, const Barrier& barrier, uint32_t parity, const char* name = "") {
    if (leaves_out(name)) return;
    a.ops.push_back([&barrier, parity](Agent&) { return barrier.phase != parity; });
  }
  void arrive(Agent& a, Barrier& barrier, int arrivals = 32, const char* name = "") {
    if (leaves_out(name)) return;
    a.ops.push_back([&barrier, arrivals](Agent&) {
      barrier.pending -= arrivals;
      require(barrier.pending >= 0, "too many arrivals");
      barrier.complete();
      return true;
    });
  }
  void begin_read(Agent& a, Buffer& buffer, int64_t content, bool by_async_proxy = true) {
    a.ops.push_back([&buffer, content, by_async_proxy](Agent&) {
      require(buffer.writers == 0, "read while written");
      require(buffer.content == content, "read of another step");
      require(!by_async_proxy || !buffer.needs_fence, "read without a proxy fence");
      return ++buffer.readers > 0;
    });
  }
  void end_read(Agent& a, Buffer& buffer) {
    a.ops.push_back([&buffer](Agent&) { return --buffer.readers >= 0; });
  }
  void read(Agent& a, Buffer& buffer, int64_t content) {
    begin_read(a, buffer, content, false);
    end_read(a, buffer);
  }
  void write(Agent& a, Buffer& buffer, int64_t content, bool by_async_proxy = false) {
    a.ops.push_back([&buffer](Agent&) {
      require(buffer.readers == 0 && buffer.writers == 0, "written while in use");
      return ++buffer.writers > 0;
    });
    a.ops.push_back([&buffer, content, by_async_proxy](Agent&) {
      buffer.content = content;
      buffer.needs_fence = !by_async_proxy;
      return --buffer.writers == 0;
    });
  }
  void fence(Agent& a, Buffer& buffer) {
    a.ops.push_back([&buffer](Agent&) { return buffer.needs_fence = false, true; });
  }

  // arrive_and_expect() and the copy, which an agent of its own performs.
  void load(Agent& a, Barrier& full, std::vector<Buffer*> buffers, int64_t content) {
    a.ops.push_back([this, &full, buffers, content](Agent&) {
      ++full.copies;
      --full.pending;
      Agent& copy = add_agent();
      for (Buffer* buffer : buffers) write(copy, *buffer, content, true);
      copy.ops.push_back([&full](Agent&) {
        --full.copies;
        full.complete();
        return true;
      });
      return true;
    });
  }
  void store(Agent& a, Buffer& buffer, int64_t content) {
    a.ops.push_back([this, &buffer, content](Agent& warp) {
      ++warp.stores;
      Agent& copy = add_agent();
      begin_read(copy, buffer, content);
      end_read(copy, buffer);
      copy.ops.push_back([&warp](Agent&) { return --warp.stores >= 0; });
      return true;
    });
  }
  void wait_for_tma_stores(Agent& a) {
    a.ops.push_back([](Agent& warp) { return warp.stores == 0; });
  }

 private:
  const std::string mutant_;
  std::mt19937 random_;
  std::vector<std::shared_ptr<Agent>> all_, agents_;  // agents_: those that are not done
  int idle_ = 0;
};

}  // namespace model
