// Tables of calls and their backward plans on GPUs that exist, and the rules that every plan keeps.
#include "plan/bwd_plan.h"

#include <string>
#include <vector>

#include "check.h"
#include "plan/explain.h"

namespace {

using flash::kUnbounded;
using flash::Window;
using flash::plan::BwdPlan;
using flash::plan::BwdProblem;
using flash::plan::BwdVariant;
using flash::plan::Device;
using flash::plan::Family;

constexpr Device kH100{90, 132, 233472, 232448};  // and H200
constexpr Device kA100{80, 108, 167936, 166912};
constexpr Device kL40{89, 142, 102400, 101376};
constexpr Device kB200{100, 148, 233472, 232448}, kRtx5090{120, 170, 102400, 101376};
constexpr Window kCausal{kUnbounded, 0};

BwdProblem dense(int64_t batch, int64_t seqlen, int64_t heads, int head_dim) {
  BwdProblem problem;
  problem.batch = batch;
  problem.heads = problem.heads_k = heads;
  problem.head_dim = problem.head_dim_v = head_dim;
  problem.seqlen_q = problem.seqlen_k = seqlen;
  return problem;
}

template <class Change>
BwdProblem changed(BwdProblem problem, Change change) {
  change(problem);
  return problem;
}

BwdPlan plan_of(const BwdProblem& problem, const Device& device, const char* forced = nullptr) {
  return flash::plan::plan_bwd(problem, device, forced);
}

struct Row {
  const char* name;
  BwdProblem problem;
  Device device;
  Family family;
  BwdVariant variant;
  int head_dim, block_n, stages, threads, smem_bytes;
  int64_t grid;
  bool is_dynamic;
};

std::vector<Row> table() {
  constexpr Family kMma = Family::kMmaSync, kWgmma = Family::kWgmma;
  using V = BwdVariant;
  const auto dropout = [](BwdProblem& problem) { problem.has_dropout = true; };
  const auto sums = [](BwdProblem& problem) { problem.accumulates_dkv = true; };
  const auto dropout_sums = [](BwdProblem& problem) { problem.has_dropout = problem.accumulates_dkv = true; };
  const auto origins = [](BwdProblem& problem) { problem.has_origins = true; };
  const auto modified = [](BwdProblem& problem) { problem.modifiers = flash::Modifiers::kAny; };
  const auto wide = [](BwdProblem& problem) { problem.head_dim = 192; };
  const BwdProblem long_64 = dense(2, 8192, 32, 64), long_128 = dense(2, 8192, 16, 128);
  return {
      {"d 64", dense(16, 1000, 32, 64), kH100, kWgmma, V::kPlain, 64, 128, 3, 512, 215040, 132, true},
      {"d 64, dropout", changed(long_64, dropout), kH100, kWgmma, V::kGeneral, 64, 128, 3, 512, 218112, 132, true},
      {"d 64, dQ in shared memory", dense(32, 512, 32, 64), kH100, kWgmma, V::kPlain, 64, 128, 2, 512, 231424, 132,
       false},
      {"d 64, sums", changed(dense(32, 512, 32, 64), sums), kH100, kWgmma, V::kAccumulate, 64, 128, 3, 512, 215040, 132,
       true},
      {"d 64, dropout, sums", changed(long_64, dropout_sums), kH100, kWgmma, V::kGeneral, 64, 128, 3, 512, 218112, 132,
       true},
      {"d 96", dense(2, 1024, 16, 96), kH100, kWgmma, V::kPlain, 128, 128, 2, 384, 231424, 132, true},
      {"d 96, many rows", dense(2, 8192, 16, 96), kH100, kWgmma, V::kPlain, 128, 128, 2, 384, 230400, 132, true},
      {"d 128, softcap", changed(long_128, modified), kH100, kWgmma, V::kGeneral, 128, 128, 2, 384, 200704, 132, true},
      {"d 192, V of 128", changed(long_128, wide), kH100, kWgmma, V::kPlain, 192, 128, 2, 384, 198656, 132, true},
      {"d 192, V of 128, sums", changed(changed(long_128, wide), sums), kH100, kWgmma, V::kAccumulate, 192, 128, 2, 384,
       198656, 132, true},
      {"d 192, V of 128, dropout", changed(changed(long_128, wide), dropout), kH100, kWgmma, V::kGeneral, 192, 64, 2,
       384, 142336, 132, true},
      {"d 192", dense(2, 8192, 16, 192), kH100, kWgmma, V::kPlain, 192, 64, 2, 384, 165888, 132, true},
      {"d 160", dense(2, 8192, 16, 160), kH100, kWgmma, V::kPlain, 192, 64, 2, 384, 165888, 132, true},
      {"d 256, few", dense(1, 512, 8, 256), kH100, kWgmma, V::kPlain, 256, 64, 2, 384, 215040, 64, false},
      {"d 32", dense(2, 8192, 16, 32), kH100, kMma, V::kPlain, 32, 128, 2, 128, 65536, 2048, false},
      {"d 32 on A100", dense(2, 8192, 16, 32), kA100, kMma, V::kPlain, 32, 128, 2, 128, 65536, 2048, false},
      {"d 32 on L40", dense(2, 8192, 16, 32), kL40, kMma, V::kPlain, 32, 64, 2, 128, 40960, 4096, false},
      {"d 128 on A100", long_128, kA100, kMma, V::kPlain, 128, 64, 2, 128, 114688, 4096, false},
      {"d 128 on L40", long_128, kL40, kMma, V::kPlain, 128, 64, 1, 128, 81920, 4096, false},
      {"d 128, sums, on A100", changed(long_128, sums), kA100, kMma, V::kAccumulate, 128, 64, 2, 128, 114688, 4096,
       false},
      {"d 64, dropout, sums, on L40", changed(long_64, dropout_sums), kL40, kMma, V::kAccumulate, 64, 64, 2, 128, 65536,
       8192, false},
      {"d 64, origins, on L40", changed(long_64, origins), kL40, kMma, V::kDropout, 64, 64, 2, 128, 65536, 8192, false},
      {"d 64, dropout, on L40", changed(long_64, dropout), kL40, kMma, V::kDropout, 64, 64, 2, 128, 65536, 8192, false},
      {"d 192 on L40", dense(1, 512, 8, 192), kL40, kMma, V::kPlain, 192, 64, 1, 256, 90112, 64, false},
      {"d 256, dropout, on L40", changed(dense(1, 512, 8, 256), dropout), kL40, kMma, V::kDropout, 256, 64, 1, 256,
       90112, 64, false},
      {"d 512", dense(1, 512, 8, 512), kH100, kWgmma, V::kPlain, 512, 64, 1, 384, 231424, 128, false},
      {"d 512, dropout", changed(dense(1, 512, 8, 512), dropout), kH100, kMma, V::kDropout, 512, 32, 2, 256, 200704,
       128, false},
      {"d 320, sums", changed(dense(1, 512, 8, 320), sums), kH100, kMma, V::kAccumulate, 512, 32, 2, 256, 200704, 128,
       false},
      {"d 512 on A100", dense(1, 512, 8, 512), kA100, kMma, V::kPlain, 512, 32, 1, 256, 135168, 128, false},
      {"d 512 on L40", dense(1, 512, 8, 512), kL40, kMma, V::kPlain, 512, 32, 1, 256, 100352, 128, false},
      {"d 256 on A100", dense(1, 512, 8, 256), kA100, kMma, V::kPlain, 256, 64, 1, 256, 147456, 64, false},
  };
}

void check_table() {
  for (const Row& row : table()) {
    const BwdPlan plan = plan_of(row.problem, row.device);
    check::that(plan.family == row.family && plan.variant == row.variant && plan.head_dim == row.head_dim, "kernel",
                row.name, flash::plan::family_name(plan.family), flash::plan::variant_name(plan.variant),
                plan.head_dim);
    const bool small_rows = plan.head_dim == 512 && plan.family == Family::kMmaSync;
    const int block_m = small_rows ? (plan.small_tile ? 16 : 32) : plan.small_tile && plan.head_dim == 256 ? 32 : 64;
    check::that(plan.block_m == block_m && plan.block_n == row.block_n && plan.stages == row.stages, "tile", row.name,
                plan.block_n, plan.stages);
    check::that(plan.threads == row.threads && plan.smem_bytes == row.smem_bytes, "threads", row.name, plan.threads,
                plan.smem_bytes);
    check::that(plan.grid == row.grid && plan.is_dynamic == row.is_dynamic, "grid", row.name, plan.grid);
  }
  Device tiny = kL40;
  tiny.smem_per_block = 49152;
  check::that(plan_of(dense(1, 512, 8, 192), tiny).stages == 0, "head dim 192 does not fit 48 KB");
}

void check_memory() {
  BwdProblem problem = dense(2, 1000, 4, 128);
  const int64_t tiles = 2 * 4 * 16, accum = tiles * 64 * 128;
  BwdPlan plan = plan_of(problem, kH100);
  check::that(plan.accum_words() == accum && plan.semaphore_words() == 0, "accumulator", plan.accum_words());
  check::that(plan.workspace_bytes == 4 * accum + 16 && plan.dq_grid == tiles, "workspace", plan.workspace_bytes);
  check::that(plan.softmax_d_rows == 1024 && plan.softmax_d_blocks == 8, "softmax_d", plan.softmax_d_rows);
  problem.deterministic = true;
  plan = plan_of(problem, kH100);
  check::that(plan.semaphore_words() == tiles && plan.workspace_bytes == 4 * (accum + tiles) + 16, "semaphores",
              plan.workspace_bytes);
  plan = plan_of(dense(32, 512, 32, 64), kH100);
  check::that(plan.dq_in_smem && plan.workspace_bytes == 0 && plan.dq_grid == 0, "no accumulator");
}

// A kernel before the main one clears the first band alone, of large calls without options.
void check_bands() {
  const auto banded = [](int64_t batch, int64_t seqlen, int64_t heads, int head_dim, auto change,
                         const Device& device = kH100) {
    return plan_of(changed(dense(batch, seqlen, heads, head_dim), change), device);
  };
  const auto same = [](BwdProblem&) {};
  const auto listed = [](BwdProblem& p) { p.mask_matrices = 1; };
  BwdPlan plan = banded(1, 32768, 16, 128, listed);
  check::that(plan.bands.count == 16 && plan.bands.heads == 1 && plan.preparing_shares == 16, "a head");
  check::that(plan.leading_words() == 32 && plan.cleared_vectors() == (32 + 512 * 64 * 128) / 4 &&
                  plan.workspace_vectors() == (32 + 16 * 512 * 64 * 128) / 4,
              "workspace", plan.workspace_vectors());
  plan = banded(32, 512, 16, 128, same);
  check::that(plan.bands.heads == 33 && plan.bands.count == 16 && plan.preparing_shares == 33, "33 heads");
  plan = banded(8, 16384, 16, 64, [](BwdProblem& p) { p.is_varlen = true; });
  check::that(plan.bands.count == 16 && plan.bands.dq_tiles == plan.dq_tiles / 16, "packed", plan.bands.count);
  const auto causal = [](BwdProblem& p) { p.window = kCausal; };
  for (const BwdPlan& other : {banded(24, 600, 16, 128, same), banded(1, 2048, 64, 128, same),
                               banded(4, 520, 80, 128, same), banded(1, 4096, 32, 64, causal)}) {
    check::that(other.bands.count >= 8 && other.preparing_shares == 16, "tests and sanitizers", other.bands.count);
  }
  check::that(banded(1, 2048, 64, 128, same).long_rows && banded(1, 4096, 32, 64, causal).long_rows, "long rows");
  Device one = kH100;
  one.multiprocessors = 1;
  plan = banded(8, 2048, 16, 128, same, one);
  check::that(plan.bands.count > 1 && plan.preparing_shares == 1, "one multiprocessor", plan.preparing_shares);
  for (const BwdPlan& other :
       {banded(1, 4096, 4, 128, same), banded(8, 2048, 16, 128, [](BwdProblem& p) { p.has_dropout = true; }),
        banded(8, 2048, 16, 128, [](BwdProblem& p) { p.deterministic = true; }), banded(32, 512, 16, 64, same),
        banded(8, 2048, 16, 256, same),
        banded(8, 2048, 16, 128, [](BwdProblem& p) { p.stage = flash::plan::BwdStage::kAdd; })}) {
    check::that(
        other.bands.count == 1 && other.preparing_shares == 0 && other.cleared_vectors() == other.workspace_vectors(),
        "no bands", other.bands.count);
  }
}

// Calls that share a sum of dQ have one layout of it, whatever their keys, and a place for it.
void check_stages() {
  using flash::plan::BwdStage;
  for (const Device& device : {kH100, kA100, kL40}) {
    for (int head_dim : {32, 64, 128, 192, 256, 512}) {
      BwdProblem problem = dense(32, 512, 32, head_dim);
      problem.stage = BwdStage::kBegin;
      const BwdPlan begin = plan_of(problem, device);
      check::that(!begin.dq_in_smem, "no heads in shared memory", head_dim);
      check::that(begin.runs(BwdStage::kBegin) && !begin.runs(BwdStage::kAdd) && !begin.runs(BwdStage::kEnd), "begin");
      problem.stage = BwdStage::kAdd;
      problem.seqlen_k = 4096;
      problem.window = kCausal;
      problem.has_dropout = problem.accumulates_dkv = true;
      const BwdPlan add = plan_of(problem, device);
      check::that(add.has_dq_sum == begin.has_dq_sum && add.dq_tiles == begin.dq_tiles &&
                      add.dq_tile_floats == begin.dq_tile_floats && add.dq_tile_parts() == begin.dq_tile_parts(),
                  "layout", head_dim);
      check::that(add.softmax_d_rows == begin.softmax_d_rows, "softmax_d", head_dim);
      if (begin.family == Family::kWgmma && begin.has_dq_sum) {
        const BwdPlan other = plan_of(problem, device, "mma_sync");
        check::that(other.dq_tile_parts() != add.dq_tile_parts(), "another family's layout", head_dim);
      }
    }
  }
  check::that(!plan_of(dense(32, 512, 32, 64), kH100).has_dq_sum, "dQ in shared memory has no sum");
}

// Above head dim 128 dQ has a separate pass: no accumulator, no semaphores but those of work tiles, one way in both
// modes.
void check_dq_pass() {
  BwdProblem problem = dense(2, 1000, 24, 256);
  const BwdPlan plan = plan_of(problem, kH100);
  check::that(plan.dq_pass && plan.accum_words() == 0 && plan.workspace_bytes == 16, "workspace", plan.workspace_bytes);
  check::that(plan.dq_tiles == 2 * 24 * 8 && plan.dq_is_dynamic && plan.dq_grid == 132, "tiles", plan.dq_tiles);
  check::that(plan.dq_smem_bytes == 230400 && plan.dq_threads == 384, "pass", plan.dq_smem_bytes, plan.dq_threads);
  problem.deterministic = true;
  const BwdPlan ordered = plan_of(problem, kH100);
  check::that(ordered.semaphore_words() == 0 && ordered.workspace_bytes == 16, "no semaphores");
  check::that(ordered.running_n_blocks == plan.running_n_blocks, "the same order of n_blocks");
  const BwdPlan few = plan_of(dense(1, 500, 4, 192), kH100);
  check::that(few.dq_tiles == 16 && few.dq_grid == 16 && !few.dq_is_dynamic, "few rows", few.dq_grid);
  problem.is_varlen = true;
  check::that(plan_of(problem, kH100).dq_tiles == 24 * (1000 / 128 + 2 + 2), "slots of packed rows");
  check::that(!plan_of(dense(2, 1000, 24, 128), kH100).dq_pass, "head dim 128");
  check::that(!plan_of(dense(2, 1000, 24, 256), kA100).dq_pass, "mma.sync");
}

// At head dim 64 steps of 128 rows where a causal mask has many, in calls whose bits may depend on that.
void check_tall_tile() {
  const auto block_m = [](int64_t rows, int head_dim, const auto& change) {
    BwdProblem problem = dense(2, rows, 32, head_dim);
    problem.window = kCausal;
    return plan_of(changed(problem, change), kH100).block_m;
  };
  const auto same = [](BwdProblem&) {};
  const int64_t rows = flash::plan::kLongRows;
  for (int head_dim : {40, 64}) {
    check::that(block_m(rows, head_dim, same) == 128 && block_m(rows - 1, head_dim, same) == 64, "rows", head_dim);
  }
  check::that(block_m(rows, 72, same) == 64, "wider heads");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.window = {}; }) == 64, "no mask");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.window.left = 1024; }) == 64, "window");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.deterministic = true; }) == 128, "deterministic");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.seqlen_k = 8; }) == 128, "few keys");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.seqlen_q = 8; }) == 64, "few rows");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.is_varlen = true; }) == 64, "packed: the mean");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.has_dropout = true; }) == 64, "dropout");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.accumulates_dkv = true; }) == 64, "sums");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.batch_invariant = true; }) == 64, "batch-invariant");
  check::that(block_m(rows, 64, [](BwdProblem& problem) { problem.stage = flash::plan::BwdStage::kAdd; }) == 64,
              "stage");
  BwdProblem causal = dense(2, 8192, 32, 64);
  causal.window = kCausal;
  const BwdPlan plan = plan_of(causal, kH100);
  check::that(plan.stages == 2 && plan.threads == 384 && plan.smem_bytes == 232448, "kernel", plan.smem_bytes);
  check::that(plan.dq_tiles == 2 * 32 * 64 && plan.dq_tile_floats == 128 * 64 && plan.dq_smem_bytes == 2 * 128 * 64,
              "tiles of dQ", plan.dq_tiles, plan.dq_tile_floats);
}

// At head dim 128 one buffer of K where rows are many, whatever else the call is.
void check_one_k_tile() {
  const auto is_long = [](int64_t rows, const auto& change) {
    return plan_of(changed(dense(2, rows, 16, 128), change), kH100).long_rows;
  };
  const auto same = [](BwdProblem&) {};
  const int64_t rows = flash::plan::kOneKRows;
  check::that(is_long(rows, same) && !is_long(rows - 1, same), "rows");
  const auto causal = [](BwdProblem& problem) { problem.window = kCausal; };
  check::that(is_long(flash::plan::kLongRows, causal) && !is_long(flash::plan::kLongRows - 1, causal), "causal");
  check::that(is_long(rows, [](BwdProblem& problem) { problem.batch_invariant = true; }), "batch-invariant");
  check::that(is_long(rows, [](BwdProblem& problem) { problem.stage = flash::plan::BwdStage::kAdd; }), "stage");
  check::that(!is_long(rows, [](BwdProblem& problem) { problem.window.left = 1024; }), "window");
  check::that(!is_long(rows, [](BwdProblem& problem) { problem.is_varlen = true; }), "packed: the mean");
  check::that(!is_long(rows, [](BwdProblem& problem) { problem.has_dropout = true; }), "dropout");
  check::that(!is_long(rows, [](BwdProblem& problem) { problem.accumulates_dkv = true; }), "sums");
  check::that(!is_long(rows, [](BwdProblem& problem) { problem.head_dim = problem.head_dim_v = 192; }), "wider heads");
  const auto smem_bytes = [](const flash::plan::Sm90BwdTile& tile) {
    return flash::plan::sm90_bwd_smem_bytes(tile, false, false, flash::Dtype::kBf16);
  };
  const int one = smem_bytes(flash::plan::kSm90OneKBwdTile), two = smem_bytes(flash::plan::sm90_bwd_tile(128, 128));
  check::that(two - one >= 2 * 128 * 128, "K", one, two);
}

// At head dim 128 a separate pass where sequences are short, in calls whose bits may depend on that.
void check_two_passes() {
  using flash::plan::BwdStage;
  const auto longest = [](bool masked_right, bool deterministic) {
    return flash::plan::longest_sequence(flash::plan::BwdSchedule::kTwoPass, 128, masked_right, deterministic);
  };
  const int64_t short_keys = longest(false, false), short_causal = longest(true, false);
  const auto has_pass = [](int64_t seqlen, int head_dim, const auto& change) {
    return plan_of(changed(dense(16, seqlen, 24, head_dim), change), kH100).dq_pass;
  };
  const auto same = [](BwdProblem&) {};
  const auto causal = [](BwdProblem& problem) { problem.window = kCausal; };
  for (int head_dim : {96, 128}) {
    check::that(has_pass(short_keys, head_dim, same) && !has_pass(short_keys + 1, head_dim, same), "full", head_dim);
    check::that(has_pass(short_causal, head_dim, causal) && !has_pass(short_causal + 1, head_dim, causal), "causal",
                head_dim);
  }
  check::that(!has_pass(short_keys, 64, same), "head dim 64");
  const auto few = [](BwdProblem& problem) { problem.batch = 3; };
  check::that(!has_pass(short_keys, 128, few) && !has_pass(1, 128, few), "few rows");
  const auto packed = [short_keys](BwdProblem& problem) {
    problem.is_varlen = true;
    problem.seqlen_q = problem.seqlen_k = short_keys * problem.batch;
  };
  check::that(has_pass(short_keys, 128, packed), "packed sequences count with their mean length");
  const int64_t ordered_keys = longest(true, true);
  const auto ordered = [](BwdProblem& problem) {
    problem.window = kCausal;
    problem.deterministic = true;
  };
  check::that(has_pass(ordered_keys, 128, ordered) && !has_pass(ordered_keys + 1, 128, ordered), "deterministic");
  check::that(has_pass(short_keys, 128, [](BwdProblem& problem) { problem.deterministic = true; }),
              "deterministic, full");
  check::that(!has_pass(short_keys, 128, [](BwdProblem& problem) { problem.has_dropout = true; }), "dropout");
  check::that(!has_pass(short_keys, 128, [](BwdProblem& problem) { problem.accumulates_dkv = true; }), "sums");
  check::that(!has_pass(short_keys, 128, [](BwdProblem& problem) { problem.batch_invariant = true; }),
              "batch-invariant");
  check::that(!has_pass(short_keys, 128, [](BwdProblem& problem) { problem.stage = BwdStage::kAdd; }), "stage");
  const BwdPlan plan = plan_of(dense(16, short_keys, 24, 128), kH100);
  check::that(plan.workspace_bytes == 16 && plan.threads == 384 && plan.dq_smem_bytes < plan.smem_bytes, "workspace",
              plan.workspace_bytes, plan.smem_bytes, plan.dq_smem_bytes);
}

// What the wgmma family cannot run the other one does; where V has another head dim, the call is padded.
void check_other_families() {
  const BwdProblem problem = dense(2, 4096, 16, 128);
  const auto is_mma_sync = [](const BwdPlan& plan) { return plan.family == Family::kMmaSync; };
  check::that(is_mma_sync(plan_of(problem, kH100, "mma_sync")), "forced");
  check::that(is_mma_sync(plan_of(changed(problem, [](BwdProblem& p) { p.seqlen_k = 0; }), kH100)), "no keys");
  check::that(is_mma_sync(plan_of(changed(problem, [](BwdProblem& p) { p.fits_tensor_maps = false; }), kH100)),
              "strides that no tensor map holds");
  Device without = kH100;
  without.wgmma_head_dims = 0;
  check::that(is_mma_sync(plan_of(problem, without)), "a build without wgmma kernels");
  const BwdProblem pair = changed(problem, [](BwdProblem& p) { p.head_dim_v = 60; });
  const BwdPlan padded = plan_of(pair, kA100), odd = plan_of(pair, kH100);
  check::that(is_mma_sync(padded) && padded.pad_head_dim == 128, "padded");
  check::that(!is_mma_sync(odd) && odd.pad_head_dim == 128, "V of no whole 16-byte vectors");
  const BwdPlan direct = plan_of(changed(pair, [](BwdProblem& p) { p.head_dim_v = 64; }), kH100);
  check::that(!is_mma_sync(direct) && direct.pad_head_dim == 0 && direct.head_dim == 128, "V of another head dim");
}

// A GPU of less shared memory made of a larger one.
void check_limit() {
  const Device limited = flash::plan::limited(kH100, kL40.smem_per_block);
  check::that(limited.smem_per_block == kL40.smem_per_block && limited.smem_per_multiprocessor == 102400, "limit");
  const BwdPlan small = plan_of(dense(1, 512, 8, 256), limited), whole = plan_of(dense(1, 512, 8, 256), kH100);
  check::that(small.small_tile && small.family == Family::kMmaSync && small.block_m == 32 && small.smem_bytes <= 101376,
              "tile of small memory");
  check::that(!whole.small_tile && whole.family == Family::kWgmma, "whole device");
  check::that(!plan_of(dense(1, 512, 8, 256), flash::plan::limited(kA100, 1 << 30)).small_tile, "no limit");
}

void check_rules() {
  for (const Device& device : {kH100, kA100, kL40, kB200, kRtx5090}) {
    for (int head_dim : {8, 32, 64, 96, 128, 192, 256}) {
      for (int64_t batch : {1, 5, 64}) {
        for (int64_t seqlen : {1, 100, 513, 8192}) {
          for (int options = 0; options < 32; ++options) {
            BwdProblem problem = dense(batch, seqlen, 8, head_dim);
            problem.is_varlen = options & 1;
            if (options & 2) problem.window = kCausal;
            problem.has_dropout = options & 4;
            problem.deterministic = options & 8;
            problem.batch_invariant = options & 16;
            const BwdPlan plan = plan_of(problem, device);
            check::that(plan.stages > 0, "every head dim has a tile that fits", head_dim);
            check::that(plan.family != Family::kWgmma || device.capability == 90, "wgmma", device.capability);
            check::that(plan.head_dim >= head_dim && plan.smem_bytes <= device.smem_per_block, "fits", head_dim,
                        plan.smem_bytes);
            check::that(plan.grid > 0 && plan.is_dynamic == (plan.grid < plan.order.blocks), "semaphore", plan.grid);
            check::that(!(plan.dq_in_smem && problem.batch_invariant), "batch-invariant", head_dim);
            check::that(plan.dq_in_smem == (plan.workspace_vectors() == 0), "workspace", head_dim);
            check::that(4 * plan.workspace_vectors() > plan.accum_words() + plan.semaphore_words() || plan.dq_in_smem,
                        "room for the semaphore of work tiles", head_dim);
          }
        }
      }
    }
  }
}

// The mma.sync kernels visit whole strips of a list by their smaller tiles, and have a tile of keys that fits.
void check_mma_sync_mask(const BwdProblem& problem, const BwdPlan& plan) {
  check::that(plan.family == Family::kMmaSync && plan.variant == BwdVariant::kDropout, "mma.sync", problem.head_dim);
  check::that(plan.mask.matrices == problem.mask_matrices && plan.mask.of_keys && plan.dq_mask.matrices == 0, "lists",
              plan.mask.matrices);
  check::that(plan.mask.tile % plan.block_n == 0 && plan.mask.tile % flash::kMaskStrip == 0 &&
                  plan.mask.block % plan.block_m == 0 && plan.mask.block % flash::kMaskStrip == 0,
              "whole tiles and strips", plan.mask.tile, plan.mask.block);
  check::that(plan.workspace_bytes >= 4 * plan.mask.words(), "workspace", plan.workspace_bytes);
}

// Masks as data: lists of m_blocks for tiles of keys, and of n_blocks for a separate kernel of dQ, which deterministic
// calls of the wgmma family always have.
void check_masks() {
  using flash::plan::MaskPlan;
  for (int head_dim : {8, 32, 64, 96, 128, 160, 192, 256, 512}) {
    for (int head_dim_v : {head_dim, 128}) {
      for (int64_t seqlen : {1, 100, 1000, 100000}) {
        for (int options = 0; options < 16; ++options) {
          BwdProblem problem = dense(3, seqlen, 8, head_dim);
          problem.head_dim_v = head_dim_v;
          problem.is_varlen = options & 1;
          problem.mask_matrices = options & 2 ? 6 : 1;
          problem.has_dropout = options & 4;
          problem.deterministic = options & 8;
          for (const char* forced : {static_cast<const char*>(nullptr), "mma_sync"}) {
            const BwdPlan plan = plan_of(problem, kH100, forced);
            if (forced != nullptr || head_dim > 256) {
              check_mma_sync_mask(problem, plan);
              continue;
            }
            check::that(plan.family == Family::kWgmma && !plan.dq_in_smem, "kernel", head_dim, seqlen, options);
            const bool has_pass = problem.deterministic || problem.max_head_dim() > 128;
            const bool is_plain = !has_pass && !problem.has_dropout;
            check::that(plan.variant == (is_plain ? BwdVariant::kListedPlain : BwdVariant::kListed), "variant",
                        head_dim, flash::plan::variant_name(plan.variant));
            BwdProblem mapped = problem;
            mapped.mask_block_rows = 128;
            check::that(plan_of(mapped, kH100, forced).order.order.width.divisor <= plan.order.order.width.divisor,
                        "a map keeps to fewer heads", head_dim, seqlen);
            check::that(plan.dq_pass == has_pass && plan.has_dq_semaphores() == false, "dQ", head_dim, options);
            check::that(plan.head_dim == plan.head_dim_v && flash::plan::has_listed_bwd(plan.head_dim, plan.head_dim) &&
                            plan.head_dim >= problem.max_head_dim(),
                        "head dim of the kernels", head_dim, plan.head_dim);
            check::that(plan.mask.matrices == problem.mask_matrices && plan.mask.of_keys &&
                            plan.mask.tile == plan.block_n && plan.mask.block == plan.block_m,
                        "lists of keys", plan.mask.tile, plan.mask.block);
            check::that(plan.mask.tiles * plan.mask.tile >= seqlen && plan.mask.capacity * plan.mask.block >= seqlen,
                        "room for all tiles and blocks", plan.mask.tiles, plan.mask.capacity);
            const MaskPlan& rows = plan.dq_mask;
            check::that((rows.matrices > 0) == has_pass && !rows.of_keys, "lists of rows", rows.matrices);
            if (has_pass) check::that(rows.tile == 128 && rows.block == 64, "tiles of dQ", rows.tile, rows.block);
            check::that(plan.workspace_bytes >= 4 * (plan.mask.words() + rows.words()), "workspace", options);
          }
          for (const Device& device : {kA100, kL40, kB200, kRtx5090}) {
            check_mma_sync_mask(problem, plan_of(problem, device));
          }
        }
      }
    }
  }
}

// Biases as data: by list on Hopper, with a separate kernel of dQ where a softcap is differentiated; else by mma.sync.
void check_biases() {
  for (int head_dim : {8, 32, 64, 128, 192, 256, 512}) {
    for (int options = 0; options < 16; ++options) {
      BwdProblem problem = dense(3, 1000, 8, head_dim);
      problem.has_bias = true;
      problem.modifiers = flash::Modifiers::kAny;
      problem.has_softcap = options & 1;
      problem.deterministic = options & 2;
      problem.is_varlen = options & 4;
      problem.has_dropout = options & 8;
      for (const char* forced : {static_cast<const char*>(nullptr), "mma_sync"}) {
        const BwdPlan plan = plan_of(problem, kH100, forced);
        const bool listed = head_dim <= 256 && forced == nullptr;
        check::that(plan.family == (listed ? Family::kWgmma : Family::kMmaSync), "family", head_dim, options);
        const bool has_pass = listed && (problem.has_softcap || problem.deterministic || head_dim > 128);
        const bool has_bits = listed && !has_pass && problem.has_dropout && head_dim > 64;  // leaves no room for boxes
        const BwdVariant by_list = has_pass || has_bits ? BwdVariant::kListed : BwdVariant::kBiased;
        check::that(plan.variant == (listed ? by_list : BwdVariant::kDropout), "variant", head_dim);
        check::that(plan.mask.matrices == listed, "lists", head_dim, plan.mask.matrices);
        check::that(plan.may_store_ds == (!problem.has_softcap && !has_bits), "dS", head_dim, options);
        check::that(plan.dq_pass == has_pass, "dQ", head_dim, options);
      }
      check::that(plan_of(problem, kA100).variant == BwdVariant::kDropout, "elsewhere", head_dim, options);
    }
  }
}

void check_explained() {
  const std::string line = one_line(flash::plan::explain(plan_of(dense(32, 512, 32, 64), kH100)));
  check::that(line.find("direction=backward kernel=wgmma variant=plain") == 0, "line", line);
  check::that(line.find(" dq_in_smem=1 has_dq_sum=0 dq_pass=0 deterministic=0 ") != std::string::npos, "flags", line);
}

}  // namespace

int main() {
  check_table();
  check_biases();
  check_memory();
  check_bands();
  check_stages();
  check_dq_pass();
  check_tall_tile();
  check_one_k_tile();
  check_two_passes();
  check_other_families();
  check_limit();
  check_rules();
  check_masks();
  check_explained();
  return check::report();
}
