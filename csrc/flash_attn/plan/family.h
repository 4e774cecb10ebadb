// Which kernel family serves a call. Plain C++17.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tiles.h"

namespace flash {
namespace plan {

enum class Family {
  kMmaSync,  // sm_80 and newer: every feature
  kWgmma,    // compute capability 9.0 only
  kSplitKv,  // the kernels of the KV cache: many thread blocks share the keys of a row
};

constexpr int kWgmmaCapability = 90;

// What the choice depends on.
struct FamilyQuery {
  int capability;  // 10 * major + minor
  int head_dim;
  int64_t row_tiles;  // of 128 rows, of all heads
  int multiprocessors;
  bool may_split;           // without dropout, sinks and max_logit
  int64_t split_rows;       // packed rows of a K/V head
  int64_t split_tiles;      // of these, of all sequences and K/V heads: kv_row_tiles()
  int64_t seen_keys;        // at most so many by a tile of rows
  int64_t share_tiles = 0;  // of 128 rows in sequences of mean length, whose keys the wgmma family may share out
};

// The kernels of this head dim serve lesser ones too: columns that do not exist are never read or written.
constexpr int kLeastWgmmaHeadDim = kSm90FwdTiles[0][0].head_dim;

constexpr int wgmma_head_dim(int head_dim) { return head_dim < kLeastWgmmaHeadDim ? kLeastWgmmaHeadDim : head_dim; }

constexpr bool wgmma_serves(const FamilyQuery& query) { return query.capability == kWgmmaCapability; }

// What a call takes by each family, in picoseconds, of an H200; the ratios are what counts (docs/tuning.md). A wave of
// row tiles takes a time for each key that they see.
constexpr int64_t tile_waves(const FamilyQuery& query) {
  return (query.row_tiles + query.multiprocessors - 1) / query.multiprocessors;
}

// Thread blocks of 64 rows while all tiles are of one wave: two on a multiprocessor hold each other up.
constexpr int64_t mma_sync_cost(const FamilyQuery& query) {
  const int64_t alone = tile_waves(query) * query.seen_keys * (1800 + 112 * query.head_dim);
  return 3000000 + (2 * query.row_tiles > query.multiprocessors ? alone * 8 / 5 : alone);
}

// At head dim 64 the two teams of a multiprocessor hold each other up, where both have a tile.
constexpr int64_t wgmma_cost(const FamilyQuery& query) {
  const int64_t wide = 2800 + 60 * query.head_dim;
  const int64_t narrow = query.row_tiles <= query.multiprocessors ? 10000 : 14000;
  const int64_t of_key = query.head_dim <= kLeastWgmmaHeadDim ? narrow : wide < 10500 ? 10500 : wide;
  return 6500000 + tile_waves(query) * query.seen_keys * of_key;
}

// Shares of keys are tiles too, in waves of their own. More of them run at a time, and so read more keys at a time; and
// their results are written, read and merged in fp32.
constexpr int kMaxKeyShares = 32;

constexpr int64_t shares_cost(const FamilyQuery& query, int shares) {
  const int block_n = sm90_fwd_tile(wgmma_head_dim(query.head_dim), FwdVariant::kShort).block_n;
  const int64_t blocks = (query.seen_keys + block_n - 1) / block_n;
  const int64_t keys = (blocks + shares - 1) / shares * block_n;
  const int64_t tiles = query.share_tiles * shares;
  const bool in_pairs = query.head_dim <= kLeastWgmmaHeadDim && tiles > query.multiprocessors;
  const int64_t teams = in_pairs ? 2 * query.multiprocessors : query.multiprocessors;
  const int64_t wide = 2000 + 58 * query.head_dim;
  const int64_t of_key = in_pairs ? 13000 : wide < 9000 ? 9000 : wide;
  const int64_t reads = query.share_tiles * query.seen_keys * query.head_dim * 2 / 5;
  return 8500000 + (tiles + teams - 1) / teams * keys * of_key + reads + 200 * tiles * query.head_dim;
}

// The number of shares that takes the least time, and that time. More than one wave of row tiles is not cut.
struct KeySharesCost {
  int shares;
  int64_t cost;
};

constexpr KeySharesCost best_key_shares(const FamilyQuery& query) {
  KeySharesCost best{1, wgmma_cost(query)};
  if (query.share_tiles == 0 || query.share_tiles > query.multiprocessors) return best;
  for (int shares = 2; shares <= kMaxKeyShares; ++shares) {
    const int64_t cost = shares_cost(query, shares);
    if (cost < best.cost) best = {shares, cost};
  }
  return best;
}

// Shares of keys take the time of all tiles over all multiprocessors, and the merge, which is slow for tiles of more
// than 16 packed rows.
constexpr int64_t split_cost(const FamilyQuery& query) {
  const int rows = kv_tile(query.head_dim, kv_tile_size(query.head_dim, query.split_rows)).rows();
  const int64_t work = query.seen_keys * query.split_tiles * query.head_dim / query.multiprocessors;
  return rows <= 16 ? 5500000 + 120 * work : 12500000 + (rows <= 32 ? 130 : 238) * work;
}

// What runs a call.
struct FamilyChoice {
  Family family;
  int key_shares = 1;  // into which the wgmma family cuts the keys of each row tile
};

// The fastest by these estimates. More than one wave of row tiles is wgmma's.
constexpr FamilyChoice fastest_family(const FamilyQuery& query) {
  const bool in_one_wave = query.row_tiles <= query.multiprocessors;
  const KeySharesCost best = best_key_shares(query);
  const bool wgmma = wgmma_serves(query) && (!in_one_wave || best.cost < mma_sync_cost(query));
  const int64_t whole = wgmma ? best.cost : mma_sync_cost(query);
  if (query.may_split && split_cost(query) < whole) return {Family::kSplitKv};
  return wgmma ? FamilyChoice{Family::kWgmma, best.shares} : FamilyChoice{Family::kMmaSync};
}

// The number of shares that `forced` asks for as "wgmma:8" does, 1 for "wgmma"; 0: it does not name that family.
inline int forced_key_shares(const char* forced) {
  constexpr char kName[] = "wgmma";
  constexpr std::size_t kLength = sizeof(kName) - 1;
  if (forced == nullptr || std::strncmp(forced, kName, kLength) != 0) return 0;
  if (forced[kLength] == '\0') return 1;
  const int shares = forced[kLength] == ':' ? std::atoi(forced + kLength + 1) : 0;
  return 1 <= shares && shares <= kMaxKeyShares ? shares : 0;
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null. "mma_sync", "wgmma", "wgmma:8" and "split_kv" take that family
// wherever it serves the call; anything else leaves the choice as it is.
inline FamilyChoice choose_family(const FamilyQuery& query, const char* forced) {
  const auto is_forced = [forced](const char* name) { return forced != nullptr && std::strcmp(forced, name) == 0; };
  const int wanted = forced_key_shares(forced);
  if (is_forced("mma_sync")) return {Family::kMmaSync};
  if (wanted > 0 && wgmma_serves(query)) return {Family::kWgmma, query.share_tiles == 0 ? 1 : wanted};
  if (is_forced("split_kv") && query.may_split) return {Family::kSplitKv};
  return fastest_family(query);
}

// Of the backward, the deterministic one too, for head dims above 32.
inline Family choose_backward_family(int capability, int head_dim, const char* forced) {
  const bool declined = forced != nullptr && std::strcmp(forced, "mma_sync") == 0;
  return capability == kWgmmaCapability && head_dim > 32 && !declined ? Family::kWgmma : Family::kMmaSync;
}

// The fp32 tiles in which a family's backward accumulates dQ.
struct DqTile {
  int block_m;
  int head_dim;
};

constexpr DqTile dq_tile(Family family, int head_dim, int value_dim) {
  if (family == Family::kWgmma) {
    const Sm90BwdTile tile = sm90_bwd_tile(head_dim, value_dim);
    return {tile.block_m, tile.head_dim};
  }
  return {bwd_tile(head_dim).block_m, bwd_tile(head_dim).head_dim};
}

}  // namespace plan
}  // namespace flash
