// core/block_class.h against brute force: the block lists of every work tile in both directions, and the seen bits.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "core/block_class.h"
#include "random_masks.h"

namespace {

using flash::BlockClass;
using flash::BlockEntry;
using flash::Found;
using flash::IntervalBounds;
using flash::kMaskStrip;
using flash::kStripWords;
using flash::kUnbounded;
using flash::ListedTile;
using flash::MaskFactors;
using flash::Rectangle;
using flash::Visibility;
using random_masks::draw;
using random_masks::Problem;

bool sees(const Problem& problem, const Visibility& window, int row, int key) {
  return key >= window.key_begin(row) && key < window.key_end(row) && problem.sees(row, key);
}

// As the pass does it: bounds of strips first, scores where these do not tell.
struct Classifier {
  const Problem& problem;
  const Visibility& window;
  std::vector<IntervalBounds> row_bounds, key_bounds;
  mutable std::vector<uint32_t> seen_rows, seen_keys;

  static std::vector<IntervalBounds> bounds_of(const MaskFactors& factors, bool of_rows, int length) {
    std::vector<IntervalBounds> bounds((length + kMaskStrip - 1) / kMaskStrip);
    if ((of_rows ? factors.query_ranges : factors.key_hidden) == nullptr) return bounds;
    for (int i = 0; i < length; ++i) {
      bounds[i / kMaskStrip].add(of_rows ? factors.keys_of(i) : factors.hidden_rows_of(i));
    }
    return bounds;
  }

  Classifier(const Problem& problem_, const Visibility& window_)
      : problem(problem_),
        window(window_),
        row_bounds(bounds_of(problem.factors, true, problem.seqlen_q)),
        key_bounds(bounds_of(problem.factors, false, problem.seqlen_k)),
        seen_rows(row_bounds.size() * kStripWords),
        seen_keys(key_bounds.size() * kStripWords) {}

  BlockClass operator()(const Rectangle& at) const {
    if (at.empty()) return BlockClass::kHidden;
    const int row_strip = at.row_begin / kMaskStrip, key_strip = at.key_begin / kMaskStrip;
    const BlockClass bounded = class_by_bounds(problem.factors, window, row_bounds[row_strip], key_bounds[key_strip],
                                               at.row_begin, at.row_end, at.key_begin, at.key_end);
    if (bounded == BlockClass::kHidden) return bounded;
    const bool is_whole = bounded == BlockClass::kWhole;
    const Found found = is_whole ? Found::whole(at) : find_seen(problem.factors, window, at);
    for (int i = 0; i < kStripWords; ++i) {
      seen_rows[row_strip * kStripWords + i] |= found.rows[i];
      seen_keys[key_strip * kStripWords + i] |= found.any[i];
    }
    return is_whole ? bounded : found.class_of(at);
  }
};

// What the scores of a strip of a tile and a block say. Keys beyond the sequence count as hidden ones.
BlockClass class_of_strip(const Problem& problem, const Visibility& window, const ListedTile& tile, int strip,
                          int index) {
  const bool of_keys = tile.of_keys;
  const int own_begin = tile.begin + kMaskStrip * strip, other_begin = index * tile.block;
  const int row_begin = of_keys ? other_begin : own_begin, key_begin = of_keys ? own_begin : other_begin;
  const int row_end = row_begin + (of_keys ? tile.block : kMaskStrip);
  const int key_end = key_begin + (of_keys ? kMaskStrip : tile.block);
  bool some = false, every = true;
  for (int row = row_begin; row < std::min(row_end, problem.seqlen_q); ++row) {
    for (int key = key_begin; key < key_end; ++key) {
      const bool seen = key < problem.seqlen_k && sees(problem, window, row, key);
      some |= seen;
      every &= seen;
    }
  }
  return !some ? BlockClass::kHidden : every ? BlockClass::kWhole : BlockClass::kPartial;
}

struct Totals {
  int hidden = 0, partial = 0, whole = 0;
} totals;

void check_lists(const Problem& problem, const Visibility& window, bool of_keys, int size, int block) {
  const Classifier classify(problem, window);
  ListedTile tile{of_keys, 0, size, block, problem.seqlen_q, problem.seqlen_k};
  for (; tile.exists(); tile.begin += size) {
    for (int index = 0; index < tile.blocks(); ++index) {
      bool visited = false, is_whole = false;
      const BlockEntry entry = tile.entry(index, classify, visited, is_whole);
      bool some = false, every = true, any_whole = false;
      for (int strip = 0; strip < size / kMaskStrip; ++strip) {
        if (tile.begin + kMaskStrip * strip >= tile.own_end()) continue;  // never read
        const BlockClass expected = class_of_strip(problem, window, tile, strip, index), found = entry.strip(strip);
        check::that(found == expected, "class of a strip", of_keys, tile.begin, strip, index, static_cast<int>(found),
                    static_cast<int>(expected), problem.seqlen_q, problem.seqlen_k);
        some |= expected != BlockClass::kHidden;
        every &= expected == BlockClass::kWhole;
        any_whole |= expected == BlockClass::kWhole;
        ++(expected == BlockClass::kHidden ? totals.hidden : every ? totals.whole : totals.partial);
      }
      check::that(entry.block() == index && visited == some, "visited blocks", of_keys, tile.begin, index, visited);
      if (of_keys) check::that(entry.has_whole_strip() == any_whole, "a whole strip", tile.begin, index);
      check::that(is_whole == every, "blocks that are whole for all strips", of_keys, tile.begin, index, is_whole);
    }
  }
  for (int row = 0; row < problem.seqlen_q; ++row) {
    bool some = false;
    for (int key = 0; key < problem.seqlen_k && !some; ++key) some = sees(problem, window, row, key);
    check::that((classify.seen_rows[row / 32] >> (row % 32) & 1u) == some, "rows that see some key", of_keys, row);
  }
  for (int key = 0; key < problem.seqlen_k; ++key) {
    bool some = false;
    for (int row = 0; row < problem.seqlen_q && !some; ++row) some = sees(problem, window, row, key);
    check::that((classify.seen_keys[key / 32] >> (key % 32) & 1u) == some, "keys that some row sees", of_keys, key);
  }
}

}  // namespace

// Tiles and blocks are those of the kernels (plan/tiles.h).
int main() {
  constexpr int kRowTiles[][2] = {{192, 128}, {128, 128}, {192, 64}, {128, 64}};
  constexpr int kKeyTiles[][2] = {{128, 64}, {64, 64}};
  for (int i = 0; i < 160; ++i) {
    const Problem problem(draw(1, 260), draw(1, 330), i % 16);
    Visibility window{problem.seqlen_q, problem.seqlen_k, {}};
    if (i / 16 % 2 == 1) window.window = {draw(0, 1) ? kUnbounded : draw(0, 200), draw(0, 50)};
    for (const auto& [tile, block] : kRowTiles) check_lists(problem, window, false, tile, block);
    for (const auto& [tile, block] : kKeyTiles) check_lists(problem, window, true, tile, block);
  }
  check::that(totals.hidden > 300 && totals.partial > 300 && totals.whole > 300, "classes of all kinds", totals.hidden,
              totals.partial, totals.whole);
  return check::report();
}
