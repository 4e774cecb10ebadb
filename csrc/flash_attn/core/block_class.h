// Which blocks of scores a work tile visits under a mask as data: the arithmetic of kernels/auxiliary/mask_plan.cu.
// tests/cpp/test_block_lists.cpp checks it by brute force.
#pragma once

#include <cstdint>

#include "core/block_list.h"
#include "core/host_device.h"
#include "core/mask_factors.h"
#include "core/visibility.h"

namespace flash {

constexpr int kStripWords = kMaskStrip / kMaskWordKeys;
static_assert(kMaskWordKeys == 32 && kMaskStrip % 32 == 0, "rows and keys of a strip are whole words");

// Rows or keys [begin, end).
struct Span {
  int begin = 0, end = 0;

  FLASH_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
  FLASH_HOST_DEVICE constexpr int size() const { return end - begin; }
  FLASH_HOST_DEVICE constexpr bool contains(Span other) const { return (begin <= other.begin) & (end >= other.end); }
  FLASH_HOST_DEVICE constexpr bool meets(Span other) const { return (begin < other.end) & (end > other.begin); }
  FLASH_HOST_DEVICE constexpr Span both(Span other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
  FLASH_HOST_DEVICE constexpr Span part(int index, int of_size) const {
    const int first = begin + index * of_size;
    return {first, first + of_size < end ? first + of_size : end};
  }
};

// Of a strip of `size` rows or keys.
FLASH_HOST_DEVICE constexpr uint32_t full_word(int index, int size) {
  return MaskFactors::interval_word(0, size, 32 * index);
}

// At most kMaskStrip rows and keys of a sequence.
struct Rectangle {
  Span rows, keys;
};

// What the rows of a rectangle see, a bit for each of its rows and keys.
struct Found {
  uint32_t any[kStripWords] = {};   // keys that some row sees
  uint32_t all[kStripWords];        // keys that all rows see
  uint32_t rows[kStripWords] = {};  // rows that see some key

  FLASH_HOST_DEVICE Found() {
    for (int i = 0; i < kStripWords; ++i) all[i] = ~0u;
  }

  FLASH_HOST_DEVICE void add(int row, const uint32_t (&words)[kStripWords]) {
    uint32_t some = 0u;
    for (int i = 0; i < kStripWords; ++i) {
      any[i] |= words[i];
      all[i] &= words[i];
      some |= words[i];
    }
    for (int i = 0; i < kStripWords; ++i) rows[i] |= some != 0u && row / 32 == i ? 1u << (row % 32) : 0u;
  }

  FLASH_HOST_DEVICE BlockClass class_of(const Rectangle& at) const {
    uint32_t some = 0u, missing = 0u;
    for (int i = 0; i < kStripWords; ++i) {
      some |= any[i];
      missing |= full_word(i, at.keys.size()) & ~all[i];
    }
    return some == 0u ? BlockClass::kHidden : missing == 0u ? BlockClass::kWhole : BlockClass::kPartial;
  }
};

// What a row sees of a rectangle's keys by the factors of rows and the window: all but key_hidden.
FLASH_HOST_DEVICE void words_of_row(const MaskFactors& factors, const Visibility& window, const Rectangle& at, int row,
                                    uint32_t (&words)[kStripWords]) {
  const Span keys = at.keys.both({window.key_begin(row), window.key_end(row)});
  for (int i = 0; i < kStripWords; ++i) {
    const int key = at.keys.begin + kMaskWordKeys * i;
    const uint32_t in_window = MaskFactors::interval_word(keys.begin, keys.end, key);
    words[i] = in_window == 0u ? 0u : in_window & factors.row_word(row, key);
  }
}

// The keys of a rectangle that are hidden from a row, by key_hidden.
FLASH_HOST_DEVICE void hide_keys(const MaskFactors& factors, const Rectangle& at, int row,
                                 uint32_t (&words)[kStripWords]) {
  if (factors.key_hidden == nullptr) return;
  for (int key = at.keys.begin; key < at.keys.end; ++key) {
    const int bit = key - at.keys.begin;
    if (factors.hidden_rows_of(key).contain(row)) words[bit / 32] &= ~(1u << (bit % 32));
  }
}

FLASH_HOST_DEVICE Found find_seen(const MaskFactors& factors, const Visibility& window, const Rectangle& at) {
  Found found;
  for (int row = at.rows.begin; row < at.rows.end; ++row) {
    uint32_t words[kStripWords];
    words_of_row(factors, window, at, row, words);
    hide_keys(factors, at, row, words);
    found.add(row - at.rows.begin, words);
  }
  return found;
}

// Two bits for each strip of a work tile, its BlockClass, as in a BlockEntry.
struct StripClasses {
  static constexpr uint32_t kWhole = 0xaaaaaaaau, kPartial = 0x55555555u;  // of all strips
  static constexpr uint32_t kOpen = 3u;                                    // of a strip: not known yet

  FLASH_HOST_DEVICE static constexpr uint32_t of_first(int strips) { return (1u << 2 * strips) - 1u; }
  FLASH_HOST_DEVICE static constexpr uint32_t one(int strip, BlockClass value) {
    return static_cast<uint32_t>(value) << 2 * strip;
  }
  FLASH_HOST_DEVICE static constexpr bool is_open(uint32_t bits, int strip) {
    return (bits >> 2 * strip & 3u) == kOpen;
  }
};

// A work tile of `tile` rows and its blocks of `block` keys, or with of_keys of keys and its blocks of rows. Its
// columns are the strips of the blocks.
struct ListedTile {
  static constexpr int kMostColumns = 2;  // of a block

  bool of_keys;
  int begin;  // first row or key of the tile
  int tile, block;
  int seqlen_q, seqlen_k;

  FLASH_HOST_DEVICE int own_end() const { return of_keys ? seqlen_k : seqlen_q; }
  FLASH_HOST_DEVICE int other_end() const { return of_keys ? seqlen_q : seqlen_k; }
  FLASH_HOST_DEVICE bool exists() const { return begin < own_end(); }
  FLASH_HOST_DEVICE int column_bits() const { return block > kMaskStrip ? 1 : 0; }  // a block is 1 << these columns
  FLASH_HOST_DEVICE int columns() const { return (other_end() + kMaskStrip - 1) / kMaskStrip; }
  FLASH_HOST_DEVICE Span own() const { return Span{begin, own_end()}.part(0, tile); }
  FLASH_HOST_DEVICE int strips() const { return (own().size() + kMaskStrip - 1) / kMaskStrip; }
  FLASH_HOST_DEVICE ListedTile next() const { return {of_keys, begin + tile, tile, block, seqlen_q, seqlen_k}; }

  FLASH_HOST_DEVICE Span strip(int index) const { return Span{begin, own_end()}.part(index, kMaskStrip); }
  // Rows or keys of columns.
  FLASH_HOST_DEVICE Span columns(Span indices) const {
    return Span{kMaskStrip * indices.begin, kMaskStrip * indices.end}.both({0, other_end()});
  }
  FLASH_HOST_DEVICE Span column(int index) const { return columns({index, index + 1}); }
  FLASH_HOST_DEVICE Rectangle rectangle(Span own, Span column) const {
    return of_keys ? Rectangle{column, own} : Rectangle{own, column};
  }

  // The entry of a block: visited where a strip sees some of it, and is_whole where all strips see all of it. Strips
  // beyond the sequence make no block partial. Missing keys do, since they have to be masked; missing rows are never
  // stored. classes_of(column): StripClasses, kHidden beyond the last column.
  template <class ClassesOf>
  FLASH_HOST_DEVICE BlockEntry entry(int index, const ClassesOf& classes_of, bool& visited, bool& is_whole) const {
    const uint32_t existing = StripClasses::of_first(strips());
    const uint32_t beyond = StripClasses::of_first(tile / kMaskStrip) & ~existing;
    const uint32_t complete = of_keys ? StripClasses::of_first(own().size() / kMaskStrip) : existing;
    uint32_t some = 0u, every = StripClasses::kWhole & complete;
    for (int part = 0; part < kMostColumns; ++part) {
      const int column = (index << column_bits()) + part;
      if (part >> column_bits() != 0) continue;
      const uint32_t classes = classes_of(column);
      some |= classes | classes >> 1;
      every &= of_keys || kMaskStrip * (column + 1) <= seqlen_k ? classes : 0u;
    }
    some &= StripClasses::kPartial & existing;
    visited = some != 0u;
    is_whole = every == (StripClasses::kWhole & existing);
    const uint32_t of_beyond = of_keys ? 0u : StripClasses::kWhole & beyond;  // of keys their dS may be stored
    BlockEntry result = BlockEntry::of_block(index);
    result.bits |= (every | (some & ~(every >> 1)) | of_beyond) << BlockEntry::kIndexBits;
    return result;
  }
};

// Words of the members of a strip, and whether they are known.
struct KnownWords {
  bool known = true;
  uint32_t words[kStripWords] = {};
};

// Adds the rows (or keys) `own` that the interval of a number of each of the columns contains, if it is the same for
// all of these or decided by their bounds.
FLASH_HOST_DEVICE void add_contained(KnownWords& result, const IntervalBounds& columns, int number, Span own) {
  const Span outer{columns.outer.begin[number], columns.outer.end[number]},
      inner{columns.inner.begin[number], columns.inner.end[number]};
  const bool all = inner.contains(own), is_same = (outer.begin == inner.begin) & (outer.end == inner.end);
  result.known &= all || is_same || !outer.meets(own);
  for (int i = 0; i < kStripWords; ++i) {
    const int first = own.begin + 32 * i;
    result.words[i] |= all ? ~0u : is_same ? MaskFactors::interval_word(outer.begin, outer.end, first) : 0u;
  }
}

// Of the intervals of a number, the runs of rows (or keys) of a strip that have the same one.
struct StripRuns {
  static constexpr int kMost = 8;

  int count = 0;             // 0: more than kMost
  uint8_t first[kMost + 1];  // counted from the strip's first; the last one is its size
  Span intervals[kMost];

  // Adds those whose interval contains the columns. bounds: of the strip.
  FLASH_HOST_DEVICE void add_containing(KnownWords& result, const IntervalBounds& bounds, int number,
                                        Span columns) const {
    const Span outer{bounds.outer.begin[number], bounds.outer.end[number]};
    if (!outer.meets(columns)) return;
    result.known &= count > 0;
    for (int run = 0; run < count; ++run) {
      const bool contains = intervals[run].contains(columns);
      result.known &= contains || intervals[run].empty() || !intervals[run].meets(columns);
      for (int i = 0; i < kStripWords; ++i) {
        result.words[i] |= contains ? MaskFactors::interval_word(first[run], first[run + 1], 32 * i) : 0u;
      }
    }
  }
};

// What is known of all rows (or keys) of a tile or a strip of it: which keys (rows) the window lets some and all of
// them see, and bounds of their factor, query_ranges or key_hidden.
struct TilePart {
  IntervalBounds bounds;
  Span own, some, every;

  TilePart() = default;
  FLASH_HOST_DEVICE TilePart(const MaskFactors& factors, const Visibility& window, bool of_keys, Span own_,
                             const IntervalBounds& bounds_)
      : bounds(bounds_), own(own_) {
    const int first = own.begin, last = own.end - 1;
    some = of_keys ? Span{window.row_begin(first), window.row_end(last)}
                   : Span{window.key_begin(first), window.key_end(last)};
    every = of_keys ? Span{window.row_begin(last), window.row_end(first)}
                    : Span{window.key_begin(last), window.key_end(first)};
    if (!of_keys && factors.query_ranges != nullptr) {
      const Intervals& outer = bounds.outer;
      some = some.both({outer.begin[0] < outer.begin[1] ? outer.begin[0] : outer.begin[1],
                        outer.end[0] > outer.end[1] ? outer.end[0] : outer.end[1]});
    }
  }

  // The class of its scores with a column, whose factor has bounds `others`. kPartial is always a correct answer. With
  // bits, whatever is not known to be hidden is kPartial.
  FLASH_HOST_DEVICE BlockClass class_by_bounds(const MaskFactors& factors, bool of_keys, Span column,
                                               const IntervalBounds& others) const {
    bool hidden = !some.meets(column), whole = every.contains(column);
    const auto apply = [&](const IntervalBounds& intervals, Span span, bool hides) {
      const bool inside = intervals.all_contain(span.begin, span.end),
                 outside = intervals.none_meets(span.begin, span.end);
      hidden |= hides ? inside : outside;
      whole &= hides ? outside : inside;
    };
    const bool has_ranges = factors.query_ranges != nullptr, has_hidden = factors.key_hidden != nullptr;
    if (of_keys ? has_hidden : has_ranges) apply(bounds, column, of_keys);
    if (of_keys ? has_ranges : has_hidden) apply(others, own, !of_keys);
    MappedBlock block = MappedBlock::kPartial;
    if (factors.block_map != nullptr && !hidden) {
      const Span rows = of_keys ? column : own, keys = of_keys ? own : column;
      const bool is_one = factors.in_one_block(rows.begin, rows.end - 1, keys.begin, keys.end - 1);
      if (is_one) block = factors.mapped(rows.begin, keys.begin);
      hidden |= block == MappedBlock::kHidden;
      whole &= is_one;
    }
    whole &= factors.bits == nullptr || block == MappedBlock::kWhole;
    return hidden ? BlockClass::kHidden : whole ? BlockClass::kWhole : BlockClass::kPartial;
  }

  // Of a strip, where each row (or key) sees all or nothing of the columns: the class of these scores, and which of
  // them see something. False: not known. runs: of both numbers of intervals.
  FLASH_HOST_DEVICE bool class_by_runs(const MaskFactors& factors, bool of_keys, const StripRuns (&runs)[2],
                                       Span columns, const IntervalBounds& others, BlockClass& found,
                                       uint32_t (&seen)[kStripWords]) const {
    if (factors.bits != nullptr || factors.block_map != nullptr || !every.contains(columns)) return false;
    const bool has_ranges = factors.query_ranges != nullptr, has_hidden = factors.key_hidden != nullptr;
    const bool has_own = of_keys ? has_hidden : has_ranges, has_others = of_keys ? has_ranges : has_hidden;
    KnownWords containing, contained;  // members whose interval contains the columns, and that those of columns contain
    for (int number = 0; number < 2; ++number) {
      if (has_own) runs[number].add_containing(containing, bounds, number, columns);
      if (has_others) add_contained(contained, others, number, own);
    }
    uint32_t some = 0u, missing = 0u;
    for (int i = 0; i < kStripWords; ++i) {
      const uint32_t all = full_word(i, own.size());
      seen[i] = all &
                (!has_own  ? ~0u
                 : of_keys ? ~containing.words[i]
                           : containing.words[i]) &
                (!has_others ? ~0u
                 : of_keys   ? contained.words[i]
                             : ~contained.words[i]);
      some |= seen[i], missing |= all & ~seen[i];
    }
    found = some == 0u ? BlockClass::kHidden : missing == 0u ? BlockClass::kWhole : BlockClass::kPartial;
    return containing.known && contained.known;
  }
};

}  // namespace flash
