// sm_margin: plans see a smaller GPU, at least one multiprocessor, and no persistent grid takes more than it has.
#include <cstdint>

#include "check.h"
#include "plan/bwd_plan.h"
#include "plan/call_plan.h"
#include "plan/device.h"

namespace {

using flash::kUnbounded;
using flash::SplitRule;
using flash::Window;
using namespace flash::plan;

constexpr Device kH100{90, 132, 233472, 232448};
constexpr int64_t kMargins[] = {0, 1, 16, 120, 131, 132, 133, 1000000, INT64_MAX};
constexpr Window kWindows[] = {{}, {kUnbounded, 0}, {1024, 0}};

int64_t left_by(int64_t margin) { return margin < 132 ? 132 - margin : 1; }

template <class Problem>
Problem dense(int64_t batch, int64_t heads, int64_t rows, int64_t keys, int head_dim, const Window& window) {
  Problem problem;
  problem.batch = batch;
  problem.heads = problem.heads_k = heads;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.seqlen_q = rows;
  problem.seqlen_k = keys;
  problem.window = window;
  return problem;
}

void check_forward(const FwdProblem& problem, int64_t margin) {
  const Device device = with_margin(kH100, margin);
  const FwdPlan plan = plan_fwd(problem, device, "wgmma");
  const int64_t tiles = plan.num_work_tiles, left = left_by(margin);
  check::that(plan.grid == (tiles < left ? tiles : left), "forward grid", plan.grid, tiles, margin);
  check::that(!plan.is_dynamic || tiles > plan.grid, "a semaphore with tiles left to hand out", tiles, margin);
  const FwdPlan chosen = plan_fwd(problem, device, nullptr);
  check::that(chosen.family != Family::kWgmma || chosen.grid <= left, "forward grid", chosen.grid, margin);
  FwdProblem fp8 = problem;
  fp8.q_dtype = fp8.kv_dtype = flash::Dtype::kE4m3;
  fp8.fits_fp8_maps = true;
  const FwdPlan products = plan_fwd(fp8, device, "wgmma");
  check::that(products.grid <= left, "grid of e4m3", products.grid, margin);
}

// The kernel is chosen by head dims and options alone: equal bits.
void check_invariant(FwdProblem problem, int64_t margin) {
  problem.batch_invariant = true;
  const FwdPlan whole = plan_fwd(problem, kH100, nullptr);
  const FwdPlan plan = plan_fwd(problem, with_margin(kH100, margin), nullptr);
  check::that(plan.family == whole.family && plan.variant == whole.variant && plan.num_splits == whole.num_splits,
              "batch-invariant", margin);
}

void check_backward(BwdProblem problem, bool deterministic, int64_t margin) {
  problem.deterministic = deterministic;
  const BwdPlan plan = plan_bwd(problem, with_margin(kH100, margin), nullptr);
  const int64_t left = left_by(margin);
  check::that(plan.family == Family::kWgmma && plan.grid >= 1 && plan.grid <= left, "backward grid", plan.grid, margin);
  check::that(!plan.dq_pass || (plan.dq_grid <= left && plan.dq_overlaps == (margin == 0)), "dQ pass", plan.dq_grid,
              margin);
  // n_blocks that wait for others are handed out in order wherever not all of them are resident.
  check::that(plan.dq_in_smem || plan.is_dynamic == (plan.order.blocks > left), "semaphore", plan.order.blocks, margin);
}

void check_decode(int batch, int heads_k, int capacity, int num_splits, bool batch_invariant, int64_t margin) {
  const DecodeProblem problem{batch, 1, 4 * heads_k, heads_k, 128, capacity, num_splits, batch_invariant};
  const DecodePlan plan = plan_decode(problem, with_margin(kH100, margin));
  const KvTile tile = kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype);
  const int blocks_per_sm = kv_residency(tile, kH100.smem_per_multiprocessor, kH100.smem_per_block).blocks_per_sm;
  check::that(plan.thread_blocks >= 1 && plan.thread_blocks <= left_by(margin) * blocks_per_sm, "grid of decode",
              plan.thread_blocks, margin);
  check::that(!plan.in_clusters || plan.thread_blocks % 2 == 0, "clusters of two", plan.thread_blocks, margin);
  const bool by_ctas = plan.split_points.rule == SplitRule::kAnywhere || num_splits > 1;
  check::that(!by_ctas || batch_invariant || plan.slots == 2 * int64_t{plan.thread_blocks}, "slots of partial results",
              plan.slots, plan.thread_blocks);
}

}  // namespace

int main() {
  static_assert(with_margin(kH100, 0).multiprocessors == 132);
  static_assert(with_margin(kH100, 16).multiprocessors == 116 && with_margin(kH100, 16).smem_per_block == 232448);
  static_assert(with_margin(kH100, 132).multiprocessors == 1 && with_margin(kH100, INT64_MAX).multiprocessors == 1);
  for (int64_t margin : kMargins) {
    for (const Window& window : kWindows) {
      for (int head_dim : {64, 128, 256}) {
        for (int64_t rows : {100, 1000, 8192}) {
          for (int64_t heads : {1, 7, 64}) {
            const auto forward = dense<FwdProblem>(2, heads, rows, 4096, head_dim, window);
            check_forward(forward, margin);
            check_invariant(forward, margin);
            auto packed = forward;
            packed.is_varlen = true;
            check_forward(packed, margin);
            const auto backward = dense<BwdProblem>(2, heads, rows, 4096, head_dim, window);
            check_backward(backward, false, margin);
            check_backward(backward, true, margin);
          }
        }
      }
    }
    for (int batch : {1, 3, 64}) {
      for (int capacity : {200, 100000}) {
        for (int num_splits : {0, 1, 5}) {
          check_decode(batch, 8, capacity, num_splits, false, margin);
          check_decode(batch, 8, capacity, num_splits, true, margin);
        }
      }
    }
  }
  return check::report();
}
