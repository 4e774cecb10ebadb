// Plans of sizes that only expanded tensors have: no arithmetic overflows (the sanitizer ends the program where it
// does), and no launch of a wrong grid looks possible.
#include <string>

#include "check.h"
#include "plan/bwd_plan.h"
#include "plan/call_plan.h"
#include "plan/decode_plan.h"
#include "plan/explain.h"

namespace {

using flash::kMaxLength;
using flash::kUnbounded;
using flash::Window;
using namespace flash::plan;

constexpr Device kH100{90, 132, 233472, 232448}, kA100{80, 108, 167936, 166912};
constexpr int64_t kSizes[] = {1, 64, int64_t{1} << 20, kMaxLength};
constexpr Window kWindows[] = {{}, {kUnbounded, 0}, {kUnbounded - 1, kUnbounded - 1}, {4096, 0}};

// Whether batch * heads * blocks fits a grid, by division: nothing overflows.
bool fits_grid(int64_t batch, int64_t heads, int64_t blocks) {
  return batch <= kMaxGridBlocks / heads && batch * heads <= kMaxGridBlocks / blocks;
}

void check_forward(FwdProblem problem, const Device& device) {
  for (const char* forced : {static_cast<const char*>(nullptr), "mma_sync", "wgmma", "wgmma:8"}) {
    const FwdPlan plan = plan_fwd(problem, device, forced);
    explain(problem, plan);
    if (plan.family == Family::kDecode) continue;
    const int64_t blocks = (problem.seqlen_q + plan.block_m - 1) / plan.block_m;
    const bool fits = fits_grid(problem.is_varlen ? 1 : problem.batch, problem.heads, blocks);
    if (fits || plan.family == Family::kWgmma) continue;
    check::that(plan.grid > kMaxGridBlocks, "the launch fails", plan.grid, problem.batch, problem.heads, blocks);
  }
}

void check_backward(const BwdProblem& problem, const Device& device) {
  for (const char* forced : {static_cast<const char*>(nullptr), "mma_sync"}) {
    const BwdPlan plan = plan_bwd(problem, device, forced);
    explain(plan);
    const int64_t blocks = (problem.seqlen_k + plan.block_n - 1) / plan.block_n;
    const bool fits = fits_grid(problem.is_varlen ? 1 : problem.batch, problem.heads_k, blocks);
    check::that(fits || plan.dq_in_smem || plan.grid > kMaxGridBlocks, "the launch fails", plan.grid, problem.batch,
                problem.heads_k, blocks);
    check::that(plan.workspace_vectors() >= 0, "workspace", plan.workspace_vectors());
  }
}

template <class Problem>
Problem sized(int64_t batch, int64_t heads, int64_t rows, int64_t keys, int head_dim, const Window& window) {
  Problem problem;
  problem.batch = batch;
  problem.heads = heads;
  problem.heads_k = heads % 8 == 0 ? heads / 8 : heads;
  problem.seqlen_q = rows;
  problem.seqlen_k = keys;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.window = window;
  return problem;
}

void check_sizes(int64_t batch, int64_t heads, int64_t rows, int64_t keys) {
  for (const Device& device : {kH100, kA100}) {
    for (const Window& window : kWindows) {
      for (int head_dim : {32, 64, 256}) {
        for (bool is_varlen : {false, true}) {
          FwdProblem forward = sized<FwdProblem>(batch, heads, rows, keys, head_dim, window);
          forward.is_varlen = is_varlen;
          check_forward(forward, device);
          forward.is_paged = true;
          forward.num_pages = forward.pages_per_sequence = keys;
          forward.page_size = static_cast<int>(keys);
          check_forward(forward, device);
          BwdProblem backward = sized<BwdProblem>(batch, heads, rows, keys, head_dim, window);
          backward.is_varlen = is_varlen;
          for (bool deterministic : {false, true}) {
            backward.deterministic = deterministic;
            check_backward(backward, device);
          }
        }
      }
    }
  }
}

void check_decode(int64_t batch, int64_t heads, int64_t rows, int64_t keys) {
  if (rows * heads > kMaxLength) return;  // packed rows of a K/V head: checks.h
  for (bool batch_invariant : {false, true}) {
    DecodeProblem problem{
        static_cast<int>(batch), static_cast<int>(rows), static_cast<int>(heads), 1, 128, static_cast<int>(keys), 0,
        batch_invariant};
    const DecodePlan plan = plan_decode(problem, kH100);
    check::that(plan.is_too_large || plan.work_items >= batch, "work items", plan.work_items, batch);
    FwdProblem call;
    call.decode = problem;
    call.is_cached = true;
    if (!plan.is_too_large) explain(call, plan_fwd(call, kH100, nullptr));
  }
}

}  // namespace

int main() {
  for (int64_t batch : kSizes) {
    for (int64_t heads : kSizes) {
      for (int64_t rows : kSizes) {
        for (int64_t keys : kSizes) {
          check_sizes(batch, heads, rows, keys);
          check_decode(batch, heads, rows, keys);
        }
      }
    }
  }
  return check::report();
}
