// core/block_class.h against brute force: the block lists of every work tile in both directions, and the seen bits.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "check.h"
#include "core/block_class.h"
#include "core/block_range.h"
#include "random_masks.h"

namespace {

using flash::BlockClass;
using flash::BlockEntry;
using flash::Found;
using flash::full_word;
using flash::IntervalBounds;
using flash::Intervals;
using flash::kMaskStrip;
using flash::kStripWords;
using flash::kUnbounded;
using flash::ListedTile;
using flash::MaskFactors;
using flash::Rectangle;
using flash::Span;
using flash::StripClasses;
using flash::StripRuns;
using flash::TilePart;
using flash::Visibility;
using random_masks::draw;
using random_masks::Problem;

bool sees(const Problem& problem, const Visibility& window, int row, int key) {
  return key >= window.key_begin(row) && key < window.key_end(row) && problem.sees(row, key);
}

struct Totals {
  int hidden = 0, partial = 0, whole = 0;
  int settled[2] = {};  // columns by bounds of the tile: not, or so
  int known[2] = {};    // strips of columns by runs: not, or so
} totals;

// As the pass does it: bounds of the tile first, then of its strips, then scores. Of the tiles that see all of a column
// the last one marks it.
struct Classifier {
  const Problem& problem;
  const Visibility& window;
  std::vector<IntervalBounds> row_bounds, key_bounds;
  std::vector<uint32_t> seen_rows, seen_keys;

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

  TilePart part(const ListedTile& tile, Span own) const {
    IntervalBounds all;
    const auto& bounds = tile.of_keys ? key_bounds : row_bounds;
    for (int i = own.begin / kMaskStrip; kMaskStrip * i < own.end; ++i) all.add(bounds[i]);
    return TilePart(problem.factors, window, tile.of_keys, own, all);
  }

  BlockClass by_bounds(const ListedTile& tile, const TilePart& part, int column) const {
    const auto& bounds = tile.of_keys ? row_bounds : key_bounds;
    return part.class_by_bounds(problem.factors, tile.of_keys, tile.column(column), bounds[column]);
  }

  void mark(bool of_keys, int first, const uint32_t (&words)[kStripWords]) {
    for (int i = 0; i < kStripWords; ++i) (of_keys ? seen_keys : seen_rows)[first / 32 + i] |= words[i];
  }
  void mark_whole(bool of_keys, Span strip) {
    mark(of_keys, strip.begin, {full_word(0, strip.size()), full_word(1, strip.size())});
  }

  StripRuns runs_of(bool of_keys, Span own, int number) const {
    const MaskFactors& factors = problem.factors;
    StripRuns runs;
    if ((of_keys ? factors.key_hidden : factors.query_ranges) == nullptr) return runs;
    for (int i = own.begin; i < own.end; ++i) {
      const Intervals intervals = of_keys ? factors.hidden_rows_of(i) : factors.keys_of(i);
      const Span at{intervals.begin[number], intervals.end[number]},
          before = runs.intervals[std::max(runs.count, 1) - 1];
      if (runs.count > 0 && at.begin == before.begin && at.end == before.end) continue;
      if (runs.count == StripRuns::kMost) return {};
      runs.first[runs.count] = static_cast<uint8_t>(i - own.begin);
      runs.intervals[runs.count++] = at;
    }
    runs.first[runs.count] = static_cast<uint8_t>(own.size());
    return runs;
  }

  // What runs say of a strip and a column, if they do, is what the scores say.
  void check_runs(const ListedTile& tile, Span own, Span others, int column, const Found& scores, BlockClass expected) {
    const auto& bounds = tile.of_keys ? row_bounds : key_bounds;
    BlockClass found;
    uint32_t seen[kStripWords];
    const StripRuns runs[2] = {runs_of(tile.of_keys, own, 0), runs_of(tile.of_keys, own, 1)};
    const bool is_known =
        part(tile, own).class_by_runs(problem.factors, tile.of_keys, runs, others, bounds[column], found, seen);
    ++totals.known[is_known];
    if (!is_known) return;
    check::that(found == expected, "class by runs", tile.of_keys, own.begin, column, static_cast<int>(expected));
    for (int i = 0; i < kStripWords; ++i) {
      check::that(seen[i] == (tile.of_keys ? scores.any[i] : scores.rows[i]), "what sees", tile.of_keys, own.begin);
      const uint32_t of_column = tile.of_keys ? scores.rows[i] : scores.any[i];
      check::that(of_column == (expected == BlockClass::kHidden ? 0u : full_word(i, others.size())), "all of a column",
                  tile.of_keys, own.begin, column);
    }
  }

  uint32_t classes_of(const ListedTile& tile, int column) {
    if (column >= tile.columns()) return 0u;
    const Span others = tile.column(column);
    const TilePart whole = part(tile, tile.own());
    const BlockClass of_tile = by_bounds(tile, whole, column);
    ++totals.settled[of_tile != BlockClass::kPartial];
    if (others.begin >= whole.some.end || others.end <= whole.some.begin) {
      check::that(of_tile == BlockClass::kHidden, "columns that no list has", tile.of_keys, tile.begin, column);
    }
    uint32_t classes = 0u;
    if (of_tile == BlockClass::kWhole) {
      const ListedTile next = tile.next();
      const bool is_last = !next.exists() || by_bounds(next, part(next, next.own()), column) != BlockClass::kWhole;
      if (is_last) mark_whole(!tile.of_keys, others);
    }
    for (int strip = 0; strip < tile.strips(); ++strip) {
      const Span own = tile.strip(strip);
      BlockClass found = of_tile;
      if (found == BlockClass::kPartial) {
        found = by_bounds(tile, part(tile, own), column);
        if (found == BlockClass::kWhole) mark_whole(!tile.of_keys, others);
      }
      if (found == BlockClass::kWhole) mark_whole(tile.of_keys, own);
      if (found == BlockClass::kPartial) {
        const Rectangle at = tile.rectangle(own, others);
        const Found seen = find_seen(problem.factors, window, at);
        mark(false, at.rows.begin, seen.rows);
        mark(true, at.keys.begin, seen.any);
        found = seen.class_of(at);
        check_runs(tile, own, others, column, seen, found);
      }
      classes |= StripClasses::one(strip, found);
    }
    return classes;
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

void check_lists(const Problem& problem, const Visibility& window, bool of_keys, int size, int block) {
  Classifier classify(problem, window);
  ListedTile tile{of_keys, 0, size, block, problem.seqlen_q, problem.seqlen_k};
  for (; tile.exists(); tile.begin += size) {
    const auto classes_of = [&](int column) { return classify.classes_of(tile, column); };
    for (int index = 0; index * block < tile.other_end(); ++index) {
      bool visited = false, is_whole = false;
      const BlockEntry entry = tile.entry(index, classes_of, visited, is_whole);
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

// Without factors: blocks by step (BiasedBlockList), and classes, from the window alone.
void check_window(const Visibility& window, int size, int block) {
  check::that(window.window.shows_all_keys(), "all keys are seen");
  const Problem problem(window.seqlen_q, window.seqlen_k, 0);
  Classifier classify(problem, window);
  ListedTile tile{false, 0, size, block, window.seqlen_q, window.seqlen_k};
  for (; tile.exists(); tile.begin += size) {
    const flash::BlockRange range = flash::block_range(window, tile.begin, tile.own().end, block);
    const flash::BiasedBlockList list{{nullptr, range.unmasked_end, range.end}};
    const auto classes_of = [&](int column) { return classify.classes_of(tile, column); };
    for (int index = 0; index * block < window.seqlen_k; ++index) {
      bool visited = false, is_whole = false;
      const BlockEntry entry = tile.entry(index, classes_of, visited, is_whole);
      check::that(visited == (index < list.count()) && is_whole == (index < list.whole), "blocks", tile.begin, index,
                  list.whole, list.count());
      check::that(list.at(index).block() == index, "by step", index);
      if (!visited) continue;
      for (int strip = 0; strip < size / kMaskStrip; ++strip) {
        const BlockClass found = class_by_window(window, tile.begin + kMaskStrip * strip, index * block, block);
        check::that(found == entry.strip(strip), "class by window", tile.begin, strip, index, window.seqlen_q,
                    window.seqlen_k);
      }
    }
  }
  for (int key = 0; key < window.seqlen_k; ++key) {
    check::that(classify.seen_keys[key / 32] >> (key % 32) & 1u, "a key that no row sees", key);
  }
}

}  // namespace

// Tiles and blocks are those of the kernels (plan/tiles.h).
int main() {
  constexpr int kRowTiles[][2] = {{192, 128}, {128, 128}, {192, 64}, {128, 64}};
  constexpr int kKeyTiles[][2] = {{128, 64}, {64, 64}};
  for (int i = 0; i < 184; ++i) {
    const bool is_long = i >= 160;  // of intervals alone, for runs
    const Problem problem(is_long ? draw(300, 500) : draw(1, 260), is_long ? draw(300, 500) : draw(1, 330),
                          is_long ? 1 + i % 3 : i % 16);
    Visibility window{problem.seqlen_q, problem.seqlen_k, {}};
    if (i / 16 % 2 == 1) window.window = {draw(0, 1) ? kUnbounded : draw(0, 200), draw(0, 50)};
    for (const auto& [tile, block] : kRowTiles) check_lists(problem, window, false, tile, block);
    for (const auto& [tile, block] : kKeyTiles) check_lists(problem, window, true, tile, block);
    window.window = {kUnbounded, i % 3 == 0 ? kUnbounded : i % 3 == 1 ? 0 : draw(0, 50)};
    for (const auto& [tile, block] : kRowTiles) check_window(window, tile, block);
  }
  check::that(totals.settled[0] > 300 && totals.settled[1] > 300, "columns settled by bounds", totals.settled[0],
              totals.settled[1]);
  check::that(totals.known[0] > 300 && totals.known[1] > 100, "strips by runs", totals.known[0], totals.known[1]);
  check::that(totals.hidden > 300 && totals.partial > 300 && totals.whole > 300, "classes of all kinds", totals.hidden,
              totals.partial, totals.whole);
  return check::report();
}
