// A dense batch and the same sequences packed take the same kernels, split points and block order; batch-invariant
// calls do whatever else is in the batch.
#include <iterator>
#include <string>

#include "check.h"
#include "plan/bwd_plan.h"
#include "plan/call_plan.h"
#include "plan/decode_plan.h"
#include "plan/fwd_plan.h"

namespace {

using flash::kUnbounded;
using flash::KvBlockOrder;
using flash::Window;
using flash::plan::DecodePlan;
using flash::plan::Device;
using flash::plan::FwdPlan;
using flash::plan::FwdProblem;

constexpr int kMultiprocessors[] = {58, 108, 132};
constexpr int kHeadDims[] = {8, 32, 64, 96, 128, 192, 256};
constexpr Window kWindows[] = {{}, {kUnbounded, 0}, {300, 0}, {64, 64}};
constexpr int kHeads[][2] = {{1, 1}, {4, 1}, {4, 4}, {16, 1}, {16, 16}, {32, 1}, {32, 32}};  // of Q, of K and V
constexpr const char* kNotForced = nullptr;

FwdProblem make_problem(int64_t batch, int64_t heads, int64_t heads_k, int head_dim, int64_t rows, int64_t keys,
                        const Window& window) {
  FwdProblem problem;
  problem.batch = batch;
  problem.heads = heads;
  problem.heads_k = heads_k;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.seqlen_q = rows;
  problem.seqlen_k = keys;
  problem.window = window;
  return problem;
}

Device make_device(int capability, int multiprocessors) { return {capability, multiprocessors, 233472, 232448}; }

FwdProblem packed(const FwdProblem& dense) {
  FwdProblem problem = dense;
  problem.is_varlen = true;
  problem.seqlen_q *= dense.batch;
  problem.seqlen_k *= dense.batch;
  return problem;
}

// What bits depend on: the kernel, and its KV splits. Those without a scheduler compute what kOneWave does.
bool same_arithmetic(const FwdPlan& a, const FwdPlan& b) {
  using flash::plan::FwdVariant;
  const auto computed = [](FwdVariant own) { return has_static_tiles(own) ? FwdVariant::kOneWave : own; };
  return a.family == b.family && computed(a.variant) == computed(b.variant) && a.head_dim == b.head_dim &&
         a.block_m == b.block_m && a.block_n == b.block_n && a.num_splits == b.num_splits &&
         a.unmasked_blocks == b.unmasked_blocks;
}

// What decides the split points of the decode kernels and the order of the combine. `work`: n_blocks of the linearised
// work, at most those of full sequences.
void check_split(const FwdProblem& dense, const Device& device) {
  const auto plan_of = [&device](const FwdProblem& problem) {
    const int keys = static_cast<int>(problem.seqlen_k);
    flash::plan::DecodeProblem decode{static_cast<int>(problem.batch),
                                      static_cast<int>(problem.seqlen_q),
                                      static_cast<int>(problem.heads),
                                      static_cast<int>(problem.heads_k),
                                      problem.head_dim,
                                      keys,
                                      0,
                                      false,
                                      problem.is_varlen,
                                      static_cast<int>(problem.keys())};
    decode.is_forward = true;
    return flash::plan::plan_decode(decode, device);
  };
  const DecodePlan a = plan_of(dense), b = plan_of(packed(dense));
  check::that(a.tile_size == b.tile_size && a.row_tiles == b.row_tiles, "tile", dense.batch, dense.seqlen_q);
  check::that(a.split_points.rule == b.split_points.rule && a.split_points.value == b.split_points.value,
              "split points", dense.batch, dense.seqlen_q);
  check::that(a.combines_one_row == b.combines_one_row, "combine", dense.batch, dense.seqlen_q, dense.seqlen_k);
  const int block_n = flash::plan::kv_block_n(flash::plan::kv_tile(dense.head_dim, a.tile_size));
  const int64_t tiles = dense.batch * dense.heads_k * a.row_tiles;
  const int64_t full = tiles * flash::plan::kv_max_blocks(static_cast<int>(dense.seqlen_k), block_n);
  for (int64_t work = tiles; work <= full; work += full / 7 + 1) {
    check::that(flash::blocks_per_cta(work, a.thread_blocks, a.min_blocks_per_cta) ==
                    flash::blocks_per_cta(work, b.thread_blocks, b.min_blocks_per_cta),
                "n_blocks of a CTA", dense.batch, dense.seqlen_q, dense.seqlen_k, work);
  }
}

void check_problem(const FwdProblem& dense, int multiprocessors) {
  for (int capability : {80, 90}) {
    const Device device = make_device(capability, multiprocessors);
    for (bool returns_max_logit : {false, true}) {  // which the decode kernels do not have
      FwdProblem problem = dense;
      problem.returns_max_logit = returns_max_logit;
      for (const char* forced : {kNotForced, "wgmma", "wgmma:1", "wgmma:3", "mma_sync"}) {
        check::that(same_arithmetic(plan_fwd(problem, device, forced), plan_fwd(packed(problem), device, forced)),
                    "plan", capability, dense.head_dim, dense.batch, dense.seqlen_q, dense.seqlen_k, dense.heads);
      }
    }
  }
  if (dense.window.left == kUnbounded && dense.head_dim >= 32) check_split(dense, make_device(90, multiprocessors));
}

// Nothing but the head dim: not the sizes, not whether KV splits are possible. A mask may choose a kernel (kMasked): it
// is an option.
void check_invariant(FwdProblem problem, int multiprocessors) {
  using flash::plan::FwdVariant;
  problem.batch_invariant = true;
  for (int capability : {80, 90}) {
    const Device device = make_device(capability, multiprocessors);
    for (const char* forced : {kNotForced, "split_kv", "wgmma", "wgmma:1", "wgmma:8"}) {
      const FwdPlan plan = plan_fwd(problem, device, forced);
      const auto expected = capability == 90 ? flash::plan::Family::kWgmma : flash::plan::Family::kMmaSync;
      const bool is_plain = plan.variant == FwdVariant::kPlain || plan.variant == FwdVariant::kMasked;
      check::that(plan.family == expected && plan.num_splits == 1 && is_plain, "invariant", capability,
                  problem.head_dim, problem.batch, problem.seqlen_q, problem.seqlen_k);
    }
  }
  flash::plan::BwdProblem backward;
  backward.batch = problem.batch;
  backward.heads = backward.heads_k = problem.heads;
  backward.head_dim = backward.head_dim_v = problem.head_dim;
  backward.seqlen_q = problem.seqlen_q;
  backward.seqlen_k = problem.seqlen_k;
  backward.batch_invariant = true;
  check::that(!plan_bwd(backward, make_device(90, multiprocessors), nullptr).dq_in_smem, "invariant dQ",
              problem.head_dim, problem.seqlen_q);
}

// Each shape with every window on one GPU, the GPUs in turn: every pair of a value of these with a window or a GPU.
void check_shapes() {
  int count = 0;
  for (int head_dim : kHeadDims) {
    for (int64_t batch : {1, 2, 5, 16, 129}) {
      for (int64_t rows : {1, 2, 17, 64, 128, 129, 500, 1024, 2048, 5000}) {
        for (int64_t keys : {1, 129, 500, 2048, 16384}) {
          for (const auto& [heads, heads_k] : kHeads) {
            const int multiprocessors = kMultiprocessors[count++ % std::size(kMultiprocessors)];
            for (const Window& window : kWindows) {
              const FwdProblem dense = make_problem(batch, heads, heads_k, head_dim, rows, keys, window);
              check_problem(dense, multiprocessors);
              check_invariant(dense, multiprocessors);
            }
          }
        }
      }
    }
  }
}

// Packed sequences of other lengths count with their mean length.
void check_means() {
  FwdProblem problem = make_problem(3, 4, 2, 64, 301, 901, {});
  problem.is_varlen = true;
  check::that(problem.rows() == 101 && problem.keys() == 300 && problem.blocks(128) == 12 && problem.all_rows() == 1204,
              "means", problem.rows(), problem.keys());
  FwdProblem paged = problem;
  paged.is_paged = true;
  paged.num_pages = 60;
  paged.page_size = 100;
  check::that(paged.keys() == 2000, "keys in pages", paged.keys());
  paged.is_varlen = false;
  check::that(paged.keys() == 901, "no more keys than a table lists", paged.keys());
  FwdProblem none = make_problem(0, 4, 2, 64, 301, 0, {});
  none.is_varlen = true;
  check::that(none.rows() == 301 && none.keys() == 0 && none.blocks(128) == 0, "no sequences", none.rows());
}

}  // namespace

int main() {
  check_shapes();
  check_means();
  return check::report();
}
