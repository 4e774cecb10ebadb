// Host program of benchmarks/lab_sm90.py: what the shipped tables hold, and whether a tile and a policy fit each other.
// The plain C++17 of plan/ decides, before nvcc runs.
//
//   sm90_check shipped HEAD_DIM VARIANT                       prints the tile and the features of a kernel
//   sm90_check fits HEAD_DIM VARIANT TILE... FEATURES         prints its shared memory, then what is wrong, if anything
//
// TILE: block_m block_n kv_stages q_stages overlaps consumer_groups o_cols. VARIANT and FEATURES are numbers.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "plan/fwd_policy_sm90.h"
#include "plan/sm90_smem.h"

namespace plan = flash::plan;

namespace {

const char* problem_of(const plan::Sm90FwdTile& tile, const plan::FwdPolicy& policy, plan::FwdVariant variant) {
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

}  // namespace

int main(int count, char** words) {
  const auto number = [&](int i) { return i < count ? std::atoi(words[i]) : 0; };
  if (count < 4) return 2;
  const auto variant = static_cast<plan::FwdVariant>(number(3));
  if (std::strcmp(words[1], "shipped") == 0) {
    const plan::Sm90FwdTile tile = plan::sm90_fwd_tile(number(2), variant);
    std::printf("%d %d %d %d %d %d %d %u\n", tile.block_m, tile.block_n, tile.kv_stages, tile.q_stages, tile.overlaps,
                tile.consumer_groups, tile.o_cols, plan::sm90_fwd_policy(number(2), number(2), variant).features);
    return 0;
  }
  const plan::Sm90FwdTile tile{number(2),      number(4), number(5), number(6), number(7),
                               number(8) != 0, number(9), 0,         number(10)};
  const plan::FwdPolicy policy{number(2), static_cast<uint32_t>(number(11)), 1};
  const char* const problem = problem_of(tile, policy, variant);
  std::printf("%d\n%s", plan::sm90_fwd_smem_bytes(tile, variant, flash::Dtype::kBf16), problem ? problem : "");
  return 0;
}
