// Plans of the decode kernels and of calls over a KV cache: a table of calls and their plans, and rules for all sizes.
#include <algorithm>
#include <string>
#include <utility>

#include "check.h"
#include "plan/call_plan.h"
#include "plan/decode_plan.h"
#include "plan/explain.h"
#include "plan/mla_plan.h"

namespace {

using flash::Dtype;
using flash::kUnbounded;
using flash::SplitRule;
using flash::Window;
using flash::plan::DecodePlan;
using flash::plan::DecodeProblem;
using flash::plan::Device;
using flash::plan::Family;
using flash::plan::FwdPlan;
using flash::plan::FwdProblem;
using flash::plan::Stage;

constexpr Device kH200{90, 132, 228 * 1024, 227 * 1024};
constexpr Device kA100{80, 108, 164 * 1024, 163 * 1024};
constexpr Device kSmall{86, 84, 100 * 1024, 99 * 1024};
constexpr Device kRtx5090{120, 170, 100 * 1024, 99 * 1024};
constexpr Device kDevices[] = {kH200, kA100, kSmall, kRtx5090};

// What a row of the table expects.
struct Expected {
  int tile_rows, thread_blocks;
  SplitRule rule;
  bool is_plain, in_clusters, combines;
  int64_t combine_blocks;
};

void check_row(const char* name, const DecodeProblem& problem, const Device& device, const Expected& expected) {
  const DecodePlan plan = flash::plan::plan_decode(problem, device);
  check::that(!plan.is_too_large && plan.stages > 0, name, "fits");
  const int rows = flash::plan::kv_tile(problem.head_dim, plan.tile_size, problem.kv_dtype).rows();
  check::that(rows == expected.tile_rows, name, "rows of a tile", rows);
  check::that(plan.thread_blocks == expected.thread_blocks, name, "thread blocks", plan.thread_blocks);
  check::that(plan.split_points.rule == expected.rule, name, "split points", static_cast<int>(plan.split_points.rule));
  check::that(plan.is_plain == expected.is_plain, name, "plain");
  check::that(plan.in_clusters == expected.in_clusters, name, "in clusters");
  check::that(plan.combines == expected.combines, name, "combines");
  check::that(plan.combine_blocks == expected.combine_blocks, name, "blocks of the combine", plan.combine_blocks);
}

DecodeProblem decoding(int batch, int heads, int heads_k, int head_dim, int capacity) {
  return {batch, 1, heads, heads_k, head_dim, capacity};
}

// Decoding: one token of each sequence.
void check_decoding() {
  const DecodeProblem problem = decoding(16, 32, 8, 128, 8192);
  check_row("16 sequences", problem, kH200, {16, 264, SplitRule::kAnywhere, true, true, true, 128});
  check_row("no clusters", problem, kA100, {16, 216, SplitRule::kAnywhere, true, false, true, 128});
  check_row("small GPU", problem, kSmall, {16, 84, SplitRule::kAnywhere, true, false, true, 83});
  check_row("whole tiles", decoding(64, 32, 8, 128, 8192), kH200,
            {16, 256, SplitRule::kAnywhere, true, false, true, 255});
  check_row("one sequence", decoding(1, 32, 8, 128, 65536), kH200,
            {16, 264, SplitRule::kAnywhere, true, false, true, 32});
  check_row("a short cache", decoding(4, 8, 8, 128, 64), kH200, {16, 16, SplitRule::kAnywhere, true, false, false, 0});
  check_row("padded head dim", decoding(16, 32, 8, 120, 8192), kH200,
            {16, 264, SplitRule::kAnywhere, false, false, true, 128});
  check_row("head dim 256", decoding(16, 32, 8, 256, 8192), kH200,
            {16, 128, SplitRule::kAnywhere, true, false, true, 127});
}

void check_splits() {
  DecodeProblem problem = decoding(2, 16, 4, 128, 4096);
  problem.num_splits = 1;
  check_row("one split", problem, kH200, {16, 264, SplitRule::kNowhere, true, false, false, 0});
  problem.num_splits = 5;
  check_row("five splits", problem, kH200, {16, 264, SplitRule::kEqualSplits, false, false, true, 32});
  problem.num_splits = 0;
  problem.batch_invariant = true;
  check_row("batch invariant", problem, kH200, {16, 264, SplitRule::kFixedSplits, false, false, true, 8});
  problem.capacity = 512;
  check_row("one fixed split", problem, kH200, {16, 64, SplitRule::kNowhere, false, false, false, 0});
}

// 33 to 64 packed rows of 16 bits at head dim 64 or 128, without what the kernel lacks.
void check_wgmma() {
  const auto by_wgmma = [](const DecodeProblem& problem, const Device& device = kH200) {
    return flash::plan::plan_decode(problem, device).by_wgmma;
  };
  DecodeProblem problem = decoding(16, 32, 8, 128, 4096);
  for (const int tokens : {1, 8, 9, 16, 17, 100}) {
    problem.seqlen_q = tokens;
    check::that(by_wgmma(problem) == (tokens > 8), "rows of a tile", tokens);
  }
  problem.options.page_size = 1;
  problem.options.has_leftpad = true;
  check::that(by_wgmma(problem) && !by_wgmma(problem, kA100), "any page, by compute capability 9.0");
  Device small = flash::plan::limited(kH200, 100 * 1024);
  check::that(!by_wgmma(problem, small), "a GPU of less shared memory");
  const auto lacks = [&](const char* what, auto set) {
    DecodeProblem other = problem;
    set(other);
    check::that(!by_wgmma(other), what);
  };
  lacks("head dim 96", [](DecodeProblem& p) { p.head_dim = 96; });
  lacks("head dim 120", [](DecodeProblem& p) { p.head_dim = 120; });
  lacks("8 bits", [](DecodeProblem& p) { p.kv_dtype = Dtype::kE4m3; });
  lacks("batch invariant", [](DecodeProblem& p) { p.batch_invariant = true; });
  lacks("score modifiers", [](DecodeProblem& p) { p.options.has_score_mod = true; });
  lacks("rotary queries", [](DecodeProblem& p) { p.options.has_rotary = true; });
  lacks("mask bits", [](DecodeProblem& p) { p.options.has_mask_bits = true; });
  lacks("rows of q without 16-byte vectors", [](DecodeProblem& p) { p.options.q_vectors = false; });
  lacks("rows of the cache without 16-byte vectors", [](DecodeProblem& p) { p.options.kv_vector_bytes = 4; });
}

// Each of these alone takes the kernel with all features.
void check_variant() {
  const DecodeProblem plain = decoding(16, 32, 8, 64, 8192);
  const auto is_plain = [](const DecodeProblem& problem) { return flash::plan::plan_decode(problem, kH200).is_plain; };
  check::that(is_plain(plain), "plain");
  DecodeProblem problem = plain;
  problem.options.has_score_mod = true;
  check::that(!is_plain(problem), "score modifiers");
  problem = plain;
  problem.options.has_rotary = true;
  check::that(!is_plain(problem), "rotary queries");
  problem = plain;
  problem.options.has_mask_bits = true;
  check::that(!is_plain(problem) && flash::plan::plan_decode(problem, kH200).masks_bits, "mask bits");
  problem = plain;
  problem.options.q_vectors = false;
  check::that(!is_plain(problem), "rows of q without 16-byte vectors");
  problem = plain;
  problem.options.kv_vector_bytes = 4;
  check::that(!is_plain(problem), "rows of the cache without 16-byte vectors");
  problem = plain;
  problem.options.has_leftpad = true;
  check::that(is_plain(problem), "padding of a dense cache");
  problem.options.page_size = 64;
  check::that(!is_plain(problem), "padding of pages, which steps straddle");
  problem.options.has_leftpad = false;
  check::that(is_plain(problem), "pages of whole steps");
  problem.options.page_size = 48;
  check::that(!is_plain(problem), "pages that steps straddle");
  check::that(!is_plain(decoding(1024, 64, 64, 64, 1 << 21)), "n_blocks of more than 30 bits");
  const auto swaps_ab = [](const DecodeProblem& problem) { return flash::plan::plan_decode(problem, kH200).swaps_ab; };
  check::that(!swaps_ab(plain), "16 bits");
  problem = plain;
  problem.kv_dtype = Dtype::kInt8;
  check::that(swaps_ab(problem), "8 bits, 8 rows at most");
  check::that(!flash::plan::plan_decode(problem, kA100).swaps_ab, "8 bits on A100");
  problem.seqlen_q = 3;
  check::that(!swaps_ab(problem), "12 rows");
  problem = decoding(64, 32, 8, 128, 8192);
  problem.kv_dtype = Dtype::kInt8;
  check::that(swaps_ab(problem), "4 rows of each of two heads");
  problem.options.has_rotary = true;
  check::that(!swaps_ab(problem), "8 bits, rotary queries");
}

// A call over a cache of which the decode kernels see `problem`.
FwdProblem cached(const DecodeProblem& problem) {
  FwdProblem call;
  call.decode = problem;
  call.is_cached = true;
  call.batch = problem.batch;
  call.heads = problem.heads;
  call.heads_k = problem.heads_k;
  call.head_dim = call.head_dim_v = problem.head_dim;
  call.seqlen_q = problem.seqlen_q;
  call.seqlen_k = call.dequantized_rows = problem.capacity;
  call.window = problem.options.window;
  call.batch_invariant = problem.batch_invariant;
  call.has_key_ranges = true;
  call.kv_dtype = problem.kv_dtype;
  call.gathers_keys = call.converts_queries = flash::is_eight_bit(problem.kv_dtype);
  if (call.converts_queries) call.dtype = Dtype::kFp16;
  return call;
}

// V of another head dim: the estimate is that of the padded call that would run.
void check_padded_estimate() {
  for (const std::pair<int, int>& dims : {std::pair{128, 122}, {128, 120}, {120, 128}, {64, 60}, {60, 64}}) {
    DecodeProblem problem{16, 16, 32, 8, dims.first, 4096};
    problem.options.q_vectors = dims.first % 8 == 0;
    problem.options.kv_vector_bytes = dims.first % 8 == 0 && dims.second % 8 == 0 ? 16 : 4;
    FwdProblem call = cached(problem);
    call.head_dim_v = dims.second, call.is_cached = false;
    const bool runs = flash::plan::plan_fwd(call, kH200, "split_kv").decode->by_wgmma;
    check::that(runs && flash::plan::family_query(call, kH200).decode_by_wgmma, "padded", dims.first, dims.second);
  }
}

bool decodes(const FwdPlan& plan) { return plan.family == Family::kDecode && plan.stages.has(Stage::kAttention); }

std::string stages_of(const FwdProblem& problem, const FwdPlan& plan) {
  return std::get<std::string>(flash::plan::explain(problem, plan)["stages"]);
}

// Each of these alone keeps many rows of head dim 128 with the decode kernels: stays(name) checks it.
template <class Stays>
void check_options_that_stay(DecodeProblem& problem, const Stays& stays) {
  problem.num_splits = 2;
  stays("given splits");
  problem.num_splits = 0;
  problem.batch_invariant = true;
  stays("batch invariant");
  problem.batch_invariant = false;
  problem.head_dim = 100;
  stays("head dim");
  problem.head_dim = 128;
  problem.options.has_mask_bits = true;
  stays("mask bits");
  problem.options.has_mask_bits = false;
}

// Long queries: which kernels take them.
void check_chunked_prefill() {
  DecodeProblem problem{1, 2048, 32, 8, 128, 16384};
  problem.options.seqlen_new = 2048;
  problem.options.window = {kUnbounded, 0};
  problem.options.has_rotary = true;
  const auto plan_of = [&](const Device& device, const char* family = nullptr) {
    return flash::plan::plan_fwd(cached(problem), device, family);
  };
  const FwdPlan chunk = plan_of(kH200);
  check::that(chunk.family == Family::kWgmma, "wgmma");
  const std::string stages = stages_of(cached(problem), chunk);
  check::that(stages == "append,find_keys,rotate,prepare,attention", "stages", stages);
  check::that(chunk.is_dynamic && chunk.pdl && chunk.num_work_tiles > chunk.grid, "unequal work tiles by a semaphore");
  check::that(plan_of(kA100).family == Family::kMmaSync, "mma.sync");
  const FwdPlan forced = plan_of(kH200, "split_kv");
  check::that(stages_of(cached(problem), forced) == "append,attention" && decodes(forced), "forced");
  const auto stays = [&](const char* name) { check::that(decodes(plan_of(kH200)), "decoded", name); };
  FwdProblem unreadable = cached(problem);
  unreadable.has_prefill_view = false;
  check::that(decodes(flash::plan::plan_fwd(unreadable, kH200, nullptr)), "tensors that prefill kernels cannot read");
  check_options_that_stay(problem, stays);
  problem.seqlen_q = 4;
  stays("16 packed rows");
}

// 8-bit caches: tiles of 32 keys a step, twice those of 16 bits at head dim 128.
void check_eight_bit() {
  const auto quantized = [](DecodeProblem problem) {
    problem.kv_dtype = Dtype::kE4m3;
    return problem;
  };
  const DecodeProblem problem = quantized(decoding(16, 32, 8, 128, 8192));
  check_row("8 bits", problem, kH200, {16, 264, SplitRule::kAnywhere, true, true, true, 128});
  check_row("8 bits, no clusters", problem, kA100, {16, 216, SplitRule::kAnywhere, true, false, true, 128});
  check_row("8 bits, head dim 96", quantized(decoding(16, 32, 8, 96, 8192)), kH200,
            {16, 264, SplitRule::kAnywhere, false, false, true, 128});
  check_row("8 bits, 32 rows", quantized(decoding(1, 32, 1, 128, 8192)), kH200,
            {32, 32, SplitRule::kAnywhere, false, false, true, 32});
  check_row("8 bits, 64 rows", quantized(decoding(1, 64, 1, 64, 8192)), kH200,
            {64, 16, SplitRule::kAnywhere, false, false, true, 64});
  check_row("8 bits, head dim 256", quantized(decoding(1, 64, 1, 256, 8192)), kH200,
            {16, 132, SplitRule::kAnywhere, true, false, true, 64});
  const DecodePlan narrow = flash::plan::plan_decode(problem, kH200);
  const DecodePlan wide = flash::plan::plan_decode(decoding(16, 32, 8, 128, 8192), kH200);
  check::that(narrow.stages == wide.stages && narrow.min_blocks_per_cta == wide.min_blocks_per_cta, "bytes in flight",
              narrow.stages, narrow.min_blocks_per_cta);
  DecodeProblem other = problem;
  const auto is_plain = [&] { return flash::plan::plan_decode(other, kH200).is_plain; };
  other.options.page_size = 16;
  check::that(is_plain(), "pages of half a step");
  other.options.page_size = 24;
  check::that(!is_plain(), "pages that half steps straddle");
  other.options.page_size = 0;
  other.options.v_per_channel = true;
  check::that(!is_plain(), "a scale for each column of V");
  const auto fields = flash::plan::explain(cached(problem), flash::plan::plan_fwd(cached(problem), kH200, nullptr));
  check::that(flash::plan::one_line(fields).find("kv_dtype=e4m3") != std::string::npos, "explained");
}

// Long queries over 8-bit caches: by the prefill kernels, which read them dequantised.
void check_dequantized() {
  DecodeProblem problem{1, 2048, 32, 8, 128, 16384};
  problem.kv_dtype = Dtype::kInt8;
  const auto plan_of = [&](const Device& device, const char* family = nullptr) {
    return flash::plan::plan_fwd(cached(problem), device, family);
  };
  const auto stays = [&](const char* name) {
    const FwdPlan plan = plan_of(kH200);
    check::that(decodes(plan) && plan.dequantized_bytes == 0, "decoded", name);
  };
  for (const Device& device : {kH200, kA100}) {
    const FwdPlan plan = plan_of(device);
    check::that(plan.family != Family::kDecode && plan.dequantized_bytes == int64_t{2} * 16384 * 8 * 128 * 2, "a chunk",
                plan.dequantized_bytes);
    const std::string stages = stages_of(cached(problem), plan);
    check::that(stages == (plan.is_dynamic ? "dequantize,convert_query,prepare,attention,rescale"
                                           : "dequantize,convert_query,attention,rescale"),
                "stages", stages);
    const std::string fields = flash::plan::one_line(flash::plan::explain(cached(problem), plan));
    check::that(plan.dtype == Dtype::kFp16, "in fp16");
    check::that(fields.find("kv_dtype=int8") != std::string::npos, "explained");
    check::that(fields.find("dequantized_bytes=67108864") != std::string::npos, "explained", fields);
  }
  problem.seqlen_q = 4;
  stays("16 packed rows");
  problem.seqlen_q = 2048;
  problem.batch = 33;
  stays("more than 2 GiB");
  problem.batch = 32;
  check::that(plan_of(kH200).dequantized_bytes == flash::plan::kMaxGatheredBytes, "2 GiB");
  problem.batch = 1;
  check_options_that_stay(problem, stays);
  check::that(decodes(plan_of(kH200, "split_kv")), "forced");
}

// e4m3 queries over a cache become 16 bits before the decode kernels; a prefill converts them with the others.
void check_eight_bit_queries() {
  DecodeProblem problem{1, 2048, 32, 8, 128, 16384};
  problem.kv_dtype = Dtype::kE4m3;
  problem.options.seqlen_new = 1;
  FwdProblem call = cached(problem);
  call.q_dtype = Dtype::kE4m3;
  const auto stages = [&] { return stages_of(call, flash::plan::plan_fwd(call, kH200, nullptr)); };
  check::that(stages() == "append,dequantize,convert_query,prepare,attention,rescale", "to bf16", stages());
  call.converts_queries = false;
  check::that(stages() == "widen_query,append,dequantize,prepare,attention", "to fp16", stages());
  call.seqlen_q = call.decode.seqlen_q = 1;
  check::that(stages() == "widen_query,append,attention", "decoded", stages());
}

// If prefill kernels are hardly faster, dequantising costs more than they save; the longer the cache, the more rows.
void check_rows_that_pay() {
  const auto least_rows = [](Dtype kv_dtype, int capacity) {
    for (int seqlen_q = 1; seqlen_q < 1024; ++seqlen_q) {
      DecodeProblem problem{1, seqlen_q, 32, 8, 256, capacity};  // wgmma decodes 128
      problem.kv_dtype = kv_dtype;
      if (!decodes(flash::plan::plan_fwd(cached(problem), kH200, nullptr))) return seqlen_q;
    }
    return 1024;
  };
  for (int capacity : {2048, 8192, 65536}) {
    const int narrow = least_rows(Dtype::kE4m3, capacity), wide = least_rows(Dtype::kBf16, capacity);
    check::that(wide <= narrow && narrow <= 128, "rows", capacity, wide, narrow);
  }
}

// Options may choose kernels, but must not move the split points of a schedule that was made without them.
void check_schedule_does_not_depend_on_options() {
  for (int seqlen_q : {1, 5, 300}) {
    for (int num_splits : {0, 1, 4}) {
      for (bool batch_invariant : {false, true}) {
        DecodeProblem problem{3, seqlen_q, 16, 4, 128, 5000, num_splits, batch_invariant};
        const DecodePlan a = flash::plan::plan_decode(problem, kH200);
        problem.options = {7, {100, 0}, true, true, true, 16, false, 2};
        const DecodePlan b = flash::plan::plan_decode(problem, kH200);
        check::that(a.tile_size == b.tile_size && a.work_items == b.work_items && a.thread_blocks == b.thread_blocks,
                    "grid");
        check::that(a.min_blocks_per_cta == b.min_blocks_per_cta && a.split_blocks == b.split_blocks &&
                        a.max_splits == b.max_splits,
                    "fixed splits");
        check::that(a.split_points.rule == b.split_points.rule && a.split_points.value == b.split_points.value,
                    "split points", seqlen_q, num_splits);
        check::that(a.schedule_words == b.schedule_words && a.workspace_words == b.workspace_words, "memory");
      }
    }
  }
}

void check_empty() {
  for (const DecodeProblem& problem : {DecodeProblem{0, 1, 8, 8, 64, 100}, DecodeProblem{2, 0, 8, 8, 64, 100},
                                       DecodeProblem{2, 1, 0, 8, 64, 100}, DecodeProblem{2, 1, 0, 0, 64, 100}}) {
    DecodeProblem appending = problem;
    appending.options.seqlen_new = 3;
    const FwdPlan plan = flash::plan::plan_fwd(cached(appending), kH200, nullptr);
    const bool appends = problem.batch > 0 && problem.heads_k > 0;
    check::that(stages_of(cached(appending), plan) == (appends ? "append" : ""), "no queries", problem.batch);
  }
}

void check_explanation() {
  const auto explained = [](const DecodeProblem& problem) {
    return flash::plan::explain(cached(problem), flash::plan::plan_fwd(cached(problem), kH200, nullptr));
  };
  const DecodeProblem problem = decoding(16, 32, 8, 128, 8192);
  auto fields = explained(problem);
  check::that(std::get<std::string>(fields["kernel"]) == "split_kv", "kernel");
  check::that(std::get<std::string>(fields["variant"]) == "plain", "variant");
  check::that(std::get<int64_t>(fields["grid"]) == 264 && std::get<int64_t>(fields["cluster"]) == 2, "grid");
  check::that(std::get<int64_t>(fields["combine_grid"]) == 128, "combine");
  check::that(std::get<int64_t>(fields["workspace_bytes"]) == 2 * 264 * 4 * 130 * 4, "workspace");
  DecodeProblem empty = problem;
  empty.seqlen_q = 0;
  fields = explained(empty);
  check::that(std::get<std::string>(fields["kernel"]) == "none" && !fields.has("grid"), "nothing runs");
}

void check_tiles() {
  using namespace flash::plan;
  for (int i = 0; i < 8; ++i) {
    const Device& device = kDevices[i / 2];
    const Dtype dtype = i % 2 == 0 ? Dtype::kBf16 : Dtype::kInt8;
    for (int head_dim : {8, 64, 128, 192, 256}) {
      for (int size = 0; kv_size_exists(head_dim, size, dtype); ++size) {
        const KvTile tile = kv_tile(head_dim, size, dtype);
        const KvResidency residency = kv_residency(tile, device.smem_per_multiprocessor, device.smem_per_block);
        const int bytes = kv_smem_bytes(tile, residency.stages);
        check::that(residency.stages >= 1, "a stage fits", head_dim, size, device.smem_per_multiprocessor);
        check::that(bytes <= device.smem_per_block, "shared memory of a block", bytes);
        check::that(residency.blocks_per_sm * (bytes + kReservedSmemBytes) <= device.smem_per_multiprocessor,
                    "of all blocks", bytes, residency.blocks_per_sm);
        check::that(tile.step == kv_tile(head_dim, 0, dtype).step, "all sizes take the same steps", head_dim, size);
        check::that(tile.blocks_per_sm * kv_threads(tile) * 255 <= 65536 * 2, "register file", head_dim, size);
        check::that(kSplitKeys % kv_block_n(tile) == 0, "fixed splits are whole n_blocks", head_dim);
        check::that(tile.kv_bytes == dtype_bytes(dtype) && tile.head_dim >= head_dim, "of the dtype", head_dim);
      }
      for (int64_t rows : {1, 16, 17, 32, 33, 1000}) {
        const int size = kv_tile_size(head_dim, rows, dtype);
        check::that(kv_size_exists(head_dim, size, dtype), "the size has a kernel", head_dim, rows);
        const bool is_largest = !kv_size_exists(head_dim, size + 1, dtype);
        check::that(kv_tile(head_dim, size, dtype).rows() >= rows || is_largest, "the rows fit or the tile is large",
                    rows);
      }
    }
  }
}

// Any number of splits: more than there are n_blocks make one split per n_block, and the plan is the same.
void check_many_splits() {
  using namespace flash::plan;
  for (const Device& device : kDevices) {
    for (int capacity : {1, 64, 4096, 0x3fffffff}) {
      const DecodePlan expected = plan_decode({3, 1, 8, 2, 64, capacity, 0x3fffffff, false}, device);
      for (int num_splits : {1 << 30, 0x7ffffffe, 0x7fffffff}) {
        const DecodePlan plan = plan_decode({3, 1, 8, 2, 64, capacity, num_splits, false}, device);
        check::that(plan.split_points.rule == SplitRule::kEqualSplits && plan.split_points.value > 0, "equal splits",
                    plan.split_points.value);
        check::that(plan.thread_blocks == expected.thread_blocks && plan.slots == expected.slots, "plan", capacity);
        for (int count : {1, 2, 3, 1000, 0x1000000}) {
          for (int offset : {0, 1, 2, count - 1, count}) {
            const int point = plan.split_points.next(0, count, offset);
            check::that(point == std::min(offset, count), "a split for each n_block", point, count, offset);
          }
        }
      }
    }
  }
}

// Sizes up to the limits of their types: rejected, or counted without overflow.
void check_large_plans() {
  using namespace flash::plan;
  constexpr int kMost = 0x7fffffff, kRows = 0x3fffffff;
  for (int i = 0; i < 2 * 2 * 3 * 2 * 4 * 4 * 3; ++i) {
    int rest = i;
    auto one_of = [&rest](std::initializer_list<int> values) {
      const int count = static_cast<int>(values.size()), chosen = rest % count;
      rest /= count;
      return values.begin()[chosen];
    };
    const bool batch_invariant = one_of({0, 1});
    const int num_splits = one_of({0, 1, kMost}), capacity = one_of({0, kRows}), heads = one_of({0, 1, 1 << 20, kMost});
    const int batch = one_of({0, 1, 1 << 11, kMost}), seqlen_q = one_of({0, 1, kRows});
    DecodeProblem problem{batch, seqlen_q, heads, heads, 256, capacity, num_splits, batch_invariant};
    problem.kv_dtype = one_of({0, 1}) ? Dtype::kE4m3 : Dtype::kBf16;
    if (problem.kv_dtype == Dtype::kE4m3) problem.head_dim = 128;  // two heads a tile
    const DecodePlan plan = plan_decode(problem, kDevices[0]);
    const double tiles = static_cast<double>(plan.work_items) * std::max(plan.head_tiles, 1);
    check::that(plan.is_too_large == (tiles > kMaxKvTiles), "too large", plan.work_items, heads);
    if (plan.is_too_large) continue;
    check::that(plan.thread_blocks >= 0 && plan.thread_blocks <= 1000, "thread blocks", plan.thread_blocks);
    const int64_t words = plan.workspace_words;
    check::that(0 <= words && words <= kMaxSplitWorkspaceBytes / 4 + 1000 * 64 * 258, "workspace", words);
  }
}

// The number of CTAs follows the capacity where some would be launched idle; the CTA ranges must not.
void check_allocation_does_not_matter() {
  using namespace flash::plan;
  for (int num_splits : {0, 1, 7}) {
    for (int keys : {1, 300, 511, 5000}) {
      int64_t expected = -1;
      for (int capacity : {keys, keys + 1, 4 * keys, 300000}) {
        const DecodePlan plan = plan_decode({3, 1, 8, 2, 128, capacity, num_splits, false}, kDevices[0]);
        const int64_t total = 6 * ceil_div(keys, kv_block_n(kv_tile(128, plan.tile_size)));
        const int64_t cta_blocks = flash::blocks_per_cta(total, plan.thread_blocks, plan.min_blocks_per_cta);
        check::that(expected < 0 || cta_blocks == expected, "n_blocks of a CTA", cta_blocks, expected, capacity);
        expected = cta_blocks;
      }
    }
  }
}

// Equal lengths: no tile is split where some nine tenths of the CTAs can have whole tiles each.
void check_whole_tiles() {
  using namespace flash::plan;
  struct Expected {
    int batch, heads_k, thread_blocks;
    bool is_split;
  };
  for (const Expected& expected :
       {Expected{16, 8, 264, true}, Expected{16, 16, 256, false}, Expected{64, 8, 256, false},
        Expected{128, 8, 256, false}, Expected{1, 8, 264, true}, Expected{10, 8, 264, true},
        Expected{10, 15, 264, true}, Expected{40, 10, 264, true}}) {
    for (int keys : {2048, 4096, 4100, 8192}) {
      const DecodePlan plan =
          plan_decode({expected.batch, 1, 32, expected.heads_k, 128, 1 << 20, 0, false}, kDevices[0]);
      const int count = static_cast<int>(ceil_div(keys, kv_block_n(kv_tile(128, plan.tile_size))));
      const int64_t tiles = expected.batch * expected.heads_k;
      check::that(plan.thread_blocks == expected.thread_blocks, "thread blocks", plan.thread_blocks, tiles);
      const int64_t cta_blocks = flash::blocks_per_cta(tiles * count, plan.thread_blocks, plan.min_blocks_per_cta);
      check::that((cta_blocks % count != 0) == expected.is_split, "equal lengths", cta_blocks, count, tiles);
    }
  }
}

// Equal lengths: 2-CTA clusters only where CTA ranges are halves of tiles up to some length.
void check_clusters() {
  using namespace flash::plan;
  struct Expected {
    int batch, heads_k;
    bool in_clusters;
    int most_keys;  // most keys whose tile is split into halves
  };
  for (const Expected& expected :
       {Expected{16, 8, true, 4096}, Expected{132, 1, true, 1 << 20}, Expected{126, 1, true, 1280},
        Expected{15, 8, false, 0}, Expected{1, 8, false, 0}, Expected{17, 8, false, 0}, Expected{64, 8, false, 0}}) {
    const DecodePlan plan =
        plan_decode({expected.batch, 1, 4 * expected.heads_k, expected.heads_k, 128, 1 << 20, 0, false}, kDevices[0]);
    check::that(plan.in_clusters == expected.in_clusters, "in clusters", expected.batch, expected.heads_k);
    if (!plan.in_clusters) continue;
    const int block_n = kv_block_n(kv_tile(128, plan.tile_size));
    for (int keys = 1024; keys <= expected.most_keys; keys *= 2) {
      const int64_t count = ceil_div(keys, block_n), tiles = expected.batch * expected.heads_k;
      check::that(2 * flash::blocks_per_cta(tiles * count, plan.thread_blocks, plan.min_blocks_per_cta) == count,
                  "halves", keys);
    }
  }
  check::that(!plan_decode({132, 1, 32, 1, 128, 4096, 0, false}, kDevices[0]).in_clusters, "tiles of 32 rows");
  check::that(!plan_decode({16, 1, 32, 8, 128, 4096, 3, false}, kDevices[0]).in_clusters, "given splits");
  check::that(!plan_decode({16, 1, 32, 8, 128, 4096, 0, true}, kDevices[0]).in_clusters, "batch invariant");
}

// Every row and key belongs to a thread block, none has less than a few steps, and splits fill a few waves.
void check_mla_plan(const Device& device, flash::plan::MlaProblem problem) {
  const flash::plan::MlaPlan plan = flash::plan::plan_mla(device, problem);
  const int64_t rows = problem.tokens * problem.heads, batch = std::max<int64_t>(problem.batch, 1);
  const int64_t spare = problem.is_packed ? problem.batch : 0;  // a sequence may begin a tile of few rows
  check::that((plan.row_tiles - spare) * int64_t{plan.tile_rows} >= rows && plan.splits >= 1, "MLA rows", rows);
  check::that(plan.tile_rows == 16 || device.smem_per_block > 99 * 1024, "MLA shared memory", rows);
  check::that(problem.num_splits == 0 || plan.splits <= problem.num_splits, "MLA num_splits", plan.splits);
  const int64_t tiles = problem.is_packed ? (rows + plan.tile_rows - 1) / plan.tile_rows : batch * plan.row_tiles;
  check::that(plan.splits == 1 || plan.splits * tiles <= 4 * device.multiprocessors, "MLA waves", plan.splits);
  const int64_t keys = problem.capacity / plan.splits;
  check::that(plan.splits == 1 || keys >= flash::plan::kMlaLeastKeys, "MLA keys of a split", keys);
  check::that(plan.family == Family::kMmaSync || device.capability == 90, "MLA family", rows);
  problem.may_split = false;
  check::that(flash::plan::plan_mla(device, problem).splits == 1, "MLA one split");
}

// wgmma has tiles of 64 rows, on its architecture. Batch-invariant calls decide by what a token brings.
void check_mla_families() {
  const auto family = [](const Device& device, int64_t tokens, int64_t heads, bool batch_invariant,
                         const char* forced) {
    flash::plan::MlaProblem problem{64, tokens, heads, 4096, false, 0, !batch_invariant};
    problem.batch_invariant = batch_invariant;
    const flash::plan::MlaPlan plan = flash::plan::plan_mla(device, problem, forced);
    check::that((plan.tile_rows == 64) == (plan.family == Family::kWgmma), "MLA rows of a tile", plan.tile_rows);
    return plan.family;
  };
  Device without_kernels = kH200;
  without_kernels.wgmma_head_dims = 0;
  check::that(family(kH200, 1, 128, false, nullptr) == Family::kWgmma, "MLA 128 heads");
  check::that(family(kH200, 1, 16, false, nullptr) == Family::kWgmma, "MLA 16 heads");
  check::that(family(kH200, 1, 15, false, nullptr) == Family::kMmaSync, "MLA 15 heads");
  check::that(family(kH200, 8, 8, false, nullptr) == Family::kWgmma, "MLA 8 tokens of 8 heads");
  check::that(family(kH200, 8, 8, true, nullptr) == Family::kMmaSync, "MLA 8 tokens of 8 heads, batch-invariant");
  check::that(family(kH200, 1, 1, false, "wgmma") == Family::kWgmma, "MLA forced wgmma");
  check::that(family(kH200, 1, 128, false, "mma_sync") == Family::kMmaSync, "MLA forced mma.sync");
  check::that(family(without_kernels, 1, 128, false, "wgmma") == Family::kMmaSync, "MLA not built");
  check::that(family(kA100, 1, 128, false, "wgmma") == Family::kMmaSync, "MLA on another GPU");
}

// Boxes lie within pages; FP8 rows are read by wgmma alone, one by one.
void check_mla_pages() {
  const auto plan = [](const Device& device, int page_size, int64_t heads, bool fits_page_maps, bool has_fp8_rows) {
    flash::plan::MlaProblem problem{64, 1, heads, 4096, false, 0, true};
    problem.page_size = page_size, problem.fits_page_maps = fits_page_maps, problem.has_fp8_rows = has_fp8_rows;
    return flash::plan::plan_mla(device, problem, has_fp8_rows ? "mma_sync" : nullptr);
  };
  for (const auto& [page_size, box_rows] : {std::pair{64, 64}, {256, 64}, {784, 16}, {24, 8}, {7, 0}, {4, 0}, {1, 0}}) {
    check::that(plan(kH200, page_size, 128, true, false).box_rows == box_rows, "MLA box of pages of", page_size);
    check::that(plan(kH200, page_size, 128, false, false).box_rows == 0, "MLA strides of pages of", page_size);
    check::that(plan(kA100, page_size, 128, true, false).box_rows == 0, "MLA boxes of another GPU", page_size);
    const flash::plan::MlaPlan bytes = plan(kH200, page_size, 1, true, true);
    check::that(bytes.family == Family::kWgmma && bytes.box_rows == 0, "MLA FP8 rows, pages of", page_size);
  }
}

void check_mla() {
  for (const Device& device : kDevices) {
    for (const int64_t batch : {0, 1, 7, 500}) {
      for (const int64_t tokens : {0, 1, 3, 700}) {
        for (const int64_t heads : {1, 16, 20, 128}) {
          for (const int64_t capacity : {0, 1, 100, 4096, 1 << 20}) {
            for (const int64_t most : {0, 5}) {
              for (const bool is_packed : {false, true})
                check_mla_plan(device, {batch, tokens, heads, capacity, is_packed, most, true});
            }
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  check_decoding();
  check_splits();
  check_wgmma();
  check_padded_estimate();
  check_variant();
  check_chunked_prefill();
  check_eight_bit();
  check_dequantized();
  check_eight_bit_queries();
  check_rows_that_pay();
  check_schedule_does_not_depend_on_options();
  check_empty();
  check_explanation();
  check_tiles();
  check_many_splits();
  check_large_plans();
  check_allocation_does_not_matter();
  check_whole_tiles();
  check_clusters();
  check_mla();
  check_mla_families();
  check_mla_pages();
  return check::report();
}
