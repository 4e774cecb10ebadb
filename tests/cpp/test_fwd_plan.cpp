// Tables of calls and their forward plans on GPUs that exist, the rules that every plan keeps, and what tensor maps
// hold.
#include "plan/fwd_plan.h"

#include <string>
#include <vector>

#include "check.h"
#include "plan/call_plan.h"
#include "plan/explain.h"
#include "plan/jvp_fwd_plan.h"

namespace {

using flash::Dtype;
using flash::kUnbounded;
using flash::Modifiers;
using flash::Window;
using flash::plan::Device;
using flash::plan::Family;
using flash::plan::FwdPlan;
using flash::plan::FwdProblem;
using flash::plan::FwdVariant;

constexpr Device kH100{90, 132, 233472, 232448};  // and H200
constexpr Device kA100{80, 108, 167936, 166912};
constexpr Device kL40{89, 142, 102400, 101376};
constexpr Device kB200{100, 148, 233472, 232448}, kRtx5090{120, 170, 102400, 101376};
constexpr Window kFull{}, kCausal{kUnbounded, 0}, kSliding{1024, 0};

FwdProblem dense(int64_t batch, int64_t seqlen, int64_t heads, int head_dim, Window window = kFull) {
  FwdProblem problem;
  problem.batch = batch;
  problem.heads = problem.heads_k = heads;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.seqlen_q = problem.seqlen_k = seqlen;
  problem.window = window;
  return problem;
}

FwdProblem packed(int64_t batch, int64_t seqlen, int64_t heads, int head_dim, Window window = kFull) {
  FwdProblem problem = dense(batch, seqlen, heads, head_dim, window);
  problem.is_varlen = true;
  problem.seqlen_q *= batch;
  problem.seqlen_k *= batch;
  return problem;
}

template <class Change>
FwdProblem changed(FwdProblem problem, Change change) {
  change(problem);
  return problem;
}

FwdPlan plan_of(const FwdProblem& problem, const Device& device, const char* forced = nullptr) {
  return flash::plan::plan_fwd(problem, device, forced);
}

struct Row {
  const char* name;
  FwdProblem problem;
  Device device;
  Family family;
  FwdVariant variant;
  int block_m, block_n, threads, smem_bytes;
  int64_t grid;
  int num_splits;
  bool is_dynamic, pdl;
};

// smem_bytes of the wgmma kernels is what their launches assert.
std::vector<Row> table() {
  constexpr Family kMma = Family::kMmaSync, kWgmma = Family::kWgmma;
  using V = FwdVariant;
  const auto dropout = [](FwdProblem& problem) { problem.has_dropout = true; };
  const auto origins = [](FwdProblem& problem) { problem.has_origins = true; };
  const auto softcap = [](FwdProblem& problem) { problem.modifiers = Modifiers::kSoftcap; };
  const auto alibi = [](FwdProblem& problem) { problem.modifiers = Modifiers::kAlibi; };
  const auto both = [](FwdProblem& problem) { problem.modifiers = Modifiers::kAny; };
  const auto wide = [](FwdProblem& problem) { problem.head_dim = 192; };
  const FwdProblem long_64 = dense(2, 8192, 32, 64), long_128 = dense(2, 8192, 16, 128);
  const FwdProblem wide_heads = dense(2, 8192, 8, 512);
  return {
      {"d 64", long_64, kH100, kWgmma, V::kPlain, 192, 128, 512, 148480, 132, 1, false, false},
      {"d 64, short", dense(32, 512, 32, 64), kH100, kWgmma, V::kShort, 128, 64, 640, 198656, 132, 1, false, false},
      {"d 64, causal", dense(2, 8192, 32, 64, kCausal), kH100, kWgmma, V::kPlain, 192, 128, 512, 148480, 132, 1, true,
       true},
      {"d 128", long_128, kH100, kWgmma, V::kPlain, 192, 80, 512, 222208, 132, 1, true, true},
      {"d 128, causal", dense(2, 8192, 16, 128, kCausal), kH100, kWgmma, V::kMasked, 192, 64, 512, 230400, 132, 1, true,
       true},
      {"d 128, dropout", changed(long_128, dropout), kH100, kWgmma, V::kDropout, 192, 64, 512, 198656, 132, 1, true,
       true},
      {"d 128, softcap", changed(long_128, softcap), kH100, kWgmma, V::kSoftcap, 128, 128, 384, 197632, 132, 1, true,
       true},
      {"d 128, ALiBi", changed(long_128, alibi), kH100, kWgmma, V::kAlibi, 128, 128, 384, 197632, 132, 1, true, true},
      {"d 128, both", changed(long_128, both), kH100, kWgmma, V::kScoreMod, 128, 128, 384, 197632, 132, 1, true, true},
      {"d 256", dense(2, 8192, 8, 256), kH100, kWgmma, V::kPlain, 128, 64, 384, 230400, 132, 1, false, false},
      {"d 192, V of 128", changed(long_128, wide), kH100, kWgmma, V::kPlain, 192, 64, 512, 230400, 132, 1, false,
       false},
      {"one wave", dense(1, 512, 16, 128), kH100, kWgmma, V::kDirect, 128, 64, 288, 197632, 64, 1, false, true},
      {"one wave, causal, d 64", dense(1, 1024, 16, 64, kCausal), kH100, kWgmma, V::kDirect, 128, 128, 288, 115712, 128,
       1, false, true},
      {"two waves", dense(1, 2048, 16, 128), kH100, kWgmma, V::kStatic, 128, 64, 288, 230400, 132, 1, false, true},
      {"two waves, causal", dense(4, 1024, 8, 128, kCausal), kH100, kWgmma, V::kStatic, 128, 64, 288, 230400, 132, 1,
       false, true},
      {"one wave, packed", packed(1, 512, 16, 128), kH100, kWgmma, V::kOneWave, 128, 64, 384, 230400, 112, 1, false,
       true},
      {"one wave, d 256", dense(1, 512, 16, 256), kH100, kWgmma, V::kOneWave, 128, 64, 384, 230400, 64, 1, false, true},
      {"packed", packed(4, 2048, 16, 128), kH100, kWgmma, V::kPlain, 192, 80, 512, 222208, 132, 1, true, true},
      {"d 64 on A100", long_64, kA100, kMma, V::kPlain, 128, 128, 128, 49152, 4096, 1, false, true},
      {"d 128, short, on A100", dense(1, 512, 8, 128), kA100, kMma, V::kShort, 64, 64, 128, 49152, 64, 1, false, true},
      {"d 256 on L40", dense(2, 8192, 8, 256), kL40, kMma, V::kPlain, 64, 64, 128, 98304, 2048, 1, false, true},
      {"d 512", wide_heads, kH100, kWgmma, V::kPlain, 64, 64, 384, 224256, 2048, 1, false, true},
      {"d 320, causal", dense(2, 8192, 8, 320, kCausal), kH100, kWgmma, V::kPlain, 64, 64, 384, 224256, 2048, 1, false,
       true},
      {"d 512, dropout", changed(wide_heads, dropout), kH100, kMma, V::kDropout, 32, 32, 128, 100608, 4096, 1, false,
       true},
      {"d 512, softcap", changed(wide_heads, softcap), kH100, kMma, V::kPlain, 64, 32, 256, 135680, 2048, 1, false,
       true},
      {"d 512 on A100", wide_heads, kA100, kMma, V::kPlain, 64, 32, 256, 135680, 2048, 1, false, true},
      {"d 512 on L40", dense(2, 8192, 8, 512), kL40, kMma, V::kShort, 32, 32, 128, 100608, 4096, 1, false, true},
      {"d 128, origins, on L40", changed(long_128, origins), kL40, kMma, V::kDropout, 128, 32, 128, 49152, 2048, 1,
       false, true},
      {"d 128, dropout, on L40", changed(long_128, dropout), kL40, kMma, V::kDropout, 128, 32, 128, 49152, 2048, 1,
       false, true},
  };
}

void check_table() {
  for (const Row& row : table()) {
    const FwdPlan plan = plan_of(row.problem, row.device);
    check::that(plan.family == row.family && plan.variant == row.variant, "kernel", row.name,
                flash::plan::family_name(plan.family), flash::plan::variant_name(plan.variant));
    check::that(plan.block_m == row.block_m && plan.block_n == row.block_n && plan.threads == row.threads, "tile",
                row.name, plan.block_m, plan.block_n, plan.threads);
    check::that(plan.smem_bytes == row.smem_bytes, "shared memory", row.name, plan.smem_bytes);
    check::that(plan.grid == row.grid && plan.num_splits == row.num_splits, "grid", row.name, plan.grid,
                plan.num_splits);
    check::that(plan.is_dynamic == row.is_dynamic && plan.pdl == row.pdl, "scheduler", row.name, plan.is_dynamic,
                plan.pdl);
  }
}

// Few rows over many keys.
void check_splits() {
  FwdProblem problem = dense(1, 128, 16, 128);
  problem.seqlen_k = 8192;
  const FwdPlan plan = plan_of(problem, kH100);
  check::that(plan.family == Family::kWgmma && plan.variant == FwdVariant::kOneWave && plan.num_splits == 8, "splits",
              plan.num_splits);
  check::that(plan.grid == 128 && plan.num_work_tiles == 128 && plan.pdl && !plan.is_dynamic, "one wave of splits");
  check::that(plan.partial_rows == 16 * 128 && plan.workspace_bytes == int64_t{4} * 8 * 16 * 128 * (128 + 1),
              "partial results", plan.workspace_bytes);
  problem.seqlen_q = 1;
  check::that(plan_of(problem, kH100).family == Family::kDecode, "one row");
  problem.returns_max_logit = true;
  check::that(plan_of(problem, kH100).family != Family::kDecode, "max_logit");
  problem.returns_max_logit = false;
  problem.has_origins = true;
  check::that(plan_of(problem, kH100).family != Family::kDecode, "origins");
}

// An exact row max falls where FlashAttention-2 splits keys and the mma.sync family does not.
void check_row_max() {
  const auto falls = [](const FwdProblem& problem, const Device& device, const char* forced = "mma_sync") {
    return plan_fwd_kernel(problem, device, forced).row_max_falls;
  };
  const auto exact = [](FwdProblem& p) { p.exact_row_max = true; };
  const FwdProblem few = changed(dense(1, 1024, 4, 128), exact);
  check::that(falls(few, kH100) && falls(few, kA100) && falls(changed(packed(1, 1024, 4, 128), exact), kH100), "few");
  check::that(!falls(few, kH100, nullptr), "wgmma");
  check::that(!falls(dense(1, 1024, 4, 128), kH100), "lagging");
  check::that(!falls(changed(dense(2, 8192, 16, 128), exact), kH100), "many m_blocks");
  check::that(!falls(changed(dense(1, 1024, 4, 512), exact), kH100), "warps that share rows");
  check::that(!falls(changed(few, [](FwdProblem& p) { p.returns_max_logit = true; }), kH100), "max_logit");
  check::that(!falls(changed(few, [](FwdProblem& p) { p.has_dropout = true; }), kH100), "dropout");
  check::that(!falls(changed(few, [](FwdProblem& p) { p.batch_invariant = true; }), kH100), "batch-invariant");
}

// What a family cannot run another one does; where that one knows one head dim, the call is padded.
void check_other_families() {
  const FwdProblem problem = dense(2, 8192, 16, 128, kCausal);
  const auto is_mma_sync = [](const FwdPlan& plan) { return plan.family == Family::kMmaSync && !plan.is_dynamic; };
  check::that(is_mma_sync(plan_of(changed(problem, [](FwdProblem& p) { p.fits_tensor_maps = false; }), kH100)),
              "strides that no tensor map holds");
  Device without = kH100;
  without.wgmma_head_dims = 0;
  check::that(is_mma_sync(plan_of(problem, without)), "a build without wgmma kernels");
  without.wgmma_head_dims = 1u << 1;
  check::that(is_mma_sync(plan_of(problem, without)), "a build of head dim 64");
  check::that(plan_of(dense(2, 8192, 16, 64), without).family == Family::kWgmma, "a build of head dim 64");
  FwdProblem paged = changed(packed(4, 2048, 16, 64), [](FwdProblem& p) { p.is_paged = true; });
  paged.page_size = static_cast<int>(paged.seqlen_k = 16);
  paged.num_pages = 512;
  paged.pages_per_sequence = 128;
  const FwdPlan by_pages = plan_of(paged, kH100);
  check::that(by_pages.family == Family::kWgmma && by_pages.page_box_rows == 16, "pages", by_pages.page_box_rows);
  check::that(plan_of(changed(paged, [](FwdProblem& p) { p.fits_page_maps = false; }), kH100).page_box_rows == 0,
              "rows of pages one by one");
  check::that(is_mma_sync(plan_of(changed(paged, [](FwdProblem& p) { p.has_dropout = true; }), kH100)),
              "pages with dropout");
  const FwdProblem pair = changed(problem, [](FwdProblem& p) { p.head_dim_v = 64; });
  const FwdPlan direct = plan_of(pair, kH100), padded = plan_of(pair, kA100);
  check::that(direct.family == Family::kWgmma && direct.pad_head_dim == 0, "V of another head dim");
  check::that(is_mma_sync(padded) && padded.pad_head_dim == 128 && padded.head_dim == 128, "padded");
  const FwdPlan odd = plan_of(changed(problem, [](FwdProblem& p) { p.head_dim_v = 131; }), kH100);
  check::that(odd.family == Family::kWgmma && odd.pad_head_dim == 136 &&
                  odd.head_dim == sm90_fwd_tile(136, FwdVariant::kPlain).head_dim,
              "V of odd head dim");
  const FwdProblem wide = changed(dense(2, 8192, 8, 512), [](FwdProblem& p) { p.head_dim_v = 320; });
  const FwdPlan wide_direct = plan_of(wide, kH100);
  check::that(wide_direct.family == Family::kWgmma && wide_direct.pad_head_dim == 0, "K of 512 with V of 320");
  check::that(is_mma_sync(plan_of(changed(wide, [](FwdProblem& p) { p.is_paged = true; }), kH100)), "wide pages");
  check::that(is_mma_sync(plan_of(wide, without)), "a build without head dim 512");
  const FwdProblem huge = changed(dense(16, 1 << 24, 1024, 64), [](FwdProblem& p) { p.seqlen_k = 128; });
  check::that(is_mma_sync(plan_of(huge, kH100)), "more work tiles than can be numbered");
}

// Whole waves of 128 rows or of 192, whichever take less time; packed calls with the same bits.
void check_whole_waves() {
  const auto variant = [](const FwdProblem& problem) { return plan_of(problem, kH100).variant; };
  using V = FwdVariant;
  check::that(variant(dense(1, 1408, 36, 128)) == V::kStatic, "three waves of smaller tiles");
  check::that(variant(dense(4, 2048, 8, 128)) == V::kPlain, "four waves or three");
  check::that(variant(dense(4, 1024, 8, 128)) == V::kStatic && variant(packed(4, 1024, 8, 128)) == V::kOneWave,
              "short, equal tiles, in pairs of thread blocks");
  check::that(variant(dense(5, 896, 8, 128)) == V::kShort && variant(dense(16, 512, 8, 128)) == V::kShort,
              "an odd number of tiles in a head, more than two waves");
  check::that(variant(dense(1, 1024, 20, 128)) == V::kPlain, "two waves or one");
  check::that(variant(dense(1, 1024, 20, 128, kCausal)) == V::kStatic, "but the long tiles of one end late");
  const FwdProblem nearly_equal = changed(dense(1, 768, 30, 128, kCausal), [](FwdProblem& p) { p.seqlen_k = 16384; });
  check::that(variant(nearly_equal) == V::kShort, "none of them ends early");
  check::that(variant(dense(4, 2048, 8, 128, kCausal)) == V::kMasked, "more than two waves of unequal tiles");
  check::that(variant(dense(4, 4096, 8, 128)) == V::kPlain, "eight waves");
  check::that(variant(dense(4, 1024, 8, 128, kSliding)) == V::kShort, "a left window bound");
  check::that(variant(packed(1, 2048, 16, 128)) == V::kOneWave, "packed");
  check::that(variant(changed(dense(1, 2048, 16, 128), [](FwdProblem& p) { p.batch_invariant = true; })) == V::kPlain,
              "batch-invariant");
}

// Two thread blocks load K and V for each other where they share a head and mask nothing.
void check_clusters() {
  const auto in_clusters = [](const FwdProblem& problem) { return plan_of(problem, kH100).in_clusters; };
  const FwdProblem problem = dense(4, 512, 8, 128);
  check::that(plan_of(problem, kH100).variant == FwdVariant::kDirect && in_clusters(problem), "one wave");
  check::that(in_clusters(dense(4, 1024, 8, 128)) && plan_of(dense(4, 1024, 8, 128), kH100).grid == 132, "two waves");
  const Device odd{90, 131, 233472, 232448};
  check::that(plan_of(dense(1, 2048, 16, 128), odd).grid == 130, "an odd number of multiprocessors");
  check::that(in_clusters(changed(problem, [](FwdProblem& p) { p.seqlen_k = 448; })), "fewer keys");
  check::that(!in_clusters(changed(problem, [](FwdProblem& p) { p.seqlen_k = 500; })), "the last block is not whole");
  check::that(!in_clusters(changed(problem, [](FwdProblem& p) { p.seqlen_q = 640; })), "an odd number of m_blocks");
  check::that(!in_clusters(dense(4, 512, 8, 128, kCausal)) && !in_clusters(dense(4, 512, 8, 64)), "masks, head dim 64");
  check::that(!in_clusters(packed(4, 512, 8, 128)) && !in_clusters(dense(4, 4096, 8, 128)), "with a scheduler");
  for (int64_t heads : {1, 3, 32, 33}) {
    const FwdPlan plan = plan_of(dense(1, 512, heads, 128), kH100);
    if (!plan.in_clusters) continue;  // KV splits
    check::that(plan.order.band_tiles.divisor == 4 && plan.grid % 2 == 0, "tiles of a head side by side", heads);
    check::that(plan.pdl, "launch_dependent() alone makes clusters", heads);
  }
}

// Rows from both ends of a head where every row sees keys from the first one on, and some do not see the last.
void check_pairs() {
  const auto pairs = [](const FwdProblem& problem) { return plan_of(problem, kH100).pairs_rows; };
  const FwdProblem causal = dense(4, 512, 8, 128, kCausal);
  check::that(plan_of(causal, kH100).variant == FwdVariant::kDirect && pairs(causal), "causal");
  check::that(pairs(dense(4, 512, 8, 64, kCausal)) && pairs(changed(causal, [](FwdProblem& p) { p.seqlen_k = 700; })),
              "more keys than rows");
  check::that(!pairs(dense(4, 512, 8, 128)) && !pairs(dense(4, 512, 8, 128, {100, 0})), "full, a left window bound");
  check::that(!pairs(changed(causal, [](FwdProblem& p) { p.seqlen_k = 511; })), "a row without keys");
  check::that(!pairs(packed(4, 512, 8, 128, kCausal)) && !pairs(dense(8, 1024, 8, 128, kCausal)), "not kDirect");
}

// Work tiles of variable trip counts go by bands, the short ones last of all; packed ones are sorted.
void check_tile_order() {
  const FwdPlan causal = plan_of(dense(1, 8192, 16, 128, kCausal), kH100);
  check::that(causal.band_heads > 1 && causal.num_tail_tiles == 10, "causal", causal.num_tail_tiles);
  const FwdPlan full = plan_of(dense(1, 8192, 32, 64), kH100);
  check::that(full.band_heads == 1 && full.num_tail_tiles == 0 && !full.is_dynamic, "equal trip counts");
  const FwdPlan sliding = plan_of(dense(1, 8192, 16, 128, kSliding), kH100);
  check::that(sliding.unmasked_blocks > 1 && causal.unmasked_blocks == 1, "blocks after a left window bound");
  check::that(plan_of(packed(32, 512, 16, 128, kCausal), kH100).sort_varlen_tiles, "sorted");
  check::that(!plan_of(packed(33, 512, 16, 128, kCausal), kH100).sort_varlen_tiles, "too many sequences to sort");
}

// Every plan can be launched: threads, shared memory and grids that the GPU has; a semaphore only where there is more
// than a wave, and a launch that overlaps run_prepare() wherever that one is launched.
void check_rules() {
  for (const Device& device : {kH100, kA100, kL40, kB200, kRtx5090}) {
    for (int head_dim : {8, 32, 64, 72, 96, 128, 160, 192, 256}) {
      for (int head_dim_v : {head_dim, 64, 128}) {
        for (int64_t batch : {1, 3, 40}) {
          for (int64_t seqlen : {1, 100, 1000, 8192}) {
            for (int options = 0; options < 32; ++options) {
              FwdProblem problem = options & 1 ? packed(batch, seqlen, 8, head_dim) : dense(batch, seqlen, 8, head_dim);
              problem.head_dim_v = head_dim_v;
              if (options & 2) problem.window = kCausal;
              problem.has_dropout = options & 4;
              if (options & 8) problem.modifiers = Modifiers::kSoftcap;
              problem.batch_invariant = options & 16;
              const FwdPlan plan = plan_of(problem, device);
              const int needed = plan.pad_head_dim > 0 ? plan.pad_head_dim : head_dim;
              check::that(plan.head_dim >= needed, "head dim", head_dim, head_dim_v, plan.head_dim);
              check::that(plan.family != Family::kWgmma || device.capability == 90, "wgmma", device.capability);
              if (plan.family == Family::kDecode) continue;
              check::that(plan.threads <= 1024 && plan.smem_bytes <= device.smem_per_block, "fits", head_dim,
                          plan.smem_bytes);
              check::that(plan.grid > 0 && plan.grid <= plan.num_work_tiles, "grid", plan.grid);
              check::that(!plan.is_dynamic || plan.num_work_tiles > plan.grid, "semaphore", plan.num_work_tiles);
              check::that(!(problem.is_varlen || plan.is_dynamic) || plan.pdl, "follows run_prepare()", head_dim);
              check::that(plan.num_tail_tiles <= plan.short_tiles, "tail tiles", plan.num_tail_tiles);
            }
          }
        }
      }
    }
  }
}

void check_tensor_maps() {
  using flash::plan::MatrixShape;
  const MatrixShape matrix{false, 2, 1000, 4, 4 * 128 * 1000, 4 * 128, 128};
  const auto holds = [&](auto change) {
    MatrixShape other = matrix;
    change(other);
    return flash::plan::tensor_map_holds(other, Dtype::kBf16);
  };
  check::that(holds([](MatrixShape&) {}), "contiguous");
  check::that(holds([](MatrixShape& m) { m.batch_stride = m.head_stride = 0; }), "expanded");
  check::that(!holds([](MatrixShape& m) { m.row_stride = 4 * 128 + 4; }), "rows that are no 16-byte vectors");
  check::that(!holds([](MatrixShape& m) { m.batch_stride = int64_t{1} << 39; }), "2^40 bytes");
  check::that(holds([](MatrixShape& m) { m.batch_stride = (int64_t{1} << 39) - 8; }), "less than 2^40 bytes");
  check::that(holds([](MatrixShape& m) { m.batch = 1, m.batch_stride = 3; }), "an axis of length 1");
  check::that(!holds([](MatrixShape& m) { m.rows = 0; }), "no rows");
  check::that(holds([](MatrixShape& m) { m.is_packed = true, m.batch = 0, m.batch_stride = 0; }), "packed");
  check::that(!holds([](MatrixShape& m) { m.is_packed = true, m.row_stride = (int64_t{1} << 33) + 8; }),
              "packed rows of more than 2^34 bytes");
}

void check_explained() {
  const auto fields =
      flash::plan::explain(dense(2, 8192, 16, 128, kCausal), plan_of(dense(2, 8192, 16, 128, kCausal), kH100));
  const std::string line = one_line(fields);
  check::that(line.find("direction=forward kernel=wgmma variant=masked dtype=bf16 head_dim=128") == 0, "line", line);
  check::that(line.find(" dynamic_scheduler=1 ") != std::string::npos, "flags", line);
  check::that(line.find(" smem_bytes=230400 ") != std::string::npos, "numbers", line);
}

FwdProblem fp8(FwdProblem problem) {
  problem.q_dtype = problem.kv_dtype = Dtype::kE4m3;
  problem.converts_queries = problem.fits_fp8_maps = true;
  problem.dtype = Dtype::kFp16;
  problem.decode = {static_cast<int>(problem.batch),
                    static_cast<int>(problem.seqlen_q),
                    static_cast<int>(problem.heads),
                    static_cast<int>(problem.heads_k),
                    problem.head_dim,
                    static_cast<int>(problem.seqlen_k)};
  problem.decode.kv_dtype = problem.kv_dtype;
  problem.decode.is_forward = true;
  problem.decode.is_packed = problem.is_varlen;
  return problem;
}

// Which kernels take e4m3 q, k and v, and the stages around them.
void check_e4m3() {
  const auto explained = [](const FwdProblem& problem, const char* forced = nullptr, const Device& device = kH100) {
    return flash::plan::explain(problem, flash::plan::plan_fwd(problem, device, forced));
  };
  const auto multiplies = [&](const FwdProblem& problem, const char* forced = nullptr, const Device& device = kH100) {
    return explained(problem, forced, device).has("qkv_dtype");
  };
  const auto stages = [&](const FwdProblem& problem, const char* forced = nullptr) {
    return std::get<std::string>(explained(problem, forced)["stages"]);
  };
  const FwdProblem decoded =
      fp8(changed(dense(64, 1, 32, 128), [](FwdProblem& p) { p.heads_k = 8, p.seqlen_k = 8192; }));
  const FwdProblem prefill = fp8(dense(1, 16384, 16, 128));
  check::that(multiplies(prefill) && multiplies(fp8(packed(8, 2048, 16, 64, kCausal))), "long queries");
  check::that(multiplies(fp8(dense(1, 128, 2, 256))), "few rows and keys");
  check::that(!multiplies(decoded), "short queries over many keys are decoded");
  check::that(multiplies(decoded, "wgmma") && !multiplies(prefill, "mma_sync") &&
                  multiplies(fp8(dense(1, 128, 2, 256)), "unknown"),
              "forced");
  check::that(multiplies(changed(decoded, [](FwdProblem& p) { p.batch_invariant = true; })), "batch-invariant");
  const auto transposed = [&](const FwdProblem& problem, const char* expected, const char* what) {
    check::that(stages(problem) == expected, what, stages(problem));
  };
  transposed(prefill, "transpose_v,attention", "many queries see a key: once for all tiles");
  transposed(fp8(dense(8, 2048, 16, 128, kCausal)), "prepare,attention", "by the kernel, which needs a semaphore");
  transposed(changed(fp8(dense(8, 2048, 16, 128, kCausal)), [](FwdProblem& p) { p.heads_k = 2; }),
             "transpose_v,attention", "query heads share a key");
  transposed(fp8(dense(32, 512, 16, 128)), "transpose_v,attention", "few blocks a tile");
  transposed(fp8(dense(32, 512, 16, 64)), "attention", "few blocks a tile of head dim 64");
  transposed(fp8(dense(1, 128, 2, 128)), "attention", "few tiles");
  transposed(fp8(packed(8, 2048, 16, 64, kCausal)), "prepare,attention", "packed");
  transposed(fp8(dense(1, 128, 2, 256)), "transpose_v,attention", "no room for V beside V^T");
  transposed(fp8(packed(8, 2048, 8, 256, kCausal)), "prepare,transpose_v,attention", "packed, head dim 256");
  check::that(stages(decoded) == "widen_query,attention", "decoded", stages(decoded));
  check::that(stages(prefill, "mma_sync") == "widen_query,dequantize,convert_query,attention,rescale", "dequantised",
              stages(prefill, "mma_sync"));
  const auto supports = [&](auto change, const Device& device = kH100) {
    return multiplies(changed(fp8(dense(2, 2048, 16, 128, kCausal)), change), nullptr, device);
  };
  check::that(supports([](FwdProblem&) {}) && supports([](FwdProblem& p) { p.heads_k = 4, p.is_varlen = true; }), "");
  check::that(!supports([](FwdProblem&) {}, kA100) && !supports([](FwdProblem&) {}, kB200), "other GPUs");
  check::that(!supports([](FwdProblem& p) { p.head_dim = p.head_dim_v = 96; }), "head dims");
  check::that(!supports([](FwdProblem& p) { p.has_head_scales = false; }), "scales of rows");
  check::that(!supports([](FwdProblem& p) { p.has_key_lengths = true; }), "seqused_k");
  check::that(!supports([](FwdProblem& p) { p.returns_max_logit = true; }), "max_logit");
  check::that(!supports([](FwdProblem& p) { p.q_dtype = Dtype::kBf16; }), "16-bit queries");
  check::that(!supports([](FwdProblem& p) { p.kv_dtype = Dtype::kInt8; }), "int8");
}

// Which calls with tangents have a kernel, and its plan.
void check_tangents() {
  const auto family = [](auto change, const Device& device = kH100, const char* forced = nullptr) {
    const auto plan = flash::plan::plan_jvp_fwd(changed(dense(2, 2048, 16, 128, kCausal), change), device, forced);
    return plan ? std::string(flash::plan::family_name(plan->family)) : "none";
  };
  const auto same = [](FwdProblem&) {};
  check::that(family([](FwdProblem& p) { p.heads_k = 4, p.is_varlen = true; }) == "wgmma", "packed");
  check::that(family([](FwdProblem& p) { p.head_dim = 32, p.head_dim_v = 72; }) == "wgmma", "head dims up to 128");
  check::that(family([](FwdProblem& p) { p.head_dim_v = 136; }) == "none", "head dims above 128");
  check::that(family([](FwdProblem& p) { p.head_dim_v = 100; }) == "none", "no whole vectors");
  check::that(family([](FwdProblem& p) { p.modifiers = flash::Modifiers::kSoftcap; }) == "none", "softcap");
  check::that(family([](FwdProblem& p) { p.seqlen_k = 0; }) == "none", "no keys");
  check::that(family(same, kA100) == "mma_sync" && family(same, kB200) == "mma_sync", "other GPUs");
  check::that(family(same, kH100, "mma_sync") == "mma_sync" && family(same, kH100, "wgmma") == "wgmma", "forced");
  check::that(family([](FwdProblem& p) { p.fits_tensor_maps = false; }) == "mma_sync", "strides");
  check::that(family(same, flash::plan::limited(kA100, 60000)) == "none", "too little shared memory");
  check::that(family([](FwdProblem& p) { p.batch = p.heads = int64_t{1} << 30; }) == "none", "too many work tiles");
  for (const int head_dim : {8, 64, 96, 128}) {
    for (const FwdProblem& problem : {dense(1, 8192, 32, head_dim), packed(8, 2048, 16, head_dim, kCausal)}) {
      const FwdPlan plan = *flash::plan::plan_jvp_fwd(problem, kH100, nullptr);
      check::that(plan.head_dim == (head_dim > 64 ? 128 : 64) && plan.block_m == 128, "tile", head_dim);
      check::that(plan.smem_bytes <= kH100.smem_per_block, "shared memory", head_dim, plan.smem_bytes);
      check::that(plan.stages.has(flash::plan::Stage::kPrepare) >= problem.is_varlen, "segments", head_dim);
      check::that(plan.is_dynamic <= plan.stages.has(flash::plan::Stage::kPrepare), "a cleared semaphore", head_dim);
      const FwdPlan other = *flash::plan::plan_jvp_fwd(problem, kA100, nullptr);
      check::that(other.head_dim == plan.head_dim && !other.small_tile, "tile of mma.sync", head_dim);
      const FwdPlan small = *flash::plan::plan_jvp_fwd(problem, kL40, nullptr);
      check::that(small.small_tile == (head_dim > 64) && small.smem_bytes <= kL40.smem_per_block, "L40", head_dim);
      check::that(other.stages.has(flash::plan::Stage::kPrepare) == problem.is_varlen, "segments", head_dim);
      check::that(other.grid * other.block_m >= problem.heads * problem.seqlen_q, "all rows", head_dim, other.grid);
    }
  }
}

// K and V in pages are gathered; if max_seqlen_k may be too small, the decode kernels follow.
void check_gathered() {
  FwdProblem problem = packed(8, 2048, 16, 128, kCausal);
  problem.kv_dtype = Dtype::kInt8;
  problem.dtype = Dtype::kFp16;
  problem.gathers_keys = true;
  problem.dequantized_rows = 2048;
  problem.decode = {8, 8 * 2048, 16, 16, 128, 4096};
  const auto stages = [&] {
    return std::get<std::string>(
        flash::plan::explain(problem, flash::plan::plan_fwd(problem, kH100, "wgmma"))["stages"]);
  };
  check::that(stages() == "prepare,dequantize,attention,recompute", "some sequence may be longer", stages());
  problem.decode.capacity = 2048;
  check::that(stages() == "prepare,dequantize,attention", "none is longer", stages());
}

// The lists of a mask hold every block; they are made after the segments of a packed batch and before the one kernel
// that reads them.
void check_lists(const FwdProblem& problem, const FwdPlan& plan) {
  using flash::plan::Stage;
  const flash::plan::MaskPlan& mask = plan.mask;
  check::that(mask.matrices == problem.mask_matrices && !mask.of_keys, "matrices", mask.matrices);
  check::that(mask.tile % plan.block_m == 0 && mask.block % plan.block_n == 0, "whole tiles of the kernel", mask.tile);
  check::that(mask.tile % flash::kMaskStrip == 0 && mask.block % flash::kMaskStrip == 0 &&
                  mask.tile / flash::kMaskStrip <= flash::kMaxTileStrips,
              "whole strips", mask.tile, mask.block);
  const int64_t matrices = problem.heads * (problem.is_varlen ? 1 : problem.batch);
  check::that(mask.tile != plan.block_m || mask.tiles * matrices == plan.num_work_tiles, "a list for every tile",
              mask.tiles);
  check::that(mask.capacity * mask.block >= problem.seqlen_k, "room for all blocks", mask.capacity);
  check::that(plan.workspace_bytes >= 4 * mask.words(), "workspace", plan.workspace_bytes);
  std::vector<Stage> stages(plan.stages.begin(), plan.stages.end());
  check::that(stages.size() >= 2 && stages[stages.size() - 2] == Stage::kMaskPlan &&
                  stages.back() == Stage::kAttention && plan.stages.has(Stage::kPrepare) >= problem.is_varlen,
              "stages", stages.size());
}

void check_mma_sync_mask(const FwdProblem& problem, const FwdPlan& plan) {
  check::that(plan.family == Family::kMmaSync && plan.variant == FwdVariant::kDropout, "mma.sync", problem.head_dim);
  check_lists(problem, plan);
}

// Masks as data, whatever the sizes.
void check_masks() {
  using flash::plan::Stage;
  for (int head_dim : {8, 32, 64, 96, 128, 160, 192, 256, 512}) {
    for (int head_dim_v : {head_dim, 128}) {
      for (int64_t seqlen : {1, 100, 1000, 100000}) {
        for (int options = 0; options < 64; ++options) {
          FwdProblem problem = options & 1 ? packed(3, seqlen, 8, head_dim) : dense(3, seqlen, 8, head_dim);
          problem.head_dim_v = head_dim_v;
          problem.mask_matrices = options & 2 ? 6 : 1;
          problem.mask_block_rows = options & 32 ? 128 : options & 2 ? 384 : 0;
          if (options & 4) problem.window = kCausal;
          problem.has_dropout = options & 8;
          problem.batch_invariant = options & 16;
          for (const char* forced : {static_cast<const char*>(nullptr), "mma_sync", "split_kv", "wgmma:8"}) {
            const FwdPlan plan = plan_of(problem, kH100, forced);
            if (head_dim > 256 || (forced != nullptr && std::string(forced) == "mma_sync")) {
              check_mma_sync_mask(problem, plan);
              continue;
            }
            check::that(plan.family == Family::kWgmma && plan.num_splits == 1 && !plan.pdl, "kernel", head_dim, seqlen,
                        options, flash::plan::family_name(plan.family));
            const int wide = problem.max_head_dim();
            const bool is_short = options & 32 && wide <= 128;
            check::that(plan.variant == (is_short ? FwdVariant::kListedShort : FwdVariant::kListed), "variant",
                        head_dim, flash::plan::variant_name(plan.variant));
            if (is_short) check::that(plan.block_m == 128, "a row of blocks is a tile", plan.block_m);
            check::that(plan.head_dim == (wide <= 64    ? 64
                                          : wide <= 128 ? 128
                                                        : 256) &&
                            !plan.has_value_dim(),
                        "head dim of the kernel", head_dim, plan.head_dim);
            check::that(plan.mask.tile == plan.block_m && plan.mask.block == plan.block_n, "tiles", plan.mask.tile);
            check_lists(problem, plan);
          }
          for (const Device& device : {kA100, kL40, kB200, kRtx5090}) {
            check_mma_sync_mask(problem, plan_of(problem, device));
          }
          problem.mask_matrices = 0;
          const FwdPlan plain = plan_of(problem, kH100);
          check::that(
              plain.variant != FwdVariant::kListed && !plain.stages.has(Stage::kMaskPlan) && plain.mask.words() == 0,
              "no mask", head_dim, seqlen, options);
        }
      }
    }
  }
}

// Biases as data: by list on Hopper, without a mask by the window unless it hides first keys; else by mma.sync with its
// kernels for all options, there by list with a mask alone.
void check_biases() {
  for (int head_dim : {8, 32, 64, 96, 128, 160, 192, 256, 320, 512}) {
    for (int options = 0; options < 32; ++options) {
      FwdProblem problem = options & 1 ? packed(3, 1000, 8, head_dim) : dense(3, 1000, 8, head_dim);
      if (options & 8) problem.window.right = options & 2 ? 30 : 0;
      if (options & 16) problem.window.left = 100;
      problem.has_bias = true;
      problem.modifiers = flash::Modifiers::kAny;
      problem.has_key_lengths = options & 2;
      const bool has_mask = options & 4;
      problem.mask_matrices = has_mask ? 6 : 0;
      for (const char* forced : {static_cast<const char*>(nullptr), "mma_sync", "split_kv", "wgmma:8"}) {
        const FwdPlan plan = plan_of(problem, kH100, forced);
        const bool declined = forced != nullptr && std::string(forced) == "mma_sync";
        const bool listed = head_dim <= 256 && !declined && (has_mask || !problem.has_key_lengths);
        check::that(plan.family == (listed ? Family::kWgmma : Family::kMmaSync) && plan.num_splits == 1, "family",
                    head_dim, options);
        check::that(plan.variant == (listed ? FwdVariant::kBiased : FwdVariant::kDropout), "variant", head_dim,
                    flash::plan::variant_name(plan.variant));
        const bool has_lists = has_mask || (listed && options & 16);
        check::that(plan.stages.has(flash::plan::Stage::kMaskPlan) == has_lists, "plan of lists", head_dim, options);
        check::that(!listed || !has_lists || !plan.pdl, "lists are read early", head_dim, options);
        check::that(plan.mask.matrices == (has_mask ? 6 : has_lists), "lists", head_dim, plan.mask.matrices);
        check::that(!listed || !has_lists || (plan.mask.tile == plan.block_m && plan.mask.block == plan.block_n),
                    "tiles", head_dim);
      }
      problem.mask_matrices = 0;
      for (const Device& device : {kA100, kL40, kB200, kRtx5090}) {
        const FwdPlan plan = plan_of(problem, device);
        check::that(plan.family == Family::kMmaSync && plan.variant == FwdVariant::kDropout, "elsewhere", head_dim);
      }
    }
  }
}

}  // namespace

int main() {
  check_table();
  check_biases();
  check_tangents();
  check_splits();
  check_row_max();
  check_other_families();
  check_whole_waves();
  check_clusters();
  check_pairs();
  check_tile_order();
  check_rules();
  check_masks();
  check_tensor_maps();
  check_explained();
  check_e4m3();
  check_gathered();
  return check::report();
}
