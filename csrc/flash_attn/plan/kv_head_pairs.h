// Which decode kernels may have tiles of two K/V heads. Plain C++17.
#pragma once

#include "plan/kv_tiles.h"

namespace flash {
namespace plan {

// The bytes that one head has of a key are few, and where another thread block reads those beside them, at another
// time, device memory is slower (docs/tuning/decode.md).
constexpr bool kv_may_pair_heads(const KvTile& tile) {
  return tile.head_dim * tile.kv_bytes <= 128 && tile.rows() == 16;
}

}  // namespace plan
}  // namespace flash
