// The barriers of the backward whose consumers split a step by role (kernels/sm90/bwd_role_mainloop.h), in random
// interleavings (barrier_model.h): arrivals and phases are those of kernels/sm90/bwd_storage.h. The model is written
// from the kernel by hand: whoever changes one changes both. Mutants leave out one wait, fence or arrival each, and
// must fail.
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "barrier_model.h"
#include "check.h"
#include "core/bwd_schedule.h"

namespace {

using flash::QBlockOrder;
using flash::QStep;
using flash::Visibility;
using model::Agent;
using model::Barrier;
using model::Buffer;
using model::State;

constexpr int kBlock = 64;  // rows of an m_block and keys of an n_block

struct Problem {
  const char* name;
  int seqlen_q, seqlen_k, heads_k, group, left, right;
  bool deterministic;
  int ctas;

  Visibility mask() const { return {seqlen_q, seqlen_k, {left, right}}; }
  int n_blocks() const { return (seqlen_k + kBlock - 1) / kBlock; }
  int tiles() const { return heads_k * n_blocks(); }
  QBlockOrder order(int tile) const {
    const int head = tile / n_blocks();
    return {flash::row_range(mask(), tile % n_blocks(), kBlock, kBlock), head * group, group};
  }
};

struct Cta {
  Barrier k_full, v_full, kv_empty, q_full[2], q_empty[2], do_full[2], do_empty[2], p_full, p_empty, ds_stored[2],
      ds_full[2], ds_empty[2], dq_added[2], dq_released[2], work_full[2], work_empty[2];
  Buffer k[4], v[4], q[2], dout[2], lse[2], delta[2], p[4], ds[2][4];  // [4]: what a warp writes
  int work[2] = {-1, -1};
  int at_consumer_barrier[2] = {0, 0};  // arrivals of the named barrier in even and odd uses

  Cta() {
    for (Barrier* barrier : {&k_full, &v_full}) barrier->init(1);
    kv_empty.init(256);
    for (Barrier* barrier : {&p_full, &p_empty}) barrier->init(128);
    for (int i = 0; i < 2; ++i) {
      for (Barrier* barrier : {&q_full[i], &do_full[i]}) barrier->init(1 + 32);
      for (Barrier* barrier : {&q_empty[i], &do_empty[i], &ds_empty[i]}) barrier->init(256);
      ds_stored[i].init(128);
      for (Barrier* barrier : {&ds_full[i], &dq_released[i], &work_full[i]}) barrier->init(1);
      dq_added[i].init(8);
      work_empty[i].init(256 + 3 * 32);
    }
  }
};

class Kernel : public model::Machine {
 public:
  Kernel(const Problem& problem, const std::string& mutant, unsigned seed)
      : Machine(mutant, seed), problem_(problem), ctas_(problem.ctas) {
    for (Cta& cta : ctas_) {
      load_warp(cta);
      statistics_warp(cta);
      semaphore_warp(cta);
      fence_warp(cta);
      for (int warp = 0; warp < 8; ++warp) consumer_warp(cta, warp / 4, warp % 4);
    }
  }

 private:
  void check_results() const override {
    for (int tile = 0; tile < problem_.tiles(); ++tile) {
      require(stored_.count(tile) && stored_.at(tile) == 8, "every warp stores its rows of each tile once");
      for (int i = 0; i < problem_.order(tile).count(); ++i) {
        const int index = dq_tile(tile, i);
        require(added_.at(index) == 8 * 2 * visits(index), "every warp adds both slices once");
      }
    }
  }

  template <class Visit>  // for_each_work_tile(): visit(agent, tile)
  void for_each_work_tile(Agent& a, Cta& cta, State work_state, const Visit& visit) {
    wait(a, cta.work_full[work_state.stage], work_state.phase, "work_full");
    a.ops.push_back([this, &cta, work_state, visit](Agent& warp) {
      const int tile = cta.work[work_state.stage];
      require(tile >= 0, "an index that is not there yet");
      State next = work_state;
      next.advance();
      arrive(warp, cta.work_empty[work_state.stage]);
      if (tile >= problem_.tiles()) return true;
      visit(warp, tile);
      for_each_work_tile(warp, cta, next, visit);
      return true;
    });
  }

  void load_warp(Cta& cta) {
    const auto state = std::make_shared<State>();
    const auto kv_phase = std::make_shared<uint32_t>(0);
    fetch(add_agent(), cta, State{}, state, kv_phase);
  }

  void fetch(Agent& a, Cta& cta, State work_state, std::shared_ptr<State> state, std::shared_ptr<uint32_t> kv_phase) {
    wait(a, cta.work_empty[work_state.stage], work_state.phase ^ 1);
    a.ops.push_back([=, &cta](Agent& warp) {
      const int tile = next_tile_++;
      cta.work[work_state.stage] = tile;
      arrive(warp, cta.work_full[work_state.stage], 1);
      if (tile >= problem_.tiles()) return true;
      const QBlockOrder order = problem_.order(tile);
      if (order.count() == 0) {
        wait(warp, cta.kv_empty, *kv_phase ^ 1, "kv_empty of no rows");
        arrive(warp, cta.k_full, 1);
        arrive(warp, cta.v_full, 1);
      }
      for (int i = 0; i < order.count(); ++i) {
        wait(warp, cta.q_empty[state->stage], state->phase ^ 1, "q_empty");
        load(warp, cta.q_full[state->stage], {&cta.q[state->stage]}, content(tile, i));
        wait(warp, cta.do_empty[state->stage], state->phase ^ 1, "do_empty");
        load(warp, cta.do_full[state->stage], {&cta.dout[state->stage]}, content(tile, i));
        if (i == 0) {
          wait(warp, cta.kv_empty, *kv_phase ^ 1, "kv_empty");
          load(warp, cta.k_full, {&cta.k[0], &cta.k[1], &cta.k[2], &cta.k[3]}, tile);
          load(warp, cta.v_full, {&cta.v[0], &cta.v[1], &cta.v[2], &cta.v[3]}, tile);
        }
        state->advance();
      }
      *kv_phase ^= 1;
      State next = work_state;
      next.advance();
      fetch(warp, cta, next, state, kv_phase);
      return true;
    });
  }

  template <class Step>  // step(agent, tile, i, state)
  void for_each_step(Cta& cta, const Step& step) {
    const auto state = std::make_shared<State>();
    for_each_work_tile(add_agent(), cta, State{}, [this, state, step](Agent& warp, int tile) {
      const int count = problem_.order(tile).count();
      for (int i = 0; i < count; ++i) {
        step(warp, tile, i, *state);
        state->advance();
      }
    });
  }

  void statistics_warp(Cta& cta) {
    for_each_step(cta, [this, &cta](Agent& a, int tile, int i, State state) {
      const int stage = state.stage;
      wait(a, cta.q_empty[stage], state.phase ^ 1, "q_empty of LSE");
      write(a, cta.lse[stage], content(tile, i));
      arrive(a, cta.q_full[stage]);
      wait(a, cta.do_empty[stage], state.phase ^ 1);
      write(a, cta.delta[stage], content(tile, i));
      arrive(a, cta.do_full[stage]);
    });
  }

  void semaphore_warp(Cta& cta) {
    for_each_step(cta, [this, &cta](Agent& a, int tile, int i, State state) {
      if (!problem_.deterministic) return;
      wait(a, cta.dq_added[state.stage], state.phase, "dq_added");
      a.ops.push_back([this, tile, i](Agent&) { return ++semaphore_[dq_tile(tile, i)] > 0; });
      arrive(a, cta.dq_released[state.stage], 1);
    });
  }

  void fence_warp(Cta& cta) {
    for_each_step(cta, [this, &cta](Agent& a, int, int, State state) {
      wait(a, cta.ds_stored[state.stage], state.phase, "ds_stored");
      for (Buffer& part : cta.ds[state.stage]) {
        if (!leaves_out("fence")) fence(a, part);
      }
      arrive(a, cta.ds_full[state.stage], 1);
    });
  }

  // A warp of a consumer: what BwdConsumer::compute() does with one tile.
  void consumer_warp(Cta& cta, int group, int warp) {
    const auto state = std::make_shared<State>();
    const auto tiles = std::make_shared<int>(0);
    for_each_work_tile(add_agent(), cta, State{}, [=, &cta](Agent& a, int tile) {
      const uint32_t kv_phase = *tiles % 2;
      const int count = problem_.order(tile).count(), use = (*tiles)++;
      wait(a, cta.k_full, kv_phase, "k_full");
      wait(a, cta.v_full, kv_phase, "v_full");
      if (count > 0) {
        start_scores(a, cta, group, tile, 0, *state);
        end_scores(a, cta, group, *state);
        for (int i = 0; i < count; ++i) {
          group == 0 ? publish_p(a, cta, warp, tile, i, *state) : publish_ds(a, cta, warp, tile, i, *state);
          multiply(a, cta, group, tile, i, count, *state);
          state->advance();
        }
        finish_dq(a, cta, tile, count, *state);
        wait_for_consumers(a, cta, use);
      } else {
        wait_for_tma_stores(a);
      }
      Buffer& staged = group == 0 ? cta.v[warp] : cta.k[warp];
      write(a, staged, -2 - tile);
      fence(a, staged);
      store(a, staged, -2 - tile);
      ++stored_[tile];
      if (!leaves_out("tma_store_wait")) wait_for_tma_stores(a);
      arrive(a, cta.kv_empty);
    });
  }

  // The named barrier of all consumers; uses alternate between two counts.
  void wait_for_consumers(Agent& a, Cta& cta, int use) {
    if (leaves_out("consumers")) return;
    a.ops.push_back([&cta, use](Agent&) { return ++cta.at_consumer_barrier[use % 2] > 0; });
    a.ops.push_back([&cta, use](Agent&) {
      int& arrived = cta.at_consumer_barrier[use % 2];
      if (arrived < 8) return false;
      if (++arrived == 16) arrived = 0;
      return true;
    });
  }

  void start_scores(Agent& a, Cta& cta, int group, int tile, int i, State state) {
    if (group == 0) {
      wait(a, cta.q_full[state.stage], state.phase, "q_full");
    } else {
      wait(a, cta.do_full[state.stage], state.phase, "do_full of dP");
    }
    for (Buffer& part : group == 0 ? cta.k : cta.v) begin_read(a, part, tile);
    begin_read(a, group == 0 ? cta.q[state.stage] : cta.dout[state.stage], content(tile, i));
  }
  void end_scores(Agent& a, Cta& cta, int group, State state) {
    for (Buffer& part : group == 0 ? cta.k : cta.v) end_read(a, part);
    end_read(a, group == 0 ? cta.q[state.stage] : cta.dout[state.stage]);
  }

  void publish_p(Agent& a, Cta& cta, int warp, int tile, int i, State state) {
    read(a, cta.lse[state.stage], content(tile, i));
    arrive(a, cta.q_empty[state.stage], 32, "q_empty of P");
    wait(a, cta.p_empty, state.stage ^ 1, "p_empty");
    write(a, cta.p[warp], content(tile, i));
    arrive(a, cta.p_full);
    wait(a, cta.do_full[state.stage], state.phase, "do_full");
  }

  void publish_ds(Agent& a, Cta& cta, int warp, int tile, int i, State state) {
    read(a, cta.delta[state.stage], content(tile, i));
    arrive(a, cta.do_empty[state.stage]);
    wait(a, cta.p_full, state.stage, "p_full");
    read(a, cta.p[warp], content(tile, i));
    arrive(a, cta.p_empty);
    wait(a, cta.ds_empty[state.stage], state.phase ^ 1, "ds_empty");
    write(a, cta.ds[state.stage][warp], content(tile, i));
    arrive(a, cta.ds_stored[state.stage]);
    wait(a, cta.q_full[state.stage], state.phase);
  }

  void multiply(Agent& a, Cta& cta, int group, int tile, int i, int count, State state) {
    Buffer& rows = group == 0 ? cta.dout[state.stage] : cta.q[state.stage];
    const State previous = state.previous();
    if (i > 0) start_dq(a, cta, tile, i - 1, previous);
    begin_read(a, rows, content(tile, i));
    if (i > 0) {
      add(a, tile, i - 1);
      end_dq(a, cta, previous);
    }
    end_read(a, rows);
    if (i > 0) arrive(a, cta.ds_empty[previous.stage]);
    arrive(a, group == 0 ? cta.do_empty[state.stage] : cta.q_empty[state.stage]);
    State next = state;
    next.advance();
    if (i + 1 < count) start_scores(a, cta, group, tile, i + 1, next);
    if (i > 0) {
      add(a, tile, i - 1);
      added(a, cta, previous);
    }
    if (i + 1 < count) end_scores(a, cta, group, next);
  }

  void finish_dq(Agent& a, Cta& cta, int tile, int count, State state) {
    const State last = state.previous();
    start_dq(a, cta, tile, count - 1, last);
    add(a, tile, count - 1);
    end_dq(a, cta, last);
    arrive(a, cta.ds_empty[last.stage]);
    add(a, tile, count - 1);
    added(a, cta, last);
  }

  void start_dq(Agent& a, Cta& cta, int tile, int i, State state) {
    wait(a, cta.ds_full[state.stage], state.phase, "ds_full");
    for (Buffer& part : cta.ds[state.stage]) begin_read(a, part, content(tile, i));
    for (Buffer& part : cta.k) begin_read(a, part, tile);
  }
  void end_dq(Agent& a, Cta& cta, State state) {
    for (Buffer& part : cta.ds[state.stage]) end_read(a, part);
    for (Buffer& part : cta.k) end_read(a, part);
  }

  // Additions of a slice: deterministic only in this n_block's turn.
  void add(Agent& a, int tile, int i) {
    const int index = dq_tile(tile, i), n_block = tile % problem_.n_blocks();
    const int turn = flash::dq_semaphore_value(problem_.mask(), step_at(tile, i).m_block, n_block, kBlock, kBlock);
    a.ops.push_back([this, index, turn](Agent&) { return !problem_.deterministic || semaphore_[index] >= turn; });
    a.ops.push_back([this, index, turn](Agent&) {
      require(!problem_.deterministic || semaphore_[index] == turn, "added in another's turn");
      return ++added_[index] > 0;
    });
  }
  void added(Agent& a, Cta& cta, State state) {
    if (!problem_.deterministic) return;
    wait(a, cta.dq_released[state.stage], state.phase ^ 1, "dq_released");
    arrive(a, cta.dq_added[state.stage], 1);
  }

  QStep step_at(int tile, int i) const {
    const QBlockOrder order = problem_.order(tile);
    QStep at = order.start();
    while (i-- > 0) order.advance(at);
    return at;
  }
  int dq_tile(int tile, int i) const { return step_at(tile, i).head * 1000 + step_at(tile, i).m_block; }
  int visits(int index) const {
    int count = 0;
    for (int tile = 0; tile < problem_.tiles(); ++tile) {
      for (int i = 0; i < problem_.order(tile).count(); ++i) count += dq_tile(tile, i) == index;
    }
    return count;
  }
  static int64_t content(int tile, int i) { return int64_t{1000} * tile + i; }

  const Problem problem_;
  std::vector<Cta> ctas_;
  std::map<int, int> semaphore_, added_, stored_;
  int next_tile_ = 0;
};

constexpr int kAll = flash::kUnbounded;
const Problem kProblems[] = {
    {"full", 320, 256, 2, 1, kAll, kAll, false, 2},
    {"full, deterministic", 320, 256, 2, 1, kAll, kAll, true, 3},
    {"causal", 448, 448, 1, 1, kAll, 0, false, 2},
    {"causal, deterministic", 448, 448, 2, 1, kAll, 0, true, 3},
    {"one step a tile", 64, 448, 2, 1, kAll, kAll, true, 2},
    {"groups of three", 128, 192, 2, 3, kAll, 0, true, 2},
    {"window, deterministic", 384, 384, 1, 2, 70, 10, true, 3},
    {"keys that no row sees", 64, 640, 1, 2, 10, 0, true, 2},
    {"keys that no row sees, more rows", 200, 900, 2, 1, 0, 100, false, 1},
};
// Three waits are not among them: q_full before dK, which p_full implies; do_empty before softmax_d is written, which
// q_empty implies; work_empty, without which only a warp that is slower than two n_blocks of all others would go wrong.
const char* const kMutants[] = {"k_full",    "v_full",        "kv_empty", "kv_empty of no rows", "q_full",
                                "do_full",   "do_full of dP", "q_empty",  "q_empty of LSE",      "q_empty of P",
                                "do_empty",  "p_full",        "p_empty",  "ds_stored",           "ds_full",
                                "ds_empty",  "fence",         "dq_added", "dq_released",         "work_full",
                                "consumers", "tma_store_wait"};

}  // namespace

int main() {
  for (const Problem& problem : kProblems) {
    int steps = 0;
    for (int tile = 0; tile < problem.tiles(); ++tile) steps += problem.order(tile).count();
    check::that(steps > 0, "has steps", problem.name);
    for (unsigned seed = 0; seed < 6; ++seed) {
      const std::string failure = Kernel(problem, "", seed).run();
      check::that(failure.empty(), "protocol", problem.name, seed, failure);
    }
  }
  for (const char* mutant : kMutants) {
    std::string failure;
    for (unsigned seed = 0; seed < 20 && failure.empty(); ++seed) {
      for (int i : {3, 1, 8, 7}) {
        if (failure.empty()) failure = Kernel(kProblems[i], mutant, seed).run();
      }
    }
    check::that(!failure.empty(), "a mutant is noticed", mutant);
  }
  return check::report();
}
