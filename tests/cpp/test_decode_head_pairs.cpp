// Plans of attention over a KV cache whose tiles have two K/V heads: where they do, and what follows.
#include <initializer_list>

#include "check.h"
#include "plan/call_plan.h"
#include "plan/decode_plan.h"
#include "plan/explain.h"

namespace {

using namespace flash::plan;
using flash::Dtype;
using flash::SplitRule;

constexpr Device kH200{90, 132, 228 * 1024, 227 * 1024};
constexpr Device kA100{80, 108, 164 * 1024, 163 * 1024};
constexpr Device kSmall{86, 84, 100 * 1024, 99 * 1024};
constexpr Device kDevices[] = {kH200, kA100, kSmall};

DecodeProblem decoding(int batch, int heads, int heads_k, int capacity, int head_dim = 128,
                       Dtype kv_dtype = Dtype::kE4m3) {
  DecodeProblem problem{batch, 1, heads, heads_k, head_dim, capacity};
  problem.kv_dtype = kv_dtype;
  return problem;
}

int tile_heads(const DecodeProblem& problem, const Device& device = kH200) {
  return plan_decode(problem, device).tile_heads;
}

void check_measured_sizes() {
  struct Expected {
    int batch, heads, heads_k, capacity, tile_heads, thread_blocks;
  };
  for (const Expected& expected :
       {Expected{64, 32, 8, 2048, 2, 256}, Expected{64, 16, 16, 2048, 2, 256}, Expected{128, 32, 8, 8192, 2, 256},
        Expected{128, 16, 16, 8192, 2, 256}, Expected{1, 32, 8, 8192, 1, 256}, Expected{16, 32, 8, 4096, 1, 264}}) {
    for (Dtype dtype : {Dtype::kE4m3, Dtype::kInt8}) {
      const DecodePlan plan =
          plan_decode(decoding(expected.batch, expected.heads, expected.heads_k, expected.capacity, 128, dtype), kH200);
      check::that(plan.tile_heads == expected.tile_heads, "heads of a tile", expected.batch, expected.heads_k);
      check::that(plan.head_tiles == expected.heads_k / expected.tile_heads, "head tiles", plan.head_tiles);
      check::that(plan.thread_blocks == expected.thread_blocks, "thread blocks", plan.thread_blocks);
    }
  }
}

// Each of these alone leaves a tile one head.
void check_one_head() {
  const DecodeProblem pairs = decoding(64, 32, 8, 2048);
  check::that(tile_heads(pairs) == 2, "a pair");
  DecodeProblem problem = pairs;
  problem.batch_invariant = true;
  check::that(tile_heads(problem) == 1, "batch invariant");
  problem = pairs;
  problem.is_forward = true;
  check::that(tile_heads(problem) == 1, "a forward");
  check::that(tile_heads(decoding(64, 18, 9, 2048)) == 1, "an odd number of heads");
  check::that(tile_heads(decoding(64, 64, 8, 2048)) == 2 && tile_heads(decoding(64, 128, 8, 2048)) == 1,
              "packed rows by query heads");
  problem = pairs;
  problem.seqlen_q = 2;
  check::that(tile_heads(problem) == 2, "16 packed rows");
  problem.seqlen_q = 3;
  check::that(tile_heads(problem) == 1, "24 packed rows");
  check::that(tile_heads(decoding(59, 32, 8, 2048)) == 1 && tile_heads(decoding(60, 32, 8, 2048)) == 2,
              "tiles for nine tenths of the thread blocks");
  check::that(tile_heads(decoding(0, 32, 8, 2048)) == 1 && tile_heads(decoding(64, 0, 0, 2048)) == 1, "nothing");
}

// By the bytes that a head has of a key.
void check_row_bytes() {
  const auto heads = [](int head_dim, Dtype dtype) { return tile_heads(decoding(128, 32, 8, 2048, head_dim, dtype)); };
  for (Dtype dtype : {Dtype::kE4m3, Dtype::kInt8}) {
    for (int head_dim : {40, 64, 72, 128}) check::that(heads(head_dim, dtype) == 2, "of 8 bits", head_dim);
    check::that(heads(192, dtype) == 1 && heads(256, dtype) == 1, "wide rows of 8 bits");
  }
  for (Dtype dtype : {Dtype::kFp16, Dtype::kBf16}) {
    for (int head_dim : {32, 64}) check::that(heads(head_dim, dtype) == 2, "of 16 bits", head_dim);
    for (int head_dim : {72, 128, 256}) check::that(heads(head_dim, dtype) == 1, "wide rows of 16 bits", head_dim);
  }
}

// A tile of two heads has the bytes of an n_block of one, and half of its keys.
void check_what_follows() {
  for (const Device& device : kDevices) {
    for (int head_dim : {64, 128}) {
      for (int batch : {30, 60, 64, 100, 300}) {
        for (int num_splits : {0, 1, 3}) {
          DecodeProblem problem = decoding(batch, 32, 8, 4096, head_dim);
          problem.num_splits = num_splits;
          const DecodePlan plan = plan_decode(problem, device);
          problem.heads_k = 9, problem.heads = 36;
          const DecodePlan one = plan_decode(problem, device);
          const int size = plan.tile_size;
          check::that(one.tile_heads == 1 && size == 0 && plan.stages == one.stages, "the same kernel", batch);
          check::that(plan.block_n * plan.tile_heads == one.block_n, "keys of an n_block", plan.block_n);
          check::that(plan.min_blocks_per_cta == one.min_blocks_per_cta, "n_blocks of a thread block");
          check::that(plan.slot_rows == 4 * plan.tile_heads && plan.row_tiles == 1, "rows", plan.slot_rows);
          check::that(plan.work_items == batch && plan.head_tiles == 8 / plan.tile_heads, "tiles", plan.head_tiles);
          if (plan.tile_heads == 1) continue;
          const int resident =
              device.multiprocessors * kv_residency(kv_tile(head_dim, size, problem.kv_dtype),
                                                    device.smem_per_multiprocessor, device.smem_per_block)
                                           .blocks_per_sm;
          check::that(10 * batch * plan.head_tiles >= 9 * resident && !plan.in_clusters, "enough tiles", batch);
          check::that(plan.slots == (num_splits == 1 ? 0 : 2 * plan.thread_blocks), "partial results", plan.slots);
          check::that(num_splits == 3 || plan.is_plain, "plain", num_splits);
        }
      }
    }
  }
}

// What a schedule made before the call does not know must not change the tiles.
void check_options_do_not_matter() {
  DecodeProblem problem = decoding(64, 32, 8, 2048);
  problem.options = {1, {100, 0}, true, true, true, 16, false, 2, true};
  const DecodePlan plan = plan_decode(problem, kH200);
  check::that(plan.tile_heads == 2 && !plan.is_plain, "all features");
}

void check_explanation() {
  const DecodeProblem problem = decoding(64, 32, 8, 2048);
  FwdProblem call;
  call.decode = problem;
  call.is_cached = true;
  auto fields = explain(call, plan_fwd(call, kH200, nullptr));
  check::that(std::get<int64_t>(fields["tile_heads"]) == 2 && std::get<int64_t>(fields["block_n"]) == 64, "tile");
  check::that(std::get<int64_t>(fields["num_work_tiles"]) == 256 && std::get<int64_t>(fields["grid"]) == 256, "grid");
}

}  // namespace

int main() {
  check_measured_sizes();
  check_one_head();
  check_row_bytes();
  check_what_follows();
  check_options_do_not_matter();
  check_explanation();
  return check::report();
}
