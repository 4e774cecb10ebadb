// Runs the pass that plans masks as data thread by thread on the CPU (emulated_cuda.h), on packed batches and a dense
// sequence: block lists and seen bits of each sequence against brute force. cu_seqlens hold any values, and with
// seqused_k sequences share keys or lie in any order.
#include "emulated_cuda.h"

#include <vector>

#include "check.h"

#define __forceinline__ inline
#define __grid_constant__
using std::max;
struct float4 {
  float x, y, z, w;
};

template <class Value>
Value reduce(Value value, Value (*both)(Value, Value)) {
  emulation::Slot slot;
  slot.operation = 13;
  std::memcpy(&slot.bits, &value, sizeof(Value));
  const int parity = emulation::meet(slot);
  for (int lane = 0; lane < 32; ++lane) {
    Value other;
    std::memcpy(&other, &emulation::lane_slot(lane, parity).bits, sizeof(Value));
    value = both(value, other);
  }
  return value;
}
inline int __reduce_min_sync(uint32_t, int value) {
  return reduce<int>(value, [](int a, int b) { return min(a, b); });
}
inline int __reduce_max_sync(uint32_t, int value) {
  return reduce<int>(value, [](int a, int b) { return max(a, b); });
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  return reduce<uint32_t>(value, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_and_sync(uint32_t, uint32_t value) {
  return reduce<uint32_t>(value, [](uint32_t a, uint32_t b) { return a & b; });
}
template <class Value>
Value __shfl_up_sync(uint32_t mask, Value value, int distance) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(mask, value, lane < distance ? lane : lane - distance);
}
inline uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, int other) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ other);
}
inline int __ffs(uint32_t bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline void atomicOr(uint32_t* word, uint32_t bits) { *word |= bits; }
inline void atomicMin(int* least, int value) { *least = min(*least, value); }
inline void atomicMax(int* most, int value) { *most = max(*most, value); }
inline int atomicAdd(int* sum, int value) {
  const int old = *sum;
  *sum += value;
  return old;
}
#include "kernels/auxiliary/mask_plan.cu"
#include "kernels/common/prepare_varlen.h"
#include "kernels/common/seen_bits.h"
#include "plan/mask_plan.h"
#include "random_masks.h"

namespace {

using flash::BlockClass;
using flash::BlockCount;
using flash::BlockEntry;
using flash::Flash_fwd_params;
using flash::kMaskStrip;
using flash::MaskFactors;
using flash::MaskMatrices;
using flash::MaskParams;
using flash::MaskPlanParams;
using flash::Visibility;
using random_masks::draw;

constexpr int kHeads = 3;  // mask heads, all of the same factors
constexpr uint32_t kUnwritten = 0xdeadbeefu;
struct Totals {
  int hidden = 0, listed = 0, shared = 0;
} totals;

// Factors of a packed batch: rows and keys count within their sequence.
struct Batch {
  int total_q, total_k, sequences;
  std::vector<int> cu_q, cu_k, used, segments_q, segments_k, ranges;
  random_masks::Problem problem;
  Flash_fwd_params call;

  static std::vector<int> starts(int total, int sequences, bool any) {
    std::vector<int> values(sequences + 1);
    for (int& value : values) value = any ? draw(-9, total + 9) : draw(0, total);
    if (!any) std::sort(values.begin(), values.end());
    return values;
  }

  Batch(int queries, int keys, int count, int which, bool has_used)
      : total_q(queries), total_k(keys), sequences(count), problem(queries, keys, which) {
    cu_q = starts(queries, count, draw(0, 3) == 0);
    cu_k = starts(keys, count, has_used || draw(0, 3) == 0);
    for (int i = 0; i < count; ++i) used.push_back(draw(-5, keys));
    segments_q.resize(count + 3), segments_k.resize(count + 3), ranges.resize(2 * count);
    call.b = count;
    call.h = call.h_k = kHeads;
    call.seqlen_q = queries, call.seqlen_k = keys;
    call.varlen = {cu_q.data(),       cu_k.data(),  has_used ? used.data() : nullptr, nullptr, segments_q.data(),
                   segments_k.data(), ranges.data()};
    if (draw(0, 2) == 0) call.window = {draw(0, 200), draw(0, 50)};
    emulation::run_block(32, [&] { flash::prepare_varlen(call); });
  }

  // A dense batch of one sequence.
  static Batch dense(int queries, int keys, int which) {
    Batch batch(queries, keys, 1, which, false);
    batch.segments_q = {0, 0, queries, queries}, batch.ranges = {0, keys};
    batch.call.varlen = {};
    return batch;
  }

  int q_begin(int i) const { return segments_q[i + 1]; }
  int seqlen_q(int i) const { return segments_q[i + 2] - q_begin(i); }
  int k_begin(int i) const { return ranges[2 * i]; }
  int seqlen_k(int i) const { return ranges[2 * i + 1]; }

  bool sees(int i, int row, int key) const {
    const MaskFactors& factors = problem.factors;
    const Visibility window{seqlen_q(i), seqlen_k(i), call.window};
    const int first = q_begin(i) + row;
    if (key < window.key_begin(row) || key >= window.key_end(row)) return false;
    if (factors.query_ranges && !problem.inside(problem.query_ranges, factors.query_intervals, first, key))
      return false;
    if (factors.key_hidden && problem.inside(problem.key_hidden, factors.key_intervals, k_begin(i) + key, row))
      return false;
    return !factors.bits || (problem.bits[int64_t{first} * factors.row_words + key / 32] >> key % 32 & 1u);
  }
};

// A plan with its memory and results. A guard word after the memory shows writes beyond its end.
struct Plan {
  flash::plan::MaskPlan sizes;
  std::vector<uint32_t> words;
  MaskPlanParams params;

  Plan(const Batch& batch, bool of_keys, int tile, int block) {
    flash::plan::Problem problem;
    problem.is_varlen = batch.call.is_varlen();
    problem.batch = batch.sequences, problem.heads = problem.heads_k = problem.mask_matrices = kHeads;
    problem.seqlen_q = batch.total_q, problem.seqlen_k = batch.total_k;
    problem.has_key_lengths = batch.call.varlen.seqused_k != nullptr;
    sizes = flash::plan::plan_mask(problem, of_keys, tile, block);
    words.assign(sizes.words() + 1, kUnwritten);
    auto* const bounds = reinterpret_cast<flash::StripBounds::Stored*>(words.data());
    uint32_t* const seen = words.data() + sizes.bounds_words();
    const int64_t row_strips = sizes.row_strips, key_strips = sizes.key_strips;
    params.call = batch.call;
    params.of_keys = of_keys, params.tile = tile, params.block = block;
    params.bounds = {bounds, bounds + sizes.strips()};
    params.group_bounds = {bounds + 2 * sizes.strips(), bounds + 2 * sizes.strips() + sizes.groups()};
    MaskParams& mask = params.mask;
    params.matrices = mask.matrices.heads = kHeads;
    mask.factors = batch.problem.factors;
    for (MaskMatrices* of : {&mask.factors.of_ranges, &mask.factors.of_hidden, &mask.factors.of_bits}) {
      of->group = flash::FastDiv(kHeads);
    }
    mask.seen = {seen, seen + kHeads * row_strips * flash::plan::kStripSeenWords, static_cast<int>(row_strips),
                 static_cast<int>(key_strips)};
    uint32_t* const entries = seen + sizes.seen_words();
    mask.lists = {entries, reinterpret_cast<BlockCount*>(entries + sizes.entry_words()), static_cast<int>(sizes.tiles),
                  static_cast<int>(sizes.capacity)};
    flash::run_mask_plan(params, nullptr);
    check::that(words.back() == kUnwritten, "memory after the plan");
  }

  int first_tile(const Batch& batch, int i) const {
    const int first = params.of_keys ? batch.k_begin(i) : batch.q_begin(i);
    return batch.call.is_varlen() ? flash::varlen_first_slot(first, i + 1, params.tile) : 0;
  }

  flash::BlockList list(int index) const {
    const flash::BlockLists& lists = params.mask.lists;
    const BlockCount count = lists.counts[index];
    return {lists.entries + int64_t{index} * lists.capacity, count.whole, count.whole + count.partial, lists.capacity};
  }
};

void check_seen(const Batch& batch, const Plan& plan, int i) {
  std::vector<bool> sees(batch.seqlen_q(i)), is_seen(batch.seqlen_k(i));
  for (int row = 0; row < batch.seqlen_q(i); ++row) {
    for (int key = 0; key < batch.seqlen_k(i); ++key) {
      if (batch.sees(i, row, key)) sees[row] = is_seen[key] = true;
    }
  }
  for (int head = 0; head < kHeads; ++head) {
    const uint32_t* const rows = flash::seen_rows(batch.call, plan.params.mask, i, head, batch.q_begin(i), i + 1);
    const uint32_t* const keys = flash::seen_keys(batch.call, plan.params.mask, i, head, batch.k_begin(i), i + 1);
    for (int row = 0; row < batch.seqlen_q(i); ++row) {
      check::that(flash::is_seen(rows, row) == sees[row], "row that sees a key", i, head, row);
    }
    for (int key = 0; key < batch.seqlen_k(i); ++key) {
      check::that(flash::is_seen(keys, key) == is_seen[key], "key that a row sees", i, head, key, batch.k_begin(i));
    }
  }
}

// Whole blocks upwards, then partial ones upwards, with the class of each strip.
void check_lists(const Batch& batch, const Plan& plan, int i) {
  const int tile = plan.params.tile, block = plan.params.block;
  const bool of_keys = plan.params.of_keys;
  const int own = of_keys ? batch.seqlen_k(i) : batch.seqlen_q(i);
  const int others = of_keys ? batch.seqlen_q(i) : batch.seqlen_k(i);
  const int first = plan.first_tile(batch, i);
  for (int begin = 0; begin < own; begin += tile) {
    std::vector<uint32_t> entries[2];  // partial, whole
    for (int index = 0; index * block < others; ++index) {
      BlockEntry entry = BlockEntry::of_block(index);
      bool visited = false, is_whole = true;
      for (int strip = 0; strip < tile / kMaskStrip; ++strip) {
        const int strip_begin = begin + kMaskStrip * strip, strip_end = min(strip_begin + kMaskStrip, own);
        if (strip_begin >= own) {
          entry.set(strip, of_keys ? BlockClass::kHidden : BlockClass::kWhole);
          continue;
        }
        bool some = false, every = of_keys ? strip_begin + kMaskStrip <= own && (index + 1) * block <= others + 63
                                           : (index + 1) * block <= others;
        for (int a = strip_begin; a < strip_end; ++a) {
          for (int b = index * block; b < min((index + 1) * block, others); ++b) {
            const bool seen = of_keys ? batch.sees(i, b, a) : batch.sees(i, a, b);
            some |= seen, every &= seen;
          }
        }
        entry.set(strip, every ? BlockClass::kWhole : some ? BlockClass::kPartial : BlockClass::kHidden);
        visited |= some, is_whole &= every;
      }
      if (visited) entries[is_whole].push_back(entry.bits);
      ++(visited ? totals.listed : totals.hidden);
    }
    std::vector<uint32_t> expected = entries[1];
    expected.insert(expected.end(), entries[0].begin(), entries[0].end());
    for (int head = 0; head < kHeads; ++head) {
      const flash::BlockList list = plan.list(head * plan.params.mask.lists.tiles + first + begin / tile);
      std::vector<uint32_t> found;
      for (int step = 0; step < list.count(); ++step) found.push_back(list.at(step).bits);
      check::that(list.whole == static_cast<int>(entries[1].size()), "whole blocks", of_keys, i, begin, list.whole);
      check::that(found == expected, "entries", of_keys, i, head, begin, static_cast<int>(found.size()));
    }
  }
}

void check_batch(const Batch& batch, bool of_keys, int tile, int block) {
  const Plan plan(batch, of_keys, tile, block);
  for (int i = 0; i < batch.sequences; ++i) check_seen(batch, plan, i), check_lists(batch, plan, i);
  for (int i = 1; i < batch.sequences; ++i)
    totals.shared += batch.k_begin(i) < batch.k_begin(i - 1) + batch.seqlen_k(i - 1);
}

}  // namespace

int main() {
  for (int i = 0; i < 48; ++i) {
    emulation::at_random = i % 3 == 0;
    const bool has_used = i % 2;
    const Batch batch(draw(1, 300), draw(1, 300), draw(1, 4), i / 2 % 8, has_used);
    check_batch(batch, false, 128, 64);
    check_batch(batch, false, 192, 128);
    if (!has_used) check_batch(batch, true, 64, 64), check_batch(batch, true, 128, 128);
  }
  emulation::at_random = true;
  for (const int which : {1, 2, 5}) {  // more columns than a thread block has at once
    const int length = 64 * flash::kColumnsAtOnce + 100;
    check_batch(Batch::dense(70, length, which), false, 128, 128);
    check_batch(Batch::dense(length, 70, which), true, 128, 64);
  }
  check::that(totals.hidden > 50 && totals.listed > 50 && totals.shared > 20, "cases of all kinds", totals.hidden,
              totals.listed, totals.shared);
  return check::report();
}
