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
};

constexpr int kWgmmaCapability = 90;

// What the choice depends on.
struct FamilyQuery {
  int capability;  // 10 * major + minor
  int head_dim;
  int64_t row_tiles;  // of 128 rows, of all heads
  int64_t keys;       // of one sequence
  int multiprocessors;
};

constexpr bool wgmma_serves(const FamilyQuery& query) {
  return query.capability == kWgmmaCapability && query.head_dim > 32;
}

// One wave of short tiles: there the smaller tiles and the plain launch of mma.sync are faster (docs/tuning.md).
constexpr int kSmallKeys = 512;
constexpr int kSmallHeadDim = 128;

constexpr bool is_small(const FamilyQuery& query) {
  return query.head_dim <= kSmallHeadDim && query.keys <= kSmallKeys && query.row_tiles <= query.multiprocessors;
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null. "mma_sync" and "wgmma" take that family wherever it serves the
// call; anything else leaves the choice as it is.
inline Family choose_family(const FamilyQuery& query, const char* forced) {
  const auto is_forced = [forced](const char* name) { return forced != nullptr && std::strcmp(forced, name) == 0; };
  if (!wgmma_serves(query) || is_forced("mma_sync")) return Family::kMmaSync;
  return is_small(query) && !is_forced("wgmma") ? Family::kMmaSync : Family::kWgmma;
}

// Of the backward. The deterministic one too.
constexpr bool wgmma_serves_backward(const FamilyQuery& query) {
  return wgmma_serves(query) && query.head_dim <= kMaxSm90BwdHeadDim;
}

inline Family choose_backward_family(const FamilyQuery& query, const char* forced) {
  const bool declined = forced != nullptr && std::strcmp(forced, "mma_sync") == 0;
  return wgmma_serves_backward(query) && !declined ? Family::kWgmma : Family::kMmaSync;
}

// The fp32 tiles in which a family's backward accumulates dQ.
struct DqTile {
  int block_m;
  int head_dim;
};

constexpr DqTile dq_tile(Family family, int head_dim) {
  if (family == Family::kWgmma) return {sm90_bwd_tile(head_dim).block_m, sm90_bwd_tile(head_dim).head_dim};
  return {bwd_tile(head_dim).block_m, bwd_tile(head_dim).head_dim};
}

}  // namespace plan
}  // namespace flash
