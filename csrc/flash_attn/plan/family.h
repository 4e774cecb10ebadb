// Which kernel family serves a call. Plain C++17.
#pragma once

#include <cstring>

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
  bool is_paged;
};

constexpr bool wgmma_serves(const FamilyQuery& query) {
  return query.capability == kWgmmaCapability && query.head_dim > 32 && !query.is_paged;
}

// `forced`: the value of FLASH_ATTN_FAMILY, or null. "mma_sync" takes the first family wherever it could be the second;
// anything else leaves the choice as it is.
inline Family choose_family(const FamilyQuery& query, const char* forced) {
  if (forced != nullptr && std::strcmp(forced, "mma_sync") == 0) return Family::kMmaSync;
  return wgmma_serves(query) ? Family::kWgmma : Family::kMmaSync;
}

}  // namespace plan
}  // namespace flash
