// Which kernel family serves a call. Plain C++17.
#pragma once

#include <cstdint>
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
  int64_t keys;       // of one sequence
  int multiprocessors;
  bool may_split;       // without dropout, sinks and max_logit
  int64_t split_rows;   // packed rows of a K/V head
  int64_t split_tiles;  // of these, of all sequences and K/V heads: kv_row_tiles()
  int64_t seen_keys;    // at most so many by a tile of rows
};

// The kernels of this head dim serve lesser ones too: columns that do not exist are never read or written.
constexpr int kLeastWgmmaHeadDim = kSm90FwdTiles[0][0].head_dim;

constexpr int wgmma_head_dim(int head_dim) { return head_dim < kLeastWgmmaHeadDim ? kLeastWgmmaHeadDim : head_dim; }

constexpr bool wgmma_serves(const FamilyQuery& query) { return query.capability == kWgmmaCapability; }

// One wave of short tiles: there the smaller tiles and the plain launch of mma.sync are faster (docs/tuning.md).
constexpr int kSmallKeys = 512;
constexpr int kSmallHeadDim = 128;

constexpr bool is_small(const FamilyQuery& query) {
  return query.head_dim <= kSmallHeadDim && query.keys <= kSmallKeys && query.row_tiles <= query.multiprocessors;
}

// Few rows against many keys: tiles of rows leave multiprocessors idle, while shares of keys fill them. Estimates in
// picoseconds, of an H200; their ratios are what counts (docs/tuning.md). A wave of row tiles takes a time for each
// key; shares of keys take the time of all tiles over all multiprocessors, and the merge. Tiles of more than 16 packed
// rows are slow, and so is their merge.
constexpr int64_t kMergeCost = 4000000, kLargeMergeCost = 15000000;

constexpr int64_t row_tiles_cost(const FamilyQuery& query) {
  const int64_t waves = (query.row_tiles + query.multiprocessors - 1) / query.multiprocessors;
  const bool wgmma = wgmma_serves(query) && !is_small(query);
  return waves * query.seen_keys * (wgmma ? 6000 + 50 * wgmma_head_dim(query.head_dim) : 2000 + 100 * query.head_dim);
}

constexpr int64_t split_cost(const FamilyQuery& query) {
  const bool is_large = query.split_rows > kv_tile(query.head_dim, 0).rows();
  const int64_t work = query.seen_keys * query.split_tiles * query.head_dim / query.multiprocessors;
  return is_large ? 240 * work + kLargeMergeCost : 120 * work + kMergeCost;
}

constexpr bool prefers_split(const FamilyQuery& query) {
  return query.may_split && split_cost(query) < row_tiles_cost(query);
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null. "mma_sync", "wgmma" and "split_kv" take that family wherever it
// serves the call; anything else leaves the choice as it is.
inline Family choose_family(const FamilyQuery& query, const char* forced) {
  const auto is_forced = [forced](const char* name) { return forced != nullptr && std::strcmp(forced, name) == 0; };
  if (is_forced("mma_sync")) return Family::kMmaSync;
  if (is_forced("wgmma") && wgmma_serves(query)) return Family::kWgmma;
  if (is_forced("split_kv") && query.may_split) return Family::kSplitKv;
  if (prefers_split(query)) return Family::kSplitKv;
  return wgmma_serves(query) && !is_small(query) ? Family::kWgmma : Family::kMmaSync;
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
