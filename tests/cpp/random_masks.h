// Random masks as data, and their meaning written out.
#pragma once

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "core/mask_factors.h"

namespace random_masks {

using flash::kMaskStrip;
using flash::kMaskWordKeys;
using flash::MappedBlock;
using flash::MaskFactors;

inline std::mt19937 generator(1);

inline int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

// A problem with random factors, and their meaning written out.
struct Problem {
  int seqlen_q, seqlen_k;
  std::vector<int> query_ranges, key_hidden;
  std::vector<uint32_t> bits;
  std::vector<uint8_t> block_map;
  MaskFactors factors;

  // Of a kind of values: mostly within the sequence, or its limits and those of 32 bits alone.
  static int bound(int length, bool extreme) {
    constexpr int kMin = std::numeric_limits<int>::min(), kMax = std::numeric_limits<int>::max();
    const int limits[] = {kMin, kMin + 1, -1, 0, 1, length - 1, length, length + 1, kMax - 1, kMax};
    if (extreme) return limits[draw(0, 9)];
    switch (draw(0, 9)) {
      case 0: return kMax;
      case 1: return -draw(1, 5);
      case 2: return 0;
      default: return draw(0, length + 3);
    }
  }

  static std::vector<int> intervals(int count, int length, int other) {
    std::vector<int> values(static_cast<size_t>(count) * length * 2);
    const bool constant = draw(0, 1);  // neighbours alike, as in documents
    const bool extreme = draw(0, 3) == 0;
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = constant && i >= static_cast<size_t>(2 * count) && draw(0, 40) ? values[i - 2 * count]
                                                                                 : bound(other, extreme);
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
      for (uint8_t& value : block_map) value = static_cast<uint8_t>(draw(0, 3) ? draw(0, 2) : draw(3, 255));
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
      block = static_cast<MappedBlock>(std::min<int>(block_map[map_row * factors.map_cols + map_col], 2));
    }
    if (block != MappedBlock::kPartial) {
      if (block == MappedBlock::kHidden) return false;
    } else if (!bits.empty() && !(bits[row * factors.row_words + key / 32] >> (key % 32) & 1u)) {
      return false;
    }
    return true;
  }
};

}  // namespace random_masks
