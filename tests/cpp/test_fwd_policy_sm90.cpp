// The policy rows of the wgmma forward: prints the table; every kernel's row fits its tile and variant, and every true
// cell has its measurement.
#include <iterator>

#include "check.h"
#include "plan/fwd_policy_sm90.h"

namespace {

using namespace flash::plan;
using namespace flash::plan::fwd_feature;

constexpr const char* kVariantNames[kNumFwdVariants] = {
    "plain", "short", "dropout", "score_mod", "masked", "one_wave", "softcap", "alibi", "direct", "listed", "biased"};
constexpr int kHeadDims[kNumSm90FwdHeadDims] = {64, 96, 128, 192, 256};

struct NamedFeature {
  Feature feature;
  const char* name;
};
constexpr NamedFeature kFeatures[kCount] = {
    {kNoMask, "no_mask"},
    {kIssueNextQkEarly, "issue_next_qk_early"},
    {kHasStoreWarp, "has_store_warp"},
    {kFetchNextTileLate, "fetch_next_tile_late"},
    {kAlignUnmasked, "align_unmasked"},
    {kMaskBoundsInRegs, "mask_bounds_in_regs"},
    {kExpBeforePvWait, "exp_before_pv_wait"},
    {kSpeculativeExp, "speculative_exp"},
    {kSpeculativeOnMasked, "speculative_on_masked"},
    {kExpAfterPvWait, "exp_after_pv_wait"},
    {kCheckBoundByNorm, "check_bound_by_norm"},
    {kPingPong, "ping_pong"},
    {kPackedDropout, "packed_dropout"},
    {kRandomBitsInPv, "random_bits_in_pv"},
    {kSplitKv, "split_kv"},
    {kIntFlags, "int_flags"},
};

uint32_t measured[std::size(kFwdMeasurements)] = {};  // cells that each measurement covers

void check_row(const Sm90FwdTile& tile, const FwdPolicy& policy, FwdVariant variant) {
  const char* name = kVariantNames[static_cast<int>(variant)];
  std::cout << name << ' ' << tile.head_dim << '/' << tile.value_dim() << ": row_sums " << policy.row_sums;
  for (const NamedFeature& feature : kFeatures) {
    if (!policy.has(feature.feature)) continue;
    const FwdMeasurement* measurement = fwd_measurement(feature.feature, variant);
    std::cout << ", " << feature.name;
    check::that(measurement != nullptr, "a true cell has its measurement", name, tile.head_dim, feature.name);
    if (measurement != nullptr) ++measured[measurement - kFwdMeasurements];
  }
  std::cout << '\n';
  const char* conflict = fwd_policy_conflict(tile, policy, variant);
  check::that(conflict == nullptr, "the row fits its tile", name, tile.head_dim, conflict ? conflict : "");
  check::that(policy.features >> kCount == 0, "no unknown feature", name, tile.head_dim);
}

// Each constraint is seen to fail.
void check_conflicts() {
  const Sm90FwdTile tile = sm90_fwd_tile(128, FwdVariant::kPlain);
  const auto fails = [&](uint32_t features, FwdVariant variant, int row_sums = 1, int head_dim = 128) {
    check::that(fwd_policy_conflict(tile, {head_dim, features, row_sums}, variant) != nullptr, "a conflict is found",
                features, static_cast<int>(variant), row_sums, head_dim);
  };
  check::that(fwd_policy_conflict(tile, {128, 0, 1}, FwdVariant::kPlain) == nullptr, "a row without features fits");
  fails(0, FwdVariant::kPlain, 1, 64);
  fails(0, FwdVariant::kPlain, 0);
  fails(0, FwdVariant::kPlain, 2);
  fails(0, FwdVariant::kDropout);
  fails(0, FwdVariant::kOneWave);
  fails(0, FwdVariant::kDirect);  // two Q stages
  for (const Feature alone :
       {kHasStoreWarp, kSpeculativeOnMasked, kExpAfterPvWait, kCheckBoundByNorm, kPackedDropout, kRandomBitsInPv}) {
    fails(alone, FwdVariant::kPlain);
  }
  fails(kMaskBoundsInRegs, FwdVariant::kSoftcap);
  fails(kAlignUnmasked, FwdVariant::kAlibi);
  fails(kSpeculativeExp, FwdVariant::kSoftcap);
  fails(kNoMask, FwdVariant::kShort);
  fails(kAlignUnmasked, FwdVariant::kListed);
  fails(kMaskBoundsInRegs, FwdVariant::kListed);
  fails(0, FwdVariant::kListed);  // blocks of 80 keys
  fails(0, FwdVariant::kBiased);
  const auto fails_on = [](Sm90FwdTile other, uint32_t features) {
    check::that(fwd_policy_conflict(other, {other.head_dim, features, 1}, FwdVariant::kPlain) != nullptr,
                "a conflict with the tile is found", other.block_m, other.block_n, other.kv_stages, features);
  };
  const Sm90FwdTile direct = sm90_fwd_tile(128, FwdVariant::kDirect);
  check::that(fwd_policy_conflict(direct, {128, 0, 1}, FwdVariant::kDirect) == nullptr, "one Q");
  for (const Feature of_several_tiles : {kIssueNextQkEarly, kFetchNextTileLate, kSplitKv}) {
    check::that(fwd_policy_conflict(direct, {128, of_several_tiles, 1}, FwdVariant::kDirect) != nullptr, "one tile",
                of_several_tiles);
  }
  const FwdVariant plain = FwdVariant::kPlain;
  fails_on(sm90_fwd_tile(256, plain), kIssueNextQkEarly);                 // one Q stage
  fails_on(sm90_fwd_tile(64, plain), kIssueNextQkEarly | kHasStoreWarp);  // overlaps
  fails_on(sm90_fwd_tile(64, FwdVariant::kShort), kPingPong);             // two consumer groups
  fails_on({128, 192, 64, 2, 2, false, 1}, kIssueNextQkEarly);            // may hold three stages
}

}  // namespace

int main() {
  for (int v = 0; v < kNumFwdVariants; ++v) {
    const FwdVariant variant = static_cast<FwdVariant>(v);
    for (const int head_dim : kHeadDims) {
      const FwdPolicy policy = sm90_fwd_policy(head_dim, head_dim, variant);
      check::that(policy.head_dim == head_dim, "rows are in the order of head dims", kVariantNames[v], head_dim);
      const bool exists = sm90_has_variant(head_dim, variant);
      check::that((policy.row_sums > 0) == exists, "a row for every kernel", kVariantNames[v], head_dim);
      if (!exists) continue;
      check_row(sm90_fwd_tile(head_dim, variant), policy, variant);
      check::that(policy.has(kNoMask) == (variant == FwdVariant::kPlain && sm90_splits_masked(head_dim)),
                  "kNoMask where masked calls have a separate kernel", kVariantNames[v], head_dim);
    }
  }
  const Sm90FwdTile value_dim = kSm90ValueDimTile;
  check_row(value_dim, sm90_fwd_policy(value_dim.head_dim, value_dim.value_dim(), FwdVariant::kPlain),
            FwdVariant::kPlain);
  for (size_t i = 0; i < std::size(kFwdMeasurements); ++i) {
    check::that(measured[i] > 0, "a measurement covers some cell", kFwdMeasurements[i].figure);
  }
  check_conflicts();
  return check::report();
}
