// Policy rows of the wgmma forward: the techniques that the kernel of each (head dim, variant) uses. Plain C++17.
// A cell is true because it was measured to be faster on that kernel: kFwdMeasurements has the figures.
// tests/cpp/test_fwd_policy_sm90.cpp prints the table and checks it.
#pragma once

#include "core/mask_factors.h"
#include "plan/tiles.h"

namespace flash {
namespace plan {

namespace fwd_feature {
enum Feature : uint32_t {
  // Compiled for calls without a mask. Without the code for skipped blocks it is faster, though its loops have the same
  // instructions.
  kNoMask = 1u << 0,
  // S of the next tile's first block is issued directly after the last P V of this one, before O is stored.
  kIssueNextQkEarly = 1u << 1,
  // An idle warp stores O of all consumers. Score modifiers and dropout have slower loops with it.
  kHasStoreWarp = 1u << 2,
  // The next tile is fetched when the loads of this one end, so that no tile waits for a long one while other SMs idle
  // (not with paged K and V). Short rows gain nothing, score modifiers lose 1.5 %, and without a mask tiles are equal.
  kFetchNextTileLate = 1u << 3,
  // Tiles with a left window bound begin their unmasked blocks at common multiples (KvBlockOrder::align_unmasked()).
  kAlignUnmasked = 1u << 4,
  // Column bounds of masked blocks, and the n_block itself, stay in registers. Elsewhere ptxas spills for it or orders
  // the unmasked loop worse.
  kMaskBoundsInRegs = 1u << 5,
  // All exponentials run before the wait for P V: a long P V hides them.
  kExpBeforePvWait = 1u << 6,
  // Unmasked blocks are exponentiated against the row max so far and checked afterwards. Not where two consumers of 128
  // keys, or three in ping-pong, wait for each other: the check lengthens the path from S to P.
  kSpeculativeExp = 1u << 7,
  // Masked blocks too: three consumers of 64 keys have nothing else to do while one of them computes maxima.
  kSpeculativeOnMasked = 1u << 8,
  // Unmasked blocks are exponentiated after the wait for P V: other consumers' GEMMs run meanwhile. Not in kMasked,
  // where the exponentials are complete before it.
  kExpAfterPvWait = 1u << 9,
  // Softcap: a bound by sums of squares is tested before exact maxima. Heads up to 96 lose by it.
  kCheckBoundByNorm = 1u << 10,
  // Warpgroup order barrier: consumers issue their GEMMs one after the other. Without it, it is left to chance whether
  // one multiplies while the other exponentiates.
  kPingPong = 1u << 11,
  // Dropout of packed pairs of P, with the columns' random bits made by a producer warp.
  kPackedDropout = 1u << 12,
  // Keep masks of the next block are made between the wgmmas of P V.
  kRandomBitsInPv = 1u << 13,
  // Supports KV splits. A separate variant among kernels without score modifiers, because the branch costs them.
  kSplitKv = 1u << 14,
  // Warp-uniform conditions are ints: ptxas moves a bool by PRMT. Other loops are better with bools.
  kIntFlags = 1u << 15,
};
constexpr int kCount = 16;
}  // namespace fwd_feature

struct FwdPolicy {
  int head_dim;
  uint32_t features;
  // Partial sums per row, so that a softcap step does not end in a chain of additions; above head dim 128 there are no
  // registers for four. 0: no such kernel (sm90_has_variant()).
  int row_sums;

  constexpr bool has(fwd_feature::Feature feature) const { return (features & feature) != 0; }
};

constexpr int kNumFwdVariants = 13;

namespace fwd_policy_table {

using namespace fwd_feature;

constexpr uint32_t kLateAligned = kFetchNextTileLate | kAlignUnmasked;
constexpr uint32_t kSpeculativeAfterPv = kSpeculativeExp | kExpAfterPvWait;
constexpr uint32_t kEarlyStored = kIssueNextQkEarly | kHasStoreWarp;

constexpr FwdPolicy kRows[kNumFwdVariants][kNumSm90FwdHeadDims] = {
    // kPlain
    {
        {64, kLateAligned | kMaskBoundsInRegs | kSpeculativeAfterPv | kIntFlags, 1},
        {96, kLateAligned | kMaskBoundsInRegs | kIntFlags, 1},
        {128, kNoMask | kMaskBoundsInRegs | kSpeculativeAfterPv | kIntFlags, 1},
        {192, kLateAligned | kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
        {256, kLateAligned | kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
    },
    // kShort
    {
        {64, kMaskBoundsInRegs | kSpeculativeAfterPv | kIntFlags, 1},
        {96, 0, 0},
        {128, kEarlyStored | kMaskBoundsInRegs | kIntFlags, 1},
        {192, 0, 0},
        {256, 0, 0},
    },
    // kDropout
    {
        {64, kPackedDropout | kLateAligned | kMaskBoundsInRegs | kIntFlags, 1},
        {96, kPackedDropout | kLateAligned | kMaskBoundsInRegs | kIntFlags, 1},
        {128, kPackedDropout | kRandomBitsInPv | kPingPong | kLateAligned | kMaskBoundsInRegs | kIntFlags, 1},
        {192, kPackedDropout | kLateAligned | kExpBeforePvWait | kIntFlags, 1},
        {256, kPackedDropout | kLateAligned | kExpBeforePvWait | kIntFlags, 1},
    },
    // kScoreMod
    {
        {64, kSplitKv, 1},
        {96, kSplitKv, 1},
        {128, kSplitKv | kIssueNextQkEarly, 1},
        {192, kSplitKv | kExpBeforePvWait, 1},
        {256, kSplitKv | kExpBeforePvWait, 1},
    },
    // kMasked
    {
        {64, 0, 0},
        {96, 0, 0},
        {128, kEarlyStored | kLateAligned | kMaskBoundsInRegs | kSpeculativeExp | kSpeculativeOnMasked | kIntFlags, 1},
        {192, 0, 0},
        {256, 0, 0},
    },
    // kOneWave
    {
        {64, kSplitKv | kPingPong | kMaskBoundsInRegs | kIntFlags, 1},
        {96, kSplitKv | kPingPong | kMaskBoundsInRegs | kIntFlags, 1},
        {128, kSplitKv | kEarlyStored | kMaskBoundsInRegs | kSpeculativeAfterPv | kIntFlags, 1},
        {192, kSplitKv | kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
        {256, kSplitKv | kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
    },
    // kSoftcap
    {
        {64, kSplitKv, 4},
        {96, kSplitKv, 4},
        {128, kSplitKv | kIssueNextQkEarly | kCheckBoundByNorm, 4},
        {192, kSplitKv | kExpBeforePvWait | kCheckBoundByNorm, 2},
        {256, kSplitKv | kExpBeforePvWait | kCheckBoundByNorm, 2},
    },
    // kAlibi
    {
        {64, kSplitKv | kSpeculativeExp | kIntFlags, 1},
        {96, kSplitKv | kSpeculativeExp | kIntFlags, 1},
        {128, kSplitKv | kIssueNextQkEarly | kSpeculativeExp | kIntFlags, 1},
        {192, kSplitKv | kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
        {256, kSplitKv | kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
    },
    // kDirect: those of kOneWave that concern one tile
    {
        {64, kPingPong | kMaskBoundsInRegs | kIntFlags, 1},
        {96, 0, 0},
        {128, kMaskBoundsInRegs | kSpeculativeAfterPv | kIntFlags, 1},
        {192, 0, 0},
        {256, 0, 0},
    },
    // kListed
    {
        {64, kFetchNextTileLate | kSpeculativeAfterPv | kIntFlags, 1},
        {96, 0, 0},
        {128, kEarlyStored | kFetchNextTileLate | kSpeculativeExp | kSpeculativeOnMasked | kIntFlags, 1},
        {192, 0, 0},
        {256, kFetchNextTileLate | kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
    },
    // kStatic: those of kOneWave without splits and store warp
    {
        {64, 0, 0},
        {96, 0, 0},
        {128, kIssueNextQkEarly | kMaskBoundsInRegs | kSpeculativeAfterPv | kIntFlags, 1},
        {192, 0, 0},
        {256, 0, 0},
    },
    // kBiased
    {
        {64, kSpeculativeAfterPv | kIntFlags, 1},
        {96, 0, 0},
        {128, kSpeculativeAfterPv | kIntFlags, 1},
        {192, 0, 0},
        {256, kExpBeforePvWait | kSpeculativeExp | kIntFlags, 1},
    },
    // kListedShort
    {
        {64, kFetchNextTileLate | kSpeculativeAfterPv | kIntFlags, 1},
        {96, 0, 0},
        {128, kEarlyStored | kFetchNextTileLate | kSpeculativeAfterPv | kIntFlags, 1},
        {192, 0, 0},
        {256, 0, 0},
    },
};

// kSm90ValueDimTile, kPlain.
constexpr FwdPolicy kValueDim = {192, kLateAligned | kSpeculativeAfterPv | kIntFlags, 1};

}  // namespace fwd_policy_table

// head_dim, head_dim_v: those of a kernel.
constexpr FwdPolicy sm90_fwd_policy(int head_dim, int head_dim_v, FwdVariant variant) {
  if (head_dim_v != head_dim) return fwd_policy_table::kValueDim;
  return fwd_policy_table::kRows[static_cast<int>(variant)][head_dim_index(head_dim) - kSm90FirstHeadDim];
}

// Measured gain of a true cell, H200: the first entry of its feature and variant. docs/tuning/fwd_sm90.md lists the
// alternatives that were tried.
struct FwdMeasurement {
  fwd_feature::Feature feature;
  uint32_t variants;  // a bit for each FwdVariant
  const char* figure;
};

constexpr uint32_t variant_bit(FwdVariant variant) { return 1u << static_cast<int>(variant); }
constexpr uint32_t kAllFwdVariants = (1u << kNumFwdVariants) - 1;
constexpr uint32_t kScoreModVariants =
    variant_bit(FwdVariant::kScoreMod) | variant_bit(FwdVariant::kSoftcap) | variant_bit(FwdVariant::kAlibi);

constexpr FwdMeasurement kFwdMeasurements[] = {
    {fwd_feature::kNoMask, kAllFwdVariants, "d 128 full s 512 to 16384 0.966 to 0.982 of the time"},
    {fwd_feature::kIssueNextQkEarly, kScoreModVariants, "softcap causal 1403 to 1400.5 kclk, ALiBi 1275 to 1269"},
    {fwd_feature::kIssueNextQkEarly, kAllFwdVariants, "d 128 full s 512 136 to 130 us, s 4096 773 to 739"},
    {fwd_feature::kHasStoreWarp, kAllFwdVariants, "d 128 window 1024 324 to 320 kclk"},
    {fwd_feature::kFetchNextTileLate, kAllFwdVariants, "d 128 causal s 8192 0.996, window 2048 0.988 of the time"},
    {fwd_feature::kAlignUnmasked, kAllFwdVariants, "d 128 windows of 512 to 4096 0.996 to 1.002 of the time"},
    {fwd_feature::kMaskBoundsInRegs, kAllFwdVariants, "window 1024 344 to 339 kclk, causal s 8192 1129 to 1122"},
    {fwd_feature::kExpBeforePvWait, kAllFwdVariants, "d 256 1.030 times as fast, s 16384 1.080"},
    {fwd_feature::kSpeculativeExp, kAllFwdVariants, "d 64 1.002 to 1.060, d 128 1.01 to 1.02 times as fast"},
    {fwd_feature::kSpeculativeOnMasked, kAllFwdVariants, "d 128 window 1024 320 to 316.2 kclk"},
    {fwd_feature::kExpAfterPvWait, kAllFwdVariants, "without it d 64 full 0.908, causal 0.935 as fast (H100)"},
    {fwd_feature::kCheckBoundByNorm, kAllFwdVariants, "d 128 cap 30 0.763 to 0.794 of plain"},
    {fwd_feature::kPingPong, variant_bit(FwdVariant::kOneWave) | variant_bit(FwdVariant::kDirect),
     "d 64, a head of 16384: 139 or 182 by chance to 141 us"},
    {fwd_feature::kPingPong, variant_bit(FwdVariant::kDropout), "d 128 0.648 to 0.736 of plain, with the bits in P V"},
    {fwd_feature::kPackedDropout, kAllFwdVariants, "d 128 full s 8192 3189 to 2228 us"},
    {fwd_feature::kRandomBitsInPv, kAllFwdVariants, "d 128 0.648 to 0.736 of plain, with ping-pong"},
    {fwd_feature::kSplitKv, kAllFwdVariants, "16 heads 128 x 2048 36.8 to 15.5 us; as a field 2 to 3 % of s 512"},
    {fwd_feature::kIntFlags, variant_bit(FwdVariant::kAlibi), "d 128 0.988 to 0.974 of the time before"},
    {fwd_feature::kIntFlags, kAllFwdVariants, "one of seven changes, s 512 causal 114 to 107 us"},
};
// Of row_sums above 1.
constexpr const char* kRowSumsMeasurement = "softcap d 128 0.795 to 0.814 of plain";

constexpr const FwdMeasurement* fwd_measurement(fwd_feature::Feature feature, FwdVariant variant) {
  for (const FwdMeasurement& entry : kFwdMeasurements) {
    if (entry.feature == feature && (entry.variants & variant_bit(variant)) != 0) return &entry;
  }
  return nullptr;
}

// Blocks that a warpgroup of kListed may skip one after the other: it still holds V of the last one that it
// computed, and with kIssueNextQkEarly the last of the tile until the next Q lands. Further hidden ones are computed.
constexpr int sm90_most_listed_skips(const Sm90FwdTile& tile, const FwdPolicy& policy) {
  return tile.kv_stages - policy.has(fwd_feature::kIssueNextQkEarly);
}

// What a kernel of this tile, policy and variant could not do; null: nothing. FwdConfig asserts it.
constexpr const char* fwd_policy_conflict(const Sm90FwdTile& tile, const FwdPolicy& policy, FwdVariant variant) {
  using namespace fwd_feature;
  const bool score_mod = modifies_scores(variant), softcap = variant == FwdVariant::kSoftcap;
  const bool early = policy.has(kIssueNextQkEarly), speculative = policy.has(kSpeculativeExp);
  const int warpgroups = tile.block_m / 64, most_skipped = (warpgroups - 1) * ((63 + tile.block_n) / tile.block_n);
  if (policy.head_dim != tile.head_dim) return "the row is of another head dim";
  if (policy.row_sums < 1) return "there is no such kernel";
  if (early && (tile.q_stages != 2 || tile.overlaps)) return "the next Q has to land before O has left";
  if (policy.has(kHasStoreWarp)) {
    if (!early) return "O has to be staged before S of the next tile is issued";
    if (tile.o_cols > 0 || tile.overlaps) return "the epilogue warp stores O from Q's buffer";
    if (tile.consumer_groups != 1 || policy.has(kPackedDropout)) return "no warp is idle";
  }
  // A warpgroup that skips fully masked blocks still holds the previous V stage, and with kIssueNextQkEarly the last
  // one until the next Q lands.
  if ((tile.bias_stages > 0) != (variant == FwdVariant::kBiased)) return "a bias comes through shared memory";
  if (visits_by_list(variant)) {
    if (tile.block_n % kMaskStrip != 0) return "lists have whole strips of keys";
    if (policy.has(kMaskBoundsInRegs) || policy.has(kAlignUnmasked)) return "lists have no bounds and no rotation";
    if (sm90_most_listed_skips(tile, policy) < 1) return "a K/V ring this shallow skips no block";
  } else if (most_skipped + early > tile.kv_stages) {
    return "a K/V ring this shallow would deadlock";
  }
  if (score_mod && (policy.has(kMaskBoundsInRegs) || policy.has(kAlignUnmasked))) {
    return "KvBlockOrder::start_at() moves the first block";
  }
  if (policy.has(kNoMask) && variant != FwdVariant::kPlain) return "masked calls have no other kernel";
  if (policy.has(kSpeculativeOnMasked) && !speculative) return "speculation on masked blocks alone";
  if (score_mod && speculative && variant != FwdVariant::kAlibi) return "no speculative softcap";
  if (policy.has(kExpAfterPvWait) && (!speculative || policy.has(kExpBeforePvWait) || score_mod)) {
    return "exponentials before and after the wait for P V";
  }
  if ((policy.has(kCheckBoundByNorm) || policy.row_sums > 1) && !softcap) return "for softcap alone";
  if (policy.has(kPackedDropout) != (variant == FwdVariant::kDropout)) return "packed dropout is that of kDropout";
  if (policy.has(kRandomBitsInPv) && !policy.has(kPackedDropout)) return "no random bits";
  if (policy.has(kPingPong) && (tile.consumer_groups != 1 || warpgroups < 2)) return "one warpgroup cannot alternate";
  if (variant == FwdVariant::kOneWave && !policy.has(kSplitKv)) return "splits have no other kernel";
  if (variant == FwdVariant::kStatic) {
    if (policy.has(kHasStoreWarp) || policy.has(kFetchNextTileLate))
      return "there is one producer warp, and no scheduler";
    if (tile.consumer_groups != 1 || tile.o_cols > 0) return "O is staged in the place of Q";
    if (policy.has(kSplitKv)) return "splits are work tiles";
  }
  if (variant == FwdVariant::kDirect) {
    if (early || policy.has(kHasStoreWarp) || policy.has(kFetchNextTileLate)) return "there is no next tile";
    if (tile.q_stages != 1 || tile.consumer_groups != 1 || tile.o_cols > 0) return "one tile needs one Q";
    if (policy.has(kSplitKv)) return "splits are work tiles";
  }
  return nullptr;
}

}  // namespace plan
}  // namespace flash
