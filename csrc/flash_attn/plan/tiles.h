// The only place where tile sizes and warp counts of the forward and the list of head dims exist: plan/bwd_tiles.h has
// the backward's, plan/kv_tiles.h those of the KV cache. Plain C++17.
#pragma once

#include <cstdint>

#include "params/dtype.h"

namespace flash {
namespace plan {

struct FwdTile {
  int head_dim;       // the padded head dim that this tile is for
  int block_m;        // query rows per CTA
  int block_n;        // keys per step
  int warps;          // each owns col_warps * block_m / warps rows
  int blocks_per_sm;  // occupancy that the register budget is compiled for
  int col_warps = 1;  // warps that share rows: each has some of the keys of S, and some columns of O
};

constexpr int kMaxHeadDim = 512;
constexpr int kNumHeadDims = 7;

// kShort: half the rows per CTA, for problems with few or short rows (takes_short_tile()).
// kSoftcap, kAlibi: one of them alone, with a positive scale and without dropout, in the wgmma family; kScoreMod: all
// other calls with score modifiers there. In the mma.sync family every variant has score modifiers.
// kMasked: in the wgmma family, masked calls of head dims with a separate tile for them; kPlain has no mask there.
// kOneWave: in the wgmma family, in place of kPlain and kShort, for calls with at most one wave of m_blocks and for KV
// splits. kScoreMod, kSoftcap and kAlibi run both themselves; kDropout runs calls of one wave and never splits.
// kDirect: kOneWave's tile, for the calls among them that need no schedule: dense, without splits and pages.
// kStatic: kOneWave's tile without a scheduler, for a few whole waves; a thread block has one m_block of each wave.
// kListed: blocks by list, of a mask as data (core/block_list.h), with dropout and score modifiers as run-time options.
// kListedShort: kListed with fewer rows a tile, for masks of blocks.
// kBiased: kListed with biases as data; whole blocks take a faster loop if boxes of 16-bit elements are all they add.
enum class FwdVariant {
  kPlain,
  kShort,
  kDropout,
  kScoreMod,
  kMasked,
  kOneWave,
  kSoftcap,
  kAlibi,
  kDirect,
  kListed,
  kStatic,
  kBiased,
  kListedShort,
};

constexpr const char* variant_name(FwdVariant variant) {
  switch (variant) {
    case FwdVariant::kPlain: return "plain";
    case FwdVariant::kShort: return "short";
    case FwdVariant::kDropout: return "dropout";
    case FwdVariant::kScoreMod: return "score_mod";
    case FwdVariant::kMasked: return "masked";
    case FwdVariant::kOneWave: return "one_wave";
    case FwdVariant::kSoftcap: return "softcap";
    case FwdVariant::kAlibi: return "alibi";
    case FwdVariant::kDirect: return "direct";
    case FwdVariant::kListed: return "listed";
    case FwdVariant::kStatic: return "static";
    case FwdVariant::kBiased: return "biased";
    case FwdVariant::kListedShort: return "listed_short";
  }
  return "";
}

// Whether the index of a thread block tells its work tiles: there is no scheduler.
constexpr bool has_static_tiles(FwdVariant variant) {
  return variant == FwdVariant::kDirect || variant == FwdVariant::kStatic;
}

constexpr bool modifies_scores(FwdVariant variant) {
  return variant == FwdVariant::kScoreMod || variant == FwdVariant::kSoftcap || variant == FwdVariant::kAlibi;
}

constexpr bool visits_by_list(FwdVariant variant) {
  return variant == FwdVariant::kListed || variant == FwdVariant::kListedShort || variant == FwdVariant::kBiased;
}

// mma.sync family, sm_80 and up. Each fits the 99 KB of shared memory of sm_86/89/120, at head dim 512 all but kPlain.
constexpr FwdTile kFwdTiles[3][kNumHeadDims] = {
    // kPlain
    {
        {32, 128, 64, 4, 3},
        {64, 128, 128, 4, 2},
        {96, 128, 64, 4, 2},
        {128, 128, 64, 4, 2},
        {192, 128, 64, 8, 1},
        {256, 64, 64, 4, 2},
        {512, 64, 32, 8, 1, 2},
    },
    // kShort
    {
        {32, 64, 128, 4, 3},
        {64, 64, 128, 4, 3},
        {96, 64, 64, 4, 3},
        {128, 64, 64, 4, 3},
        {192, 64, 64, 4, 2},
        {256, 64, 64, 4, 2},
        {512, 32, 32, 4, 2, 2},
    },
    // kDropout: the generator's registers leave room for fewer scores
    {
        {32, 128, 64, 4, 2},
        {64, 128, 64, 4, 2},
        {96, 128, 32, 4, 2},
        {128, 128, 32, 4, 2},
        {192, 128, 64, 8, 1},
        {256, 64, 64, 4, 2},
        {512, 32, 32, 4, 2, 2},
    },
};

constexpr int head_dim_index(int head_dim) {
  int index = 0;
  while (index + 1 < kNumHeadDims && kFwdTiles[0][index].head_dim < head_dim) ++index;
  return index;
}

// The tile of the smallest head dim that holds `head_dim` (<= kMaxHeadDim).
constexpr FwdTile fwd_tile(int head_dim, FwdVariant variant) {
  return kFwdTiles[static_cast<int>(variant)][head_dim_index(head_dim)];
}

// Whether kShort has a kernel: only where its m_blocks are shorter.
constexpr bool mma_sync_has_short(int head_dim) {
  return fwd_tile(head_dim, FwdVariant::kShort).block_m < fwd_tile(head_dim, FwdVariant::kPlain).block_m;
}

// What warps that share rows exchange: P, and a number of each row and warp.
constexpr int fwd_exchange_bytes(const FwdTile& tile, Dtype dtype) {
  return tile.col_warps == 1 ? 0 : tile.block_m * (dtype_bytes(dtype) * tile.block_n + 4 * tile.col_warps);
}

// Q, K, V; O is staged in Q's buffer.
constexpr int fwd_smem_bytes(const FwdTile& tile, Dtype dtype) {
  const int elements = tile.head_dim * (tile.block_m + 2 * tile.block_n);
  return dtype_bytes(dtype) * elements + fwd_exchange_bytes(tile, dtype);
}

// wgmma family, sm_90a: a producer warpgroup and block_m / 64 consumer warpgroups per consumer group, one CTA per SM.
struct Sm90FwdTile {
  int head_dim;
  int block_m;          // query rows per tile; 64 for each consumer warpgroup
  int block_n;          // keys per step
  int kv_stages;        // of K and of V
  int q_stages;         // of Q: with 2, the next tile's Q is loaded while this one is computed
  bool overlaps;        // Q K^T of the next tile is issued before the last P V of this one completes; needs 2 q_stages
  int consumer_groups;  // each with separate work tiles: with 2, one computes while the
                        // other starts or ends
  int head_dim_v = 0;   // of V and O; 0: head_dim
  int o_cols = 0;       // columns of O staged at a time in a separate buffer; 0: O is staged in Q's buffer
  int bias_stages = 0;  // of kBiasBoxBytes of each row of a bias

  constexpr int value_dim() const { return head_dim_v > 0 ? head_dim_v : head_dim; }
};

constexpr int kSm90FirstHeadDim = 1;  // index of the smallest head dim of this family
constexpr int kNumSm90FwdHeadDims = 5;

constexpr Sm90FwdTile kSm90FwdTiles[4][kNumSm90FwdHeadDims] = {
    // kPlain
    {
        {64, 192, 128, 3, 2, true, 1},
        {96, 128, 128, 2, 2, false, 1},
        {128, 192, 80, 3, 2, false, 1},
        {192, 128, 64, 3, 1, false, 1, 0, 64},
        {256, 128, 64, 2, 1, false, 1, 0, 128},
    },
    // kShort
    {
        {64, 128, 64, 4, 2, true, 2},
        {96, 128, 128, 2, 2, false, 1},
        {128, 128, 128, 2, 2, false, 1},
        {192, 128, 96, 2, 1, false, 1, 0, 64},
        {256, 128, 64, 2, 1, false, 1, 0, 128},
    },
    // kDropout
    {
        {64, 128, 128, 3, 2, true, 1},
        {96, 128, 128, 2, 2, false, 1},
        {128, 192, 64, 3, 2, false, 1},
        {192, 128, 96, 2, 1, false, 1, 0, 64},
        {256, 128, 64, 2, 1, false, 1, 0, 128},
    },
    // kScoreMod, kSoftcap, kAlibi: at head dim 64 two consumers have the registers for it, three do not
    {
        {64, 128, 128, 3, 2, true, 1},
        {96, 128, 128, 2, 2, false, 1},
        {128, 128, 128, 2, 2, false, 1},
        {192, 128, 96, 2, 1, false, 1, 0, 64},
        {256, 128, 64, 2, 1, false, 1, 0, 128},
    },
};

constexpr int kMaxWgmmaHeadDim = kSm90FwdTiles[0][kNumSm90FwdHeadDims - 1].head_dim;

// kMasked, of the one head dim whose masked calls have a separate tile: the rows of a warpgroup begin at multiples
// of 64, and so do the keys that a causal mask or a window of whole blocks leaves unmasked.
constexpr Sm90FwdTile kSm90MaskedTile = {128, 192, 64, 4, 2, false, 1};

// kOneWave: as fast as one m_block alone on its multiprocessor, while all of them load keys at the same time. So there
// is no second consumer group, and at head dim 128 blocks are smaller and stages more.
constexpr Sm90FwdTile kSm90OneWaveTiles[kNumSm90FwdHeadDims] = {
    {64, 128, 128, 3, 2, true, 1},         {96, 128, 128, 2, 2, false, 1},         {128, 128, 64, 5, 2, false, 1},
    {192, 128, 96, 2, 1, false, 1, 0, 64}, {256, 128, 64, 2, 1, false, 1, 0, 128},
};

// Q and K of up to 192 columns with V and O of up to 128, kPlain (docs/tuning/fwd_sm90.md). Other pairs of head dims
// take the kernels of the greater one.
constexpr Sm90FwdTile kSm90ValueDimTile = {192, 192, 64, 2, 2, false, 1, 128};

// Forward of head dims above kMaxWgmmaHeadDim: two consumer warpgroups of the same 64 rows share the scores by keys and
// the output by columns (kernels/sm90/wide_fwd_kernel.h). Q, K and V come in chunks of one size: of Q and K 64 rows x
// 64 columns, of V 16 keys x half of the columns. Consumers hold the first chunks of Q in registers, V gets their
// memory.
constexpr int kSm90WideHeadDim = 512, kSm90WideBlockM = 64, kSm90WideBlockN = 64, kSm90WideThreads = 384;
constexpr int kSm90WideChunkCols = 64, kSm90WidePartKeys = 16, kSm90WideHeldChunks = 2;
constexpr int kSm90WideValueSlots = 6;  // for each half of the columns
// Of the backward (kernels/sm90/wide_bwd/), which streams chunks: of Q and of dO that only scores read, of V for dQ.
constexpr int kSm90WideOtherSlots = 3, kSm90WideBwdValueSlots = 5;

// Whether head dims need the wide kernel above.
constexpr bool is_wide(int max_head_dim) { return max_head_dim > kMaxWgmmaHeadDim; }

// kListed: blocks are whole strips of kMaskStrip keys. Other head dims run in the next greater kernel.
constexpr Sm90FwdTile kSm90ListedTiles[] = {
    {64, 192, 128, 3, 2, true, 1},
    kSm90MaskedTile,
    {256, 128, 64, 2, 1, false, 1, 0, 128},
};

// kListedShort: a block of 128 rows is one tile. A tile of 192 rows visits what either of two rows of blocks lists.
constexpr Sm90FwdTile kSm90ListedShortTiles[] = {
    {64, 128, 128, 3, 2, true, 1},
    {128, 128, 128, 2, 2, false, 1},
    {256, 128, 64, 2, 1, false, 1, 0, 128},
};

// kBiased: 192 rows need a third fewer bytes of K, V and a 16-bit bias per score than 128 rows do.
constexpr int kBiasBoxBytes = 128;
constexpr Sm90FwdTile kSm90BiasedTiles[] = {
    {64, 192, 128, 2, 2, true, 1, 0, 0, 4},
    {128, 192, 64, 3, 1, false, 1, 0, 64, 2},
    {256, 128, 64, 2, 1, false, 1, 0, 64, 1},
};

// Of head dims that it has a tile for: up to kMaxWgmmaHeadDim.
constexpr Sm90FwdTile sm90_listed_tile(int head_dim, FwdVariant variant) {
  const Sm90FwdTile* tile = variant == FwdVariant::kBiased        ? kSm90BiasedTiles
                            : variant == FwdVariant::kListedShort ? kSm90ListedShortTiles
                                                                  : kSm90ListedTiles;
  while (tile->head_dim < head_dim) ++tile;
  return *tile;
}

constexpr Sm90FwdTile sm90_fwd_tile(int head_dim, FwdVariant variant) {
  if (variant == FwdVariant::kMasked) {
    if (head_dim_index(head_dim) == head_dim_index(kSm90MaskedTile.head_dim)) return kSm90MaskedTile;
    variant = FwdVariant::kPlain;
  }
  if (visits_by_list(variant)) return sm90_listed_tile(head_dim, variant);
  if (variant == FwdVariant::kOneWave || has_static_tiles(variant)) {
    Sm90FwdTile tile = kSm90OneWaveTiles[head_dim_index(head_dim) - kSm90FirstHeadDim];
    if (variant == FwdVariant::kDirect) tile.q_stages = 1, tile.overlaps = false;
    return tile;
  }
  if (modifies_scores(variant)) variant = FwdVariant::kScoreMod;
  return kSm90FwdTiles[static_cast<int>(variant)][head_dim_index(head_dim) - kSm90FirstHeadDim];
}

// Whether kernels of a tile read paged K and V, 32 rows a lookup, by two idle producer warps: tiles of two consumer
// groups, kDropout, kDirect and kStatic have none. Kernels that visit by list read no pages.
constexpr bool sm90_reads_pages(const Sm90FwdTile& tile, FwdVariant variant) {
  return tile.consumer_groups == 1 && variant != FwdVariant::kDropout && !has_static_tiles(variant) &&
         !visits_by_list(variant) && tile.block_n % 32 == 0;
}

// Whether masked calls of this head dim have a separate tile.
constexpr bool sm90_splits_masked(int head_dim) {
  const Sm90FwdTile plain = sm90_fwd_tile(head_dim, FwdVariant::kPlain);
  const Sm90FwdTile masked = sm90_fwd_tile(head_dim, FwdVariant::kMasked);
  return plain.block_n != masked.block_n;
}

// A variant exists only where its kernel differs from another variant's.
constexpr bool sm90_has_variant(int head_dim, FwdVariant variant) {
  const Sm90FwdTile plain = sm90_fwd_tile(head_dim, FwdVariant::kPlain);
  const Sm90FwdTile own = sm90_fwd_tile(head_dim, variant);
  if (variant == FwdVariant::kShort) {
    return own.consumer_groups != plain.consumer_groups || own.block_m != plain.block_m;
  }
  if (variant == FwdVariant::kDirect) return plain.head_dim == 64 || plain.head_dim == 128;
  if (variant == FwdVariant::kStatic) return plain.head_dim == 128;  // at 64 kShort holds two m_blocks at a time
  if (variant == FwdVariant::kListedShort && own.block_m == sm90_fwd_tile(head_dim, FwdVariant::kListed).block_m) {
    return false;
  }
  if (visits_by_list(variant)) return own.head_dim == plain.head_dim;
  return variant != FwdVariant::kMasked || sm90_splits_masked(head_dim);
}

// Whether two thread blocks of this kernel may load K and V for each other (pairs_thread_blocks()).
constexpr bool may_pair_thread_blocks(int head_dim, FwdVariant variant) {
  return has_static_tiles(variant) && sm90_has_variant(head_dim, FwdVariant::kStatic);
}

// One warpgroup for each 64 rows of each consumer group, and a producer warpgroup; without a scheduler a load warp.
constexpr int sm90_fwd_threads(const Sm90FwdTile& tile, FwdVariant variant) {
  return 128 * tile.consumer_groups * (tile.block_m / 64) + (has_static_tiles(variant) ? 32 : 128);
}

// Columns of a swizzle atom of a 16-bit tile, and of the TMA box that writes it: rows of 128 or 64 bytes.
constexpr int swizzle_atom_cols(int cols) { return cols % 64 == 0 ? 64 : 32; }

}  // namespace plan
}  // namespace flash
