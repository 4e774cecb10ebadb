// Which family runs a call, and the tiles of the wgmma family against the limits of its GPU.
#include <string>

#include "check.h"
#include "plan/bwd_tiles.h"
#include "plan/family.h"
#include "plan/fwd_policy_sm90.h"
#include "plan/sm90_smem.h"
#include "plan/tiles.h"

namespace {

using flash::plan::choose_backward_family;
using flash::plan::Family;
using flash::plan::FamilyQuery;

Family chosen_family(const FamilyQuery& query, const char* forced) {
  return flash::plan::choose_family(query, forced).family;
}

int chosen_splits(const FamilyQuery& query, const char* forced) {
  return flash::plan::choose_family(query, forced).num_splits;
}

void check_choice() {
  for (int capability : {80, 86, 89, 90, 100, 103, 120}) {
    for (int head_dim : {8, 32, 33, 40, 64, 128, 256}) {
      for (int64_t row_tiles : {66, 132, 133}) {
        const FamilyQuery query{capability, head_dim, row_tiles, 132, false, 1, 1, 512, 512};
        const bool has_wgmma = capability == 90;
        const int widest = row_tiles <= 132 ? 64 : 0;
        const bool wgmma = has_wgmma && head_dim > widest;
        const Family expected = wgmma ? Family::kWgmma : Family::kMmaSync;
        check::that(chosen_family(query, nullptr) == expected, "family", capability, head_dim, row_tiles);
        check::that(chosen_family(query, "mma_sync") == Family::kMmaSync, "mma_sync", capability, head_dim);
        check::that((chosen_family(query, "wgmma") == Family::kWgmma) == has_wgmma, "wgmma", capability, head_dim,
                    row_tiles);
        for (const char* other : {"", "mma_sync2", "MMA_SYNC", "wgmma "}) {
          check::that(chosen_family(query, other) == expected, "other values", other, capability, head_dim);
        }
      }
    }
  }
}

// The kernels for one wave of m_blocks, and those for more.
void check_one_wave() {
  for (int64_t row_tiles : {1, 132, 133, 1000}) {
    const FamilyQuery query{90, 128, row_tiles, 132, false, 1, 1, 2048, 2048};
    const auto is_one_wave = [&](const char* forced) { return flash::plan::choose_family(query, forced).is_one_wave; };
    check::that(is_one_wave(nullptr) == (row_tiles <= 132), "one wave", row_tiles);
    check::that(!is_one_wave("wgmma") && is_one_wave("wgmma:1") && is_one_wave("wgmma:8"), "forced", row_tiles);
  }
}

FamilyQuery shape(int64_t batch, int queries, int64_t keys, int heads, int heads_k, int head_dim) {
  FamilyQuery query{90, head_dim, 0, 132, true, 0, 0, keys, keys};
  query.row_tiles = batch * heads * ((queries + 127) / 128);
  query.decode_rows = queries * (heads / heads_k);
  query.decode_tiles = batch * heads_k * flash::plan::kv_row_tiles(head_dim, query.decode_rows);
  return query;
}

// What was measured to be the fastest on an H200 (docs/tuning/fwd_sm90.md).
void check_measured() {
  const FamilyQuery split[] = {
      shape(1, 1, 512, 16, 16, 128),   shape(1, 1, 4096, 16, 16, 128),  shape(4, 1, 2048, 16, 16, 128),
      shape(32, 1, 4096, 32, 8, 128),  shape(1, 1, 4096, 8, 8, 64),     shape(1, 1, 4096, 8, 8, 256),
      shape(1, 16, 2048, 8, 8, 64),    shape(1, 64, 4096, 16, 16, 128), shape(1, 128, 8192, 16, 16, 128),
      shape(1, 256, 16384, 8, 8, 128), shape(1, 128, 8192, 16, 16, 64), shape(1, 128, 8192, 16, 16, 256),
      shape(16, 8, 4096, 32, 8, 128),  shape(16, 16, 4096, 32, 8, 128), shape(1, 64, 512, 2, 2, 256),
      shape(1, 512, 2048, 4, 4, 64),   shape(1, 128, 2048, 16, 16, 64), shape(1, 512, 2048, 2, 2, 256),
      shape(1, 64, 2048, 32, 8, 128),  shape(4, 16, 4096, 32, 8, 128)};
  const FamilyQuery wgmma[] = {
      shape(8, 1, 4096, 16, 16, 128),     shape(1, 1024, 1024, 4, 4, 128),  shape(1, 2048, 2048, 2, 2, 128),
      shape(1, 4096, 4096, 1, 1, 128),    shape(1, 128, 8192, 32, 32, 128), shape(1, 512, 8192, 8, 8, 128),
      shape(1, 512, 8192, 32, 8, 128),    shape(8, 128, 4096, 32, 8, 128),  shape(1, 2048, 32768, 32, 8, 128),
      shape(8, 64, 1024, 16, 16, 128),    shape(1, 512, 2048, 16, 16, 256), shape(1, 512, 512, 16, 16, 256),
      shape(1, 16384, 16384, 16, 16, 64), shape(32, 512, 512, 16, 16, 64),  shape(1, 512, 512, 4, 4, 128),
      shape(1, 512, 512, 16, 16, 128),    shape(1, 256, 256, 16, 16, 256),  shape(1, 2048, 2048, 8, 8, 64),
      shape(1, 128, 2048, 16, 16, 128)};
  const FamilyQuery mma_sync[] = {shape(1, 512, 512, 16, 16, 64),  shape(1, 1024, 1024, 4, 4, 64),
                                  shape(1, 512, 2048, 16, 16, 64), shape(1, 128, 512, 16, 16, 64),
                                  shape(1, 128, 128, 16, 16, 128), shape(8, 256, 256, 8, 8, 64)};
  for (const FamilyQuery& query : wgmma) {
    check::that(chosen_family(query, nullptr) == Family::kWgmma, "wgmma", query.row_tiles, query.seen_keys,
                query.head_dim);
    check::that(chosen_family(query, "split_kv") == Family::kDecode, "split_kv", query.seen_keys);
  }
  for (const FamilyQuery& query : mma_sync) {
    check::that(chosen_family(query, nullptr) == Family::kMmaSync, "mma_sync", query.row_tiles, query.seen_keys,
                query.head_dim);
  }
  for (FamilyQuery query : split) {
    check::that(chosen_family(query, nullptr) == Family::kDecode, "split", query.decode_rows, query.seen_keys,
                query.head_dim);
    check::that(chosen_family(query, "mma_sync") == Family::kMmaSync, "mma_sync", query.seen_keys);
    check::that(chosen_family(query, "wgmma") == Family::kWgmma, "wgmma", query.seen_keys);
    query.may_use_decode = false;
    check::that(chosen_family(query, nullptr) != Family::kDecode, "not supported", query.seen_keys);
    check::that(chosen_family(query, "split_kv") != Family::kDecode, "not supported, but forced", query.seen_keys);
  }
}

// The same where wgmma may split the keys, as in calls without dropout.
FamilyQuery splittable(int64_t batch, int queries, int64_t keys, int heads, int heads_k, int head_dim) {
  FamilyQuery query = shape(batch, queries, keys, heads, heads_k, head_dim);
  query.split_kv_tiles = query.row_tiles;
  query.split_kv_rows = batch * heads * queries;
  return query;
}

void check_kv_splits() {
  for (int head_dim : {64, 128, 256}) {
    const FamilyQuery split[] = {splittable(1, 128, 2048, 16, 16, head_dim), splittable(1, 128, 8192, 16, 16, head_dim),
                                 splittable(1, 512, 16384, 2, 2, head_dim),  splittable(1, 128, 4096, 32, 8, head_dim),
                                 splittable(1, 128, 8192, 32, 32, head_dim), splittable(1, 64, 4096, 16, 16, head_dim)};
    for (const FamilyQuery& query : split) {
      const int splits = chosen_splits(query, nullptr);
      check::that(chosen_family(query, nullptr) == Family::kWgmma, "wgmma with KV splits", query.seen_keys, head_dim);
      check::that(splits > 1 && splits * query.split_kv_tiles <= query.multiprocessors, "one wave of splits", splits,
                  query.split_kv_tiles, query.seen_keys, head_dim);
      for (int requested : {1, 2, 8, 32}) {
        const std::string forced = requested == 1 ? "wgmma" : "wgmma:" + std::to_string(requested);
        check::that(chosen_family(query, forced.c_str()) == Family::kWgmma, "forced", requested);
        check::that(chosen_splits(query, forced.c_str()) == requested, "forced splits", requested);
        check::that(chosen_splits(shape(1, 128, 2048, 16, 16, head_dim), forced.c_str()) == 1, "may not split",
                    requested);
      }
      for (const char* other : {"wgmma:0", "wgmma:33", "wgmma:", "wgmma8", "wgmma:-1", ""}) {
        check::that(chosen_splits(query, other) == splits, "not a number of splits", other);
      }
      FamilyQuery unsplit = query;
      unsplit.may_use_decode = false;
      check::that(chosen_splits(unsplit, "split_kv") == splits, "forces a family that cannot run it", splits);
    }
    FamilyQuery causal = splittable(1, 16384, 16384, 1, 1, head_dim);
    check::that(chosen_splits(causal, nullptr) == 1, "equal m_blocks are one wave", head_dim);
    causal.mean_keys = causal.seen_keys / 2;
    check::that(chosen_splits(causal, nullptr) > 1, "the long ones of unequal m_blocks are split", head_dim);
    const FamilyQuery whole[] = {splittable(8, 512, 512, 16, 16, head_dim), splittable(1, 256, 256, 16, 16, head_dim),
                                 splittable(1, 16384, 16384, 16, 16, head_dim)};
    for (const FamilyQuery& query : whole) {
      check::that(chosen_splits(query, nullptr) == 1, "not split", query.seen_keys, head_dim);
    }
  }
}

// The search for the number of splits ends early, with the result of one that does not.
void check_splits_search() {
  using flash::plan::splits_cost;
  for (int head_dim : {32, 64, 96, 128, 192, 256}) {
    for (int64_t tiles : {1, 2, 7, 16, 32, 66, 132}) {
      for (int64_t keys = 1; keys <= 1 << 20; keys = keys * 3 / 2 + 1) {
        FamilyQuery query{90, head_dim, tiles, 132, false, 1, 1, keys, keys / 2 + 1};
        query.split_kv_tiles = tiles;
        query.split_kv_rows = 128 * tiles;
        query.has_direct_kernel = keys % 2 == 0;
        flash::plan::SplitsCost best{1, flash::plan::wgmma_cost(query)};
        for (int splits = 2; splits <= flash::plan::kMaxSplits; ++splits) {
          if (splits_cost(query, splits) < best.cost) best = {splits, splits_cost(query, splits)};
        }
        const auto found = flash::plan::best_num_splits(query);
        check::that(found.splits == best.splits && found.cost == best.cost, "splits", head_dim, tiles, keys);
      }
    }
  }
}

void check_backward_choice() {
  for (int capability : {80, 86, 89, 90, 100, 103, 120, 121}) {
    for (int head_dim : {8, 32, 33, 64, 96, 128, 129, 256}) {
      const Family expected = capability == 90 && head_dim > 32 ? Family::kWgmma : Family::kMmaSync;
      check::that(choose_backward_family(capability, head_dim, nullptr) == expected, "backward", capability, head_dim);
      check::that(choose_backward_family(capability, head_dim, "wgmma") == expected, "backward, wgmma", capability,
                  head_dim);
      check::that(choose_backward_family(capability, head_dim, "mma_sync") == Family::kMmaSync, "backward, mma_sync",
                  capability, head_dim);
      const auto tile = flash::plan::dq_tile(expected, head_dim, head_dim);
      check::that(tile.head_dim >= head_dim && (tile.block_m == 64 || tile.block_m == 128), "dQ tile", head_dim,
                  tile.block_m);
    }
  }
}

constexpr int kSmemBytes = 227 * 1024, kSpareBytes = 4 * 1024;  // headroom that the sanitizers need

void check_backward_tile(const flash::plan::Sm90BwdTile& tile) {
  const auto dtype = flash::Dtype::kBf16;
  const bool has_dq_pass = flash::plan::has_dq_pass(tile);
  const int bytes = has_dq_pass ? flash::plan::sm90_dkv_smem_bytes(tile, true, dtype)
                                : flash::plan::sm90_bwd_smem_bytes(tile, true, false, dtype);
  check::that(bytes + kSpareBytes <= kSmemBytes, "shared memory of the backward", tile.head_dim, bytes);
  const int dq_bytes = has_dq_pass ? flash::plan::sm90_dq_smem_bytes(tile, true, dtype) : 0;
  check::that(dq_bytes <= kSmemBytes, "shared memory of the dQ pass", tile.head_dim, dq_bytes);
  check::that((tile.block_n == 128 || tile.block_n == 64) && tile.block_m == 64, "two consumers", tile.head_dim);
}

// With dQ of all rows there is no headroom for the sanitizers.
void check_shared_dq_tile() {
  const int bytes = flash::plan::sm90_bwd_smem_bytes(flash::plan::kSm90SharedDqTile, false, true, flash::Dtype::kBf16);
  check::that(bytes <= kSmemBytes, "shared memory of the backward with dQ", bytes);
}

void check_tile(const flash::plan::Sm90FwdTile& tile, int head_dim, flash::plan::FwdVariant variant) {
  check::that(tile.head_dim == head_dim, "the head dims of both families are the same", tile.head_dim, head_dim);
  check::that(tile.block_m % 64 == 0 && tile.block_m >= 128 && tile.block_m <= 192, "two or three consumers", head_dim,
              tile.block_m);
  check::that(tile.block_n % 16 == 0 && tile.block_n <= 256, "a wgmma of this width exists", head_dim, tile.block_n);
  check::that(tile.kv_stages >= 2, "V of a block is in use while K of the next is waited for", head_dim);
  check::that(!tile.overlaps || tile.q_stages == 2, "overlapping work tiles take two Q stages", head_dim);
  check::that(tile.consumer_groups == 1 || (tile.consumer_groups == 2 && tile.block_m == 128),
              "the producer warps load for two consumer groups", head_dim);
  const int bytes = flash::plan::sm90_fwd_smem_bytes(tile, variant, flash::Dtype::kBf16);
  check::that(bytes <= kSmemBytes, "shared memory", head_dim, tile.consumer_groups, bytes);
}

void check_value_dims() {
  using flash::plan::is_value_dim_pair;
  for (int head_dim : {129, 136, 160, 192}) {
    for (int value_dim : {1, 64, 128}) check::that(is_value_dim_pair(head_dim, value_dim), "pair", head_dim, value_dim);
    for (int value_dim : {129, 192, 256})
      check::that(!is_value_dim_pair(head_dim, value_dim), "no pair", head_dim, value_dim);
  }
  for (int head_dim : {64, 128, 193, 256}) check::that(!is_value_dim_pair(head_dim, 64), "no pair", head_dim);
  for (int head_dim : {8, 64, 128, 192, 256}) {
    for (int value_dim : {8, 64, 128, 192, 256}) {
      const auto tile = flash::plan::sm90_bwd_tile(head_dim, value_dim);
      check::that(tile.head_dim >= head_dim && tile.value_dim() >= value_dim, "backward", head_dim, value_dim);
      const auto general = flash::plan::sm90_bwd_tile(head_dim, value_dim, true);
      check::that(general.head_dim == tile.head_dim && general.value_dim() == tile.value_dim() &&
                      general.block_m == tile.block_m && has_dq_pass(general) == has_dq_pass(tile),
                  "one kernel family and one dQ for all variants", head_dim, value_dim);
    }
  }
}

}  // namespace

int main() {
  check_choice();
  check_one_wave();
  check_measured();
  check_kv_splits();
  check_splits_search();
  check_backward_choice();
  for (const auto& tile : flash::plan::kSm90BwdTiles) check_backward_tile(tile);
  check_shared_dq_tile();
  using flash::plan::FwdVariant;
  for (FwdVariant variant : {FwdVariant::kPlain, FwdVariant::kShort, FwdVariant::kDropout, FwdVariant::kScoreMod,
                             FwdVariant::kMasked, FwdVariant::kOneWave, FwdVariant::kDirect, FwdVariant::kStatic}) {
    for (int i = 0; i < flash::plan::kNumSm90FwdHeadDims; ++i) {
      const int head_dim = flash::plan::kFwdTiles[0][flash::plan::kSm90FirstHeadDim + i].head_dim;
      const auto tile = flash::plan::sm90_fwd_tile(head_dim, variant);
      check_tile(tile, head_dim, variant);
      const auto policy = flash::plan::sm90_fwd_policy(head_dim, head_dim, variant);
      if (!policy.has(flash::plan::fwd_feature::kSplitKv)) continue;
      check::that(tile.block_m == 128 && tile.consumer_groups == 1, "one of the tiles that the plan counts", head_dim);
      check::that(flash::plan::sm90_reads_pages(tile, variant), "any call may be of one wave", head_dim);
    }
  }
  check_tile(flash::plan::kSm90ValueDimTile, 192, FwdVariant::kPlain);
  check_backward_tile(flash::plan::kSm90BwdValueDimTile);
  check_backward_tile(flash::plan::kSm90TwoPassTile);
  check_backward_tile(flash::plan::kSm90BwdGeneralValueDimTile);
  check_value_dims();
  for (int head_dim = 33; head_dim <= flash::plan::kMaxWgmmaHeadDim; ++head_dim) {
    const auto tile = flash::plan::sm90_fwd_tile(head_dim, flash::plan::FwdVariant::kPlain);
    check::that(tile.head_dim == flash::plan::fwd_tile(head_dim, flash::plan::FwdVariant::kPlain).head_dim,
                "one head dim of instantiation for both families", head_dim, tile.head_dim);
  }
  return check::report();
}
