// Which decode kernels may have tiles of two K/V heads. Plain C++17.
#pragma once

#include "plan/kv_tiles.h"

namespace flash {
namespace plan {

// One head has few bytes of a key. Device memory is slower if another thread block reads the adjacent ones at another
// time (docs/tuning/decode.md).
constexpr bool kv_may_pair_heads(const KvTile& tile) {
  return tile.head_dim * tile.kv_bytes <= 128 && tile.rows() == 16;
}

}  // namespace plan
}  // namespace flash
