// Host program of benchmarks/lab/plan_headers.py: what the shipped tables hold, and whether a row fits its kernel. The
// plain C++17 of plan/ decides, before nvcc runs. KERNEL is fwd_mma_sync or fwd_wgmma.
//
//   plan_check shipped KERNEL HEAD_DIM [VARIANT]     prints a kernel's row, without its head dim for fwd_wgmma, whose
//                                                    features follow
//   plan_check fits ROW...                           prints the shared memory of a row of fwd_wgmma that begins with
//                                                    its head dim and ends with VARIANT and FEATURES, then what is
//                                                    wrong, if anything
//
// VARIANT and FEATURES are numbers.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "plan/fwd_policy_sm90.h"
#include "plan/sm90_smem.h"

namespace plan = flash::plan;
using flash::Dtype;

namespace {

using Row = std::vector<int>;

void print(const Row& row) {
  for (const int value : row) std::printf("%d ", value);
  std::printf("\n");
}

const char* wgmma_fwd_problem(const plan::Sm90FwdTile& tile, const plan::FwdPolicy& policy, plan::FwdVariant variant) {
  const int warpgroups = tile.block_m / 64;
  if (tile.block_m % 64 != 0 || tile.block_n % 16 != 0 || tile.block_n < 16) return "whole wgmma of 64 rows, 16 keys";
  if (tile.consumer_groups == 1 ? warpgroups != 2 && warpgroups != 3 : tile.consumer_groups != 2 || warpgroups != 2) {
    return "register budgets exist for two, three or twice two consumers";
  }
  if (tile.kv_stages < 1 || tile.q_stages < 1 || tile.q_stages > 2) return "one or more K/V stages, one or two of Q";
  if (tile.overlaps && tile.q_stages != 2) return "the next Q has to land while this one is in use";
  if (tile.o_cols == 0 && tile.q_stages != 2) return "the next Q has to land before O has left";
  return plan::fwd_policy_conflict(tile, policy, variant);
}

int shipped(const std::string& kernel, int head_dim, plan::FwdVariant variant) {
  if (kernel == "fwd_mma_sync") {
    const plan::FwdTile tile = plan::fwd_tile(head_dim, plan::FwdVariant::kPlain);
    print({tile.head_dim, tile.block_m, tile.block_n, tile.warps, tile.blocks_per_sm});
  } else if (kernel == "fwd_wgmma") {
    const plan::Sm90FwdTile tile = plan::sm90_fwd_tile(head_dim, variant);
    const int features = static_cast<int>(plan::sm90_fwd_policy(head_dim, head_dim, variant).features);
    print({tile.block_m, tile.block_n, tile.kv_stages, tile.q_stages, tile.overlaps, tile.consumer_groups, tile.o_cols,
           features});
  } else {
    return 2;
  }
  return 0;
}

int fits(Row row) {
  row.resize(10, 0);
  const plan::Sm90FwdTile tile{row[0], row[1], row[2], row[3], row[4], row[5] != 0, row[6], 0, row[7]};
  const auto variant = static_cast<plan::FwdVariant>(row[8]);
  const char* problem = wgmma_fwd_problem(tile, {row[0], static_cast<uint32_t>(row[9]), 1}, variant);
  std::printf("%d\n%s", plan::sm90_fwd_smem_bytes(tile, variant, Dtype::kBf16), problem ? problem : "");
  return 0;
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) return 2;
  const std::string command = words[1];
  Row row;
  for (int i = command == "fits" ? 2 : 3; i < count; ++i) row.push_back(std::atoi(words[i]));
  if (command == "fits") return fits(row);
  return shipped(words[2], row[0], static_cast<plan::FwdVariant>(row.size() > 1 ? row[1] : 0));
}
