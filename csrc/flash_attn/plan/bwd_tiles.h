// Tiles of the backward kernels of each family, by head dim (plan/tiles.h has the forward's). Plain C++17.
#pragma once

#include "plan/tiles.h"

namespace flash {
namespace plan {

struct BwdTile {
  int head_dim;
  int block_m;  // query rows per step
  int block_n;  // keys per CTA
  int warps;
  int sdp_warps_m;  // warps along the rows of S and dP (block_m x block_n); the others of sdp_warps() along the columns
  int dkv_warps_m;  // of dK and dV (block_n x head_dim)
  int dq_warps_m;   // of dQ (block_m x head_dim)
  int blocks_per_sm;
  int v_register_cols = 0;  // first columns of V in registers; with any, Q and dO have one buffer each, which is filled
                            // as soon as its last reader is done
  int half_warps = 0;       // this many warps compute S, as many others dP; 0: all warps compute both

  constexpr int sdp_warps() const { return half_warps > 0 ? half_warps : warps; }  // of S, and of dP
};

// Warp grids are chosen for the least shared memory traffic per step; see docs/tuning/bwd_sm80.md.
constexpr BwdTile kBwdTiles[kNumHeadDims] = {
    {32, 64, 128, 4, 2, 4, 2, 2},       {64, 64, 64, 4, 2, 2, 2, 3},  {96, 64, 64, 4, 2, 2, 2, 2},
    {128, 64, 64, 4, 2, 2, 2, 2},       {192, 64, 96, 8, 4, 2, 2, 1}, {256, 64, 64, 8, 4, 2, 2, 1},
    {512, 32, 32, 8, 2, 2, 2, 1, 0, 4},
};

// Where shared memory is too small for these: 99 KB on sm_86, 89 and 120. At 192 and 256 with 64 keys: with 32,
// additions to dQ would be the bound. At 32 the row above fits, but only with one CTA an SM.
constexpr BwdTile kSmallBwdTiles[] = {
    {32, 64, 64, 4, 2, 2, 2, 3},
    {192, 64, 64, 8, 2, 2, 2, 1, 192},
    {256, 32, 64, 8, 2, 2, 1, 1, 128},
    {512, 16, 32, 8, 1, 2, 1, 1, 0, 2},
};

// A row of kSmallBwdTiles, or null.
constexpr const BwdTile* small_bwd_tile(int head_dim) {
  for (const BwdTile& tile : kSmallBwdTiles) {
    if (head_dim_index(tile.head_dim) == head_dim_index(head_dim)) return &tile;
  }
  return nullptr;
}

constexpr BwdTile bwd_tile(int head_dim, bool is_small = false) {
  return is_small && small_bwd_tile(head_dim) ? *small_bwd_tile(head_dim) : kBwdTiles[head_dim_index(head_dim)];
}

// The random bits of dropout do not fit the registers of three CTAs.
constexpr int bwd_blocks_per_sm(const BwdTile& tile, bool has_dropout) {
  return has_dropout && tile.blocks_per_sm > 2 ? 2 : tile.blocks_per_sm;
}

// K, the columns of V that are not in registers, stages x (Q, dO), P and dS.
constexpr int bwd_smem_bytes(const BwdTile& tile, int stages, Dtype dtype) {
  const int kv_cols = 2 * tile.head_dim - tile.v_register_cols;
  const int elements =
      tile.block_n * kv_cols + 2 * stages * tile.block_m * tile.head_dim + 2 * tile.block_m * tile.block_n;
  return dtype_bytes(dtype) * elements;
}

// wgmma family: a producer warpgroup and two consumer warpgroups, at head dim 64 one more for dQ; one CTA per SM.
struct Sm90BwdTile {
  int head_dim;
  int block_m;           // query rows per step
  int block_n;           // keys per CTA: 128, half of them for each consumer, or 64, whose steps they split by role
  int stages;            // of Q and of dO
  int head_dim_v = 0;    // of V and O; 0: head_dim
  bool dq_pass = false;  // has_dq_pass() though dK and dV leave registers for dQ
  bool one_k = false;    // not has_early_k() though shared memory has room

  constexpr int value_dim() const { return head_dim_v > 0 ? head_dim_v : head_dim; }
};

// Whether dQ has a dedicated warpgroup: if dK and dV of 128 keys leave the registers for it, unless steps are long.
constexpr bool has_dq_warpgroup(const Sm90BwdTile& tile) {
  return tile.block_n == 128 && tile.head_dim * tile.block_m <= 64 * 64;
}

// Row ranges of a K or V tile with separate barriers: with a dQ warpgroup those of each consumer.
constexpr int sm90_bwd_kv_parts(int head_dim, int block_m) { return head_dim * block_m <= 64 * 64 ? 2 : 1; }

// Whether dQ has a separate kernel: if dK and dV leave no registers for it, if with 64 keys fp32 additions to dQ
// would be the bound, or where sequences are so short that clearing and converting its sum takes too long.
constexpr bool has_dq_pass(const Sm90BwdTile& tile) {
  return tile.block_n == 64 || tile.head_dim > 128 || tile.dq_pass;
}

// Whether P waits for dP in shared memory in the dK and dV pass: for the other consumer, or when registers run out.
constexpr bool sm90_dkv_has_p_in_smem(const Sm90BwdTile& tile) { return tile.block_n == 64 || tile.head_dim > 128; }

// The dQ pass: rows of a work tile, 64 for each consumer; keys of a step; stages of K and of V; columns of V in a load.
// V is loaded in whole blocks, or in halves where two blocks do not fit. A third stage of K, where it fits, lets S of
// the next block start before dQ releases K.
constexpr int kSm90DqBlockM = 128;
constexpr int kSm90DqBlockN = 64;
constexpr int kSm90DqVStages = 2;
constexpr int sm90_dq_k_stages(const Sm90BwdTile& tile) { return tile.head_dim > 192 ? 2 : 3; }
constexpr int sm90_dq_value_cols(const Sm90BwdTile& tile) {
  return tile.value_dim() > 192 ? tile.value_dim() / 2 : tile.value_dim();
}

// A producer warpgroup, two consumers, and the one of dQ.
constexpr int sm90_bwd_threads(const Sm90BwdTile& tile) { return 128 * (3 + has_dq_warpgroup(tile)); }

constexpr int kSm90DqWarps = 4;  // that compute a step's dQ unless it has a separate kernel

constexpr int kNumSm90BwdTiles = 4;
constexpr Sm90BwdTile kSm90BwdTiles[kNumSm90BwdTiles] = {
    {64, 64, 128, 3},
    {128, 64, 128, 2},
    {192, 64, 64, 2},
    {256, 64, 64, 2},
};

// Short dense batches of this head dim: a CTA sums dQ of whole heads in shared memory (prefers_dq_in_smem()).
constexpr Sm90BwdTile kSm90SharedDqTile = {64, 64, 128, 2};
constexpr int kSharedDqRows = 512;
// Long sequences (prefers_long_tile()): at head dim 64 half as many steps, at 128 one buffer of K.
constexpr Sm90BwdTile kSm90TallBwdTile = {64, 128, 128, 2};
constexpr Sm90BwdTile kSm90OneKBwdTile = {128, 64, 128, 2, 0, false, true};
constexpr Sm90BwdTile sm90_long_bwd_tile(int head_dim) {
  return head_dim <= kSm90TallBwdTile.head_dim ? kSm90TallBwdTile : kSm90OneKBwdTile;
}
// Short sequences of this head dim: dQ in a separate kernel (prefers_dq_pass()).
constexpr Sm90BwdTile kSm90TwoPassTile = {128, 64, 128, 4, 128, true};
// With dropout or score modifiers, dK and dV of 64 keys in one consumer take too many registers.
constexpr Sm90BwdTile kSm90BwdValueDimTile = {192, 64, 128, 2, 128};
constexpr Sm90BwdTile kSm90BwdGeneralValueDimTile = {192, 64, 64, 2, 128};

// Whether the one pair of tiles with its own value dim is for these head dims.
constexpr bool is_value_dim_pair(int head_dim, int value_dim) {
  constexpr int kHeadDim = kSm90ValueDimTile.head_dim, kValueDim = kSm90ValueDimTile.value_dim();
  static_assert(kSm90BwdValueDimTile.head_dim == kHeadDim && kSm90BwdValueDimTile.value_dim() == kValueDim);
  return kValueDim < head_dim && head_dim <= kHeadDim && value_dim <= kValueDim;
}

// The tile of the smallest head dim that holds both. `is_general`: with dropout or score modifiers.
constexpr Sm90BwdTile sm90_bwd_tile(int head_dim, int value_dim, bool is_general = false) {
  if (is_value_dim_pair(head_dim, value_dim)) return is_general ? kSm90BwdGeneralValueDimTile : kSm90BwdValueDimTile;
  const int wide = head_dim > value_dim ? head_dim : value_dim;
  int index = 0;
  while (index + 1 < kNumSm90BwdTiles && kSm90BwdTiles[index].head_dim < wide) ++index;
  return kSm90BwdTiles[index];
}

// The tile of a call with a mask. Lists do not tell in which order their tiles would add to dQ: in deterministic mode
// it has a separate kernel, and that has one head dim.
constexpr Sm90BwdTile sm90_listed_bwd_tile(int max_head_dim, bool deterministic) {
  constexpr int kOnePassHeadDim = 128;
  const bool one_pass = max_head_dim <= kOnePassHeadDim && !deterministic;
  const int head_dim = one_pass ? max_head_dim : kMaxWgmmaHeadDim;
  return sm90_bwd_tile(head_dim, head_dim);
}

// Whether kernels of these head dims take masks.
constexpr bool has_listed_bwd(int head_dim, int value_dim) {
  return head_dim == value_dim && (sm90_listed_bwd_tile(head_dim, false).head_dim == head_dim);
}

}  // namespace plan
}  // namespace flash
