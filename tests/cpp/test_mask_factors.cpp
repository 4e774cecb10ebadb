// core/mask_factors.h and core/block_list.h against brute force: what a query sees, classes of blocks, words of bits.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "core/block_list.h"
#include "core/mask_factors.h"

namespace {

using flash::BlockClass;
using flash::BlockEntry;
using flash::BlockList;
using flash::Intervals;
using flash::IntervalBounds;
using flash::kMaskStrip;
using flash::kMaskWordKeys;
using flash::kUnbounded;
using flash::MappedBlock;
using flash::MaskFactors;
using flash::Visibility;
using flash::Window;

std::mt19937 generator(1);

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

// A problem with random factors, and their meaning written out.
struct Problem {
  int seqlen_q, seqlen_k;
  std::vector<int> query_ranges, key_hidden;
  std::vector<uint32_t> bits;
  std::vector<uint8_t> block_map;
  MaskFactors factors;

  static int bound(int length) {
    switch (draw(0, 9)) {
      case 0: return 0x7fffffff;
      case 1: return -draw(1, 5);
      case 2: return 0;
      default: return draw(0, length + 3);
    }
  }

  static std::vector<int> intervals(int count, int length, int other) {
    std::vector<int> values(static_cast<size_t>(count) * length * 2);
    const bool constant = draw(0, 1);  // neighbours alike, as in documents
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = constant && i >= static_cast<size_t>(2 * count) && draw(0, 40) ? values[i - 2 * count] : bound(other);
    }
    return values;
  }

  Problem(int q, int k, int which) : seqlen_q(q), seqlen_k(k) {
    if (which & 1) {
      factors.query_intervals = draw(1, 2);
      query_ranges = intervals(factors.query_intervals, q, k);
      factors.query_ranges = query_ranges.data();
    }
    if (which & 2) {
      factors.key_intervals = draw(1, 2);
      key_hidden = intervals(factors.key_intervals, k, q);
      factors.key_hidden = key_hidden.data();
    }
    if (which & 4) {
      factors.row_words = (k + kMaskWordKeys - 1) / kMaskWordKeys;
      bits.resize(static_cast<size_t>(q) * factors.row_words);
      const int kind = draw(0, 2);
      for (uint32_t& word : bits) word = kind == 0 ? generator() : kind == 1 ? 0u : ~0u;
      factors.bits = bits.data();
    }
    if (which & 8) {
      const int rows = kMaskStrip * draw(1, 2), keys = kMaskStrip * draw(1, 2);
      factors.map_block_rows = flash::FastDiv(rows);
      factors.map_block_keys = flash::FastDiv(keys);
      factors.map_rows = (q + rows - 1) / rows;
      factors.map_cols = (k + keys - 1) / keys;
      block_map.resize(static_cast<size_t>(factors.map_rows) * factors.map_cols);
      for (uint8_t& value : block_map) value = static_cast<uint8_t>(draw(0, 2));
      factors.block_map = block_map.data();
    }
  }

  static bool inside(const std::vector<int>& values, int count, int index, int i) {
    for (int j = 0; j < count; ++j) {
      const int at = (index * count + j) * 2;
      if (values[at] <= i && i < values[at + 1]) return true;
    }
    return false;
  }

  bool sees(int row, int key) const {
    if (!query_ranges.empty() && !inside(query_ranges, factors.query_intervals, row, key)) return false;
    if (!key_hidden.empty() && inside(key_hidden, factors.key_intervals, key, row)) return false;
    MappedBlock block = MappedBlock::kPartial;
    if (!block_map.empty()) {
      const int map_row = row / factors.map_block_rows.divisor, map_col = key / factors.map_block_keys.divisor;
      block = static_cast<MappedBlock>(block_map[map_row * factors.map_cols + map_col]);
    }
    if (block != MappedBlock::kPartial) {
      if (block == MappedBlock::kHidden) return false;
    } else if (!bits.empty() && !(bits[row * factors.row_words + key / 32] >> (key % 32) & 1u)) {
      return false;
    }
    return true;
  }
};

IntervalBounds bounds_of(const MaskFactors& factors, bool of_rows, int begin, int end) {
  IntervalBounds bounds;
  if ((of_rows ? factors.query_ranges : factors.key_hidden) == nullptr) return bounds;
  for (int i = begin; i < end; ++i) bounds.add(of_rows ? factors.keys_of(i) : factors.hidden_rows_of(i));
  return bounds;
}

void check_elements(const Problem& problem) {
  for (int row = 0; row < problem.seqlen_q; ++row) {
    for (int key = 0; key < problem.seqlen_k; ++key) {
      check::that(problem.factors.sees(row, key) == problem.sees(row, key), "what a query sees", row, key,
                  problem.seqlen_q, problem.seqlen_k);
    }
  }
}

// Returns how many blocks were settled by bounds.
int check_classes(const Problem& problem, const Visibility& window) {
  int settled = 0;
  for (int row = 0; row < problem.seqlen_q; row += kMaskStrip) {
    const int row_end = std::min(row + kMaskStrip, problem.seqlen_q);
    const IntervalBounds rows = bounds_of(problem.factors, true, row, row_end);
    for (int key = 0; key < problem.seqlen_k; key += kMaskStrip) {
      const int key_end = std::min(key + kMaskStrip, problem.seqlen_k);
      const IntervalBounds keys = bounds_of(problem.factors, false, key, key_end);
      int seen = 0;
      for (int i = row; i < row_end; ++i) {
        for (int j = key; j < key_end; ++j) {
          seen += problem.sees(i, j) && j >= window.key_begin(i) && j < window.key_end(i);
        }
      }
      const BlockClass found =
          flash::class_by_bounds(problem.factors, window, rows, keys, row, row_end, key, key_end);
      const int all = (row_end - row) * (key_end - key);
      check::that(found != BlockClass::kHidden || seen == 0, "a hidden block", row, key, seen, window.window.left);
      check::that(found != BlockClass::kWhole || seen == all, "a whole block", row, key, seen, all);
      settled += found != BlockClass::kPartial;
    }
  }
  return settled;
}

void check_random_problems() {
  int settled = 0;
  for (int i = 0; i < 1500; ++i) {
    const Problem problem(draw(1, 200), draw(1, 260), i % 16);
    if (i < 200) check_elements(problem);
    Visibility window{problem.seqlen_q, problem.seqlen_k, {}};
    settled += check_classes(problem, window);
    window.window = {draw(0, 1) ? kUnbounded : draw(0, 200), draw(0, 50)};
    settled += check_classes(problem, window);
  }
  check::that(settled > 3000, "bounds settle blocks", settled);
}

void check_interval_words() {
  for (int first = 0; first <= 64; first += 32) {
    for (int begin = -40; begin < 110; ++begin) {
      for (int end = -40; end < 110; ++end) {
        uint32_t expected = 0u;
        for (int i = 0; i < 32; ++i) expected |= begin <= first + i && first + i < end ? 1u << i : 0u;
        check::that(MaskFactors::interval_word(begin, end, first) == expected, "interval word", first, begin, end);
      }
    }
  }
  check::that(MaskFactors::interval_word(-0x7fffffff - 1, 0x7fffffff, 0x7fffff00) == ~0u, "the largest interval");
}

void check_entries() {
  BlockEntry entry = BlockEntry::of_block((1 << BlockEntry::kIndexBits) - 1);
  for (int strip = 0; strip < flash::kMaxTileStrips; ++strip) entry.set(strip, static_cast<BlockClass>(strip % 3));
  check::that(entry.block() == (1 << BlockEntry::kIndexBits) - 1, "block of an entry", entry.block());
  for (int strip = 0; strip < flash::kMaxTileStrips; ++strip) {
    check::that(entry.strip(strip) == static_cast<BlockClass>(strip % 3), "strip of an entry", strip);
  }
  const uint32_t entries[6] = {10, 11, 12, 99, 21, 20};
  const BlockList list{entries, 3, 5, 6};
  const int expected[5] = {10, 11, 12, 20, 21};
  for (int i = 0; i < list.count(); ++i) check::that(list.at(i).block() == expected[i], "order of visits", i);
}

}  // namespace

int main() {
  check_interval_words();
  check_entries();
  check_random_problems();
  return check::report();
}
