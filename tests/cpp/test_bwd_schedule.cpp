// The backward's schedule: every work tile once, pointer increments, and a simulation of the deterministic mode with
// few resident thread blocks, which must not deadlock and must reduce into every dQ tile in ascending order of
// n_blocks.
#include <algorithm>
#include <map>
#include <random>
#include <tuple>
#include <vector>

#include "check.h"
#include "core/bwd_schedule.h"
#include "plan/bwd_policy_sm90.h"

namespace {

using flash::kUnbounded;
using flash::QBlockOrder;
using flash::QStep;
using flash::Visibility;
using flash::Window;

void check_interleaving() {
  for (int heads = 1; heads <= 9; ++heads) {
    for (int blocks = 1; blocks <= 7; ++blocks) {
      for (int width = 1; width <= heads; ++width) {
        std::vector<int> next(heads, 0);
        for (int index = 0; index < heads * blocks; ++index) {
          const flash::HeadBlock at = flash::HeadOrder(heads, blocks, width).at(index);
          const bool exists = at.head >= 0 && at.head < heads && at.block >= 0 && at.block < blocks;
          check::that(exists, "head and block exist", index, heads, blocks, width);
          if (!exists) continue;
          check::that(at.block == next[at.head]++, "blocks of a head ascend", index, at.head, at.block, width);
          check::that(at.head / width == index / (width * blocks), "bands follow each other", index, at.head, width);
        }
        for (int head = 0; head < heads; ++head) check::that(next[head] == blocks, "all blocks", head, heads, blocks);
      }
    }
  }
  const flash::HeadBlock last = flash::HeadOrder(0x7fffffff, 1, 0x7fffffff).at(0x7ffffffe);
  check::that(last.head == 0x7ffffffe && last.block == 0, "the largest grid", last.head, last.block);
}

void check_width() {
  for (int64_t resident : {0, 1, 15, 16, 132, 264, 396, 5000}) {
    for (int64_t heads : {int64_t{0}, int64_t{1}, int64_t{8}, int64_t{512}, int64_t{0x7fffffff}}) {
      for (int64_t blocks : {int64_t{0}, int64_t{1}, int64_t{8}, int64_t{16}, int64_t{1} << 25}) {
        const int64_t width = flash::plan::interleave_width(resident, heads, blocks);
        const int64_t running = std::clamp<int64_t>(blocks, 1, flash::plan::kRunningNBlocks);
        check::that(width >= 1 && width <= std::max<int64_t>(heads, 1), "width", resident, heads, blocks, width);
        check::that(width == 1 || width * running <= resident, "enough blocks of a head run", resident, heads, blocks);
        check::that(width >= heads || (width + 1) * running > resident, "the GPU is filled", resident, heads, blocks);
      }
    }
  }
}

// What was measured on an H200 (docs/tuning/bwd_sm90.md), and the limits of the kernel.
void check_shared_dq() {
  using flash::plan::BwdProblem;
  using flash::plan::Device;
  BwdProblem shape;
  shape.batch = shape.heads = shape.heads_k = 32;
  shape.seqlen_q = shape.seqlen_k = 512;
  shape.head_dim = shape.head_dim_v = 64;
  Device device;
  device.multiprocessors = 132;
  const auto prefers_dq_in_smem = [&device](const BwdProblem& problem) {
    return flash::plan::prefers_dq_in_smem(problem, device);
  };
  auto changed = [&](auto change) {
    BwdProblem other = shape;
    change(other);
    return prefers_dq_in_smem(other);
  };
  check::that(prefers_dq_in_smem(shape), "short sequences");
  check::that(changed([](BwdProblem& s) { s.seqlen_k = 5000; }), "as many keys as there are");
  check::that(changed([](BwdProblem& s) { s.batch = 4, s.heads = s.heads_k = 33; }), "one head each");
  check::that(!changed([](BwdProblem& s) { s.seqlen_q = 513; }), "rows");
  check::that(!changed([](BwdProblem& s) { s.seqlen_q = 0; }), "no rows");
  check::that(!changed([](BwdProblem& s) { s.seqlen_k = 0; }), "no keys");
  check::that(!changed([](BwdProblem& s) { s.heads_k = 8; }), "groups");
  check::that(!changed([](BwdProblem& s) { s.head_dim = 65; }), "head dim");
  check::that(!changed([](BwdProblem& s) { s.is_varlen = true; }), "packed");
  check::that(!changed([](BwdProblem& s) { s.has_dropout = true; }), "modifiers");
  check::that(!changed([](BwdProblem& s) { s.batch = 1; }), "idle multiprocessors");
  check::that(!changed([](BwdProblem& s) { s.batch = 1, s.heads = s.heads_k = 133; }), "a second round for one head");
}

void check_running() {
  using flash::plan::running_n_blocks;
  check::that(running_n_blocks(false, false, 8, 1, 128) == 128, "no order");
  check::that(running_n_blocks(false, true, 256, 1, 64) == 16, "no order, wide heads");
  check::that(running_n_blocks(true, false, 8, 1, 128) == 8, "few m_blocks");
  check::that(running_n_blocks(true, false, 128, 1, 128) == 16, "more m_blocks");
  check::that(running_n_blocks(true, false, 256, 1, 128) == 32, "many m_blocks");
  check::that(running_n_blocks(true, false, 1 << 20, 1, 128) == 32, "long sequences");
  check::that(running_n_blocks(true, false, 32, 4, 128) == 16, "few m_blocks of four heads");
  check::that(running_n_blocks(true, true, 16, 1, 128) == 3, "half of few rows");
  check::that(running_n_blocks(true, true, 32, 1, 128) == 4, "half of the rows");
  check::that(running_n_blocks(true, true, 48, 1, 128) == 6, "half of more rows");
  check::that(running_n_blocks(true, true, 256, 1, 128) == 8, "half of many rows");
  check::that(running_n_blocks(true, true, 512, 1, 128) == 16, "half of the rows of long sequences");
  check::that(running_n_blocks(true, true, 1 << 20, 1, 128) == 32, "half of the rows of longer ones");
  check::that(running_n_blocks(true, true, 8, 4, 128) == 4, "half of few rows of four heads");
  check::that(running_n_blocks(true, true, 128, 4, 128) == 16, "half of the rows of four heads");
}

void check_order() {
  const int64_t row_stride = 1 << 20, head_stride = 7;
  for (int begin = 0; begin <= 3; ++begin) {
    for (int end = begin; end <= 7; ++end) {
      for (int heads : {1, 2, 5}) {
        for (int block_m : {1, 64}) {
          const QBlockOrder order{{begin, end}, 3, heads};
          check::that(order.count() == (end - begin) * heads, "steps", begin, end, heads);
          QStep at = order.start();
          int64_t offset = at.m_block * block_m * row_stride + at.head * head_stride;
          for (int i = 0; i < order.count(); ++i) {
            const int m_block = end - 1 - i / heads, head = 3 + i % heads;
            check::that(at.m_block == m_block && at.head == head, "step", i, at.m_block, at.head);
            check::that(offset == m_block * block_m * row_stride + head * head_stride, "pointer", i, begin, end, heads);
            offset += order.offset(order.advance(at), row_stride, head_stride, block_m);
            const QStep before = order.before(at);
            check::that(before.m_block == m_block && before.head == head, "the step before", i, begin, end, heads);
          }
        }
      }
    }
  }
}

struct Sequence {
  int seqlen_q;
  int seqlen_k;
};

struct Shape {
  std::vector<Sequence> sequences;  // of one length each unless packed
  bool packed;
  int heads_k;
  int ratio;
  Window window;
  int block_m;
  int block_n;
};

struct BwdWorkTile {
  int sequence = 0;
  int head_k = 0;
  int n_block = 0;
  QBlockOrder order;
};

Visibility visibility_of(const Shape& shape, int sequence) {
  return {shape.sequences[sequence].seqlen_q, shape.sequences[sequence].seqlen_k, shape.window};
}

BwdWorkTile make_tile(const Shape& shape, int sequence, int head_k, int n_block) {
  const Visibility visibility = visibility_of(shape, sequence);
  const flash::RowRange rows = flash::row_range(visibility, n_block, shape.block_m, shape.block_n);
  return {sequence, head_k, n_block, {rows, head_k * shape.ratio, shape.ratio}};
}

// The work tiles in launch order, without empty ones.
std::vector<BwdWorkTile> launch_order(const Shape& shape, int resident) {
  const int batch = static_cast<int>(shape.sequences.size());
  std::vector<int> first_key{0};
  for (const Sequence& sequence : shape.sequences) first_key.push_back(first_key.back() + sequence.seqlen_k);
  const int rows = shape.packed ? first_key.back() : shape.sequences[0].seqlen_k;
  const flash::BwdGrid grid = flash::plan::bwd_grid(shape.packed, batch, shape.heads_k, rows, shape.block_n, resident);
  std::vector<BwdWorkTile> order;
  for (int index = 0; index < grid.blocks; ++index) {
    const flash::HeadBlock at = grid.order.at(index);
    int sequence = at.head / shape.heads_k, n_block = at.block;
    if (shape.packed) {
      sequence = -1;
      while (sequence + 1 < batch &&
             flash::varlen_first_slot(first_key[sequence + 1], sequence + 2, shape.block_n) <= at.block)
        ++sequence;
      if (sequence < 0) continue;
      n_block = at.block - flash::varlen_first_slot(first_key[sequence], sequence + 1, shape.block_n);
    }
    if (n_block * shape.block_n >= shape.sequences[sequence].seqlen_k) continue;
    order.push_back(make_tile(shape, sequence, at.head % shape.heads_k, n_block));
  }
  return order;
}

using DqTile = std::tuple<int, int, int>;  // sequence, query head, m_block

struct Running {
  BwdWorkTile tile;
  QStep at{};
  int step = 0;
  bool has_added = false;  // and has not yet released the dQ semaphore

  DqTile dq_tile() const { return {tile.sequence, at.head, at.m_block}; }
};

enum class Policy { kInTurn, kRandom, kNewestFirst };

// Thread blocks become resident in launch order. A step waits for the dQ semaphore, reduces, and releases it before the
// next step.
class Simulation {
 public:
  Simulation(const Shape& shape, int resident, Policy policy, unsigned seed)
      : shape_(shape), order_(launch_order(shape, resident)), resident_(resident), policy_(policy), random_(seed) {}

  // Whether all thread blocks have ended.
  bool run() {
    refill();
    while (!running_.empty()) {
      std::vector<size_t> candidates(running_.size());
      for (size_t i = 0; i < candidates.size(); ++i) candidates[i] = i;
      if (policy_ == Policy::kNewestFirst) std::reverse(candidates.begin(), candidates.end());
      if (policy_ == Policy::kRandom) std::shuffle(candidates.begin(), candidates.end(), random_);
      bool moved = false;
      for (size_t i : candidates) {
        if (!advance(running_[i])) continue;
        moved = true;
        if (policy_ != Policy::kInTurn) break;
      }
      if (!moved) return false;
      const auto ended = [](const Running& it) { return it.step == it.tile.order.count(); };
      running_.erase(std::remove_if(running_.begin(), running_.end(), ended), running_.end());
      refill();
    }
    return next_ == order_.size();
  }

  const std::map<DqTile, std::vector<int>>& additions() const { return additions_; }

 private:
  void refill() {
    for (; next_ < order_.size() && static_cast<int>(running_.size()) < resident_; ++next_) {
      if (order_[next_].order.count() > 0) running_.push_back({order_[next_], order_[next_].order.start()});
    }
  }

  bool advance(Running& it) {
    if (it.has_added) {
      ++semaphores_[it.dq_tile()];
      it.has_added = false;
      ++it.step;
      it.tile.order.advance(it.at);
      return true;
    }
    const int value = flash::dq_semaphore_value(visibility_of(shape_, it.tile.sequence), it.at.m_block, it.tile.n_block,
                                                shape_.block_m, shape_.block_n);
    if (semaphores_[it.dq_tile()] != value) return false;
    additions_[it.dq_tile()].push_back(it.tile.n_block);
    return it.has_added = true;
  }

  Shape shape_;
  std::vector<BwdWorkTile> order_;
  int resident_;
  Policy policy_;
  std::mt19937 random_;
  size_t next_ = 0;
  std::vector<Running> running_;
  std::map<DqTile, int> semaphores_;
  std::map<DqTile, std::vector<int>> additions_;
};

// Every dQ tile receives its visible n_blocks in ascending order, whatever the schedule was.
void check_additions(const Shape& shape, const std::map<DqTile, std::vector<int>>& additions) {
  size_t tiles = 0;
  for (int sequence = 0; sequence < static_cast<int>(shape.sequences.size()); ++sequence) {
    const Visibility visibility = visibility_of(shape, sequence);
    for (int row = 0; row < visibility.seqlen_q; row += shape.block_m) {
      const int row_end = std::min(row + shape.block_m, visibility.seqlen_q);
      const flash::BlockRange keys = flash::block_range(visibility, row, row_end, shape.block_n);
      std::vector<int> expected;
      for (int n = keys.begin; n < keys.end; ++n) expected.push_back(n);
      if (expected.empty()) continue;
      for (int head = 0; head < shape.heads_k * shape.ratio; ++head, ++tiles) {
        const auto found = additions.find({sequence, head, row / shape.block_m});
        check::that(found != additions.end() && found->second == expected, "additions to a tile", sequence, head, row,
                    shape.window.left, shape.window.right, shape.block_m, shape.block_n);
      }
    }
  }
  check::that(additions.size() == tiles, "no additions elsewhere", additions.size(), tiles);
}

void simulate(const Shape& shape) {
  unsigned seed = 1;
  for (int resident : {1, 2, 3, 5, 17, 64}) {
    for (Policy policy : {Policy::kInTurn, Policy::kRandom, Policy::kNewestFirst}) {
      Simulation simulation(shape, resident, policy, seed++);
      check::that(simulation.run(), "the deterministic backward ends", resident, static_cast<int>(policy),
                  shape.sequences.size(), shape.heads_k, shape.ratio, shape.window.left, shape.window.right,
                  shape.block_m, shape.block_n);
      check_additions(shape, simulation.additions());
    }
  }
}

void check_simulations() {
  const Window windows[] = {{}, {kUnbounded, 0}, {5, 0}, {3, 9}, {0, 0}, {kUnbounded, 7}, {12, kUnbounded}};
  const std::vector<std::vector<Sequence>> batches = {
      {{24, 24}}, {{9, 40}}, {{40, 9}}, {{17, 31}, {17, 31}}, {{1, 50}}, {{50, 1}},
  };
  const std::vector<Sequence> packed = {{20, 20}, {0, 7}, {13, 0}, {5, 33}, {33, 5}, {1, 1}};
  for (const Window& window : windows) {
    for (int block_m : {2, 4}) {
      for (int block_n : {2, 3, 4, 8}) {
        for (int ratio : {1, 3}) {
          for (const auto& batch : batches) simulate({batch, false, 2, ratio, window, block_m, block_n});
          simulate({packed, true, 2, ratio, window, block_m, block_n});
        }
      }
    }
  }
}

// Bands follow each other, and have all work tiles and dQ tiles of their heads.
void check_bands() {
  for (int all_heads = 2; all_heads <= 9; ++all_heads) {
    for (int heads = 1; heads < all_heads; ++heads) {
      for (int n_blocks : {1, 2, 7}) {
        const int dq_tiles = 3;
        const flash::BwdBands bands(heads, all_heads, n_blocks, dq_tiles);
        check::that(bands.first_dq_tile(0) == 0 && bands.end_dq_tile(bands.count - 1) == all_heads * dq_tiles, "all");
        for (int index = 0; index < all_heads * n_blocks; ++index) {
          const int band = bands.band_of(index);
          const int head = band * heads + flash::HeadOrder(all_heads, n_blocks, heads).at(index).head % heads;
          check::that(head == flash::HeadOrder(all_heads, n_blocks, heads).at(index).head, "its heads", index);
          check::that(bands.first_dq_tile(band) <= head * dq_tiles && (head + 1) * dq_tiles <= bands.end_dq_tile(band),
                      "dQ tiles of the head", index, heads, all_heads, n_blocks);
        }
        for (int band = 0; band + 1 < bands.count; ++band) {
          check::that(bands.end_dq_tile(band) == bands.first_dq_tile(band + 1), "next", band, heads, all_heads);
        }
      }
    }
  }
}

}  // namespace

int main() {
  check_bands();
  check_interleaving();
  check_width();
  check_shared_dq();
  check_running();
  check_order();
  check_simulations();
  return check::report();
}
