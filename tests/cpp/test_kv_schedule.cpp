// The stream-K schedule: every n_block of every tile is computed once, split points are where the rule permits, and
// partial results have separate slots.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "core/kv_schedule.h"

namespace {

using flash::BlockSpan;
using flash::SplitPoints;
using flash::SplitRule;

struct Tile {
  int first_block;
  int count;
  int64_t begin;
};

bool may_split(const SplitPoints& split_points, const Tile& tile, int offset) {
  switch (split_points.rule) {
    case SplitRule::kNowhere: return false;
    case SplitRule::kAnywhere: return tile.count > split_points.value;
    case SplitRule::kEqualSplits:
      return offset % ((int64_t{tile.count} + split_points.value - 1) / split_points.value) == 0;
    default: return (tile.first_block + offset) % split_points.value == 0;
  }
}

// The kernel's span under kAnywhere and kNowhere, in both widths.
void check_span_anywhere(const SplitPoints& split_points, const Tile& tile, int64_t cta_blocks, int index,
                         const BlockSpan& expected) {
  if (split_points.rule != SplitRule::kAnywhere && split_points.rule != SplitRule::kNowhere) return;
  const BlockSpan wide = flash::block_span_anywhere(split_points, tile.count, tile.begin, cta_blocks, index);
  check::that(wide.from == expected.from && wide.to == expected.to, "anywhere", wide.from, expected.from, tile.count);
  if (tile.begin + tile.count >= flash::kMaxBlocks32) return;
  const BlockSpan narrow = flash::block_span_anywhere(split_points, tile.count, static_cast<int>(tile.begin),
                                                      static_cast<int>(cta_blocks), index);
  check::that(narrow.from == expected.from && narrow.to == expected.to, "in 32 bits", narrow.from, expected.from,
              tile.count, tile.begin, cta_blocks, index);
}

void check_tile(const SplitPoints& split_points, const Tile& tile, int64_t cta_blocks, int thread_blocks,
                std::set<int>& slots) {
  int done = 0, parts = 0;
  const int first = static_cast<int>(tile.begin / cta_blocks);
  const int last = static_cast<int>(std::min<int64_t>((tile.begin + tile.count - 1) / cta_blocks, thread_blocks - 1));
  for (int index = 0; index < thread_blocks; ++index) {
    const BlockSpan span = flash::block_span(split_points, tile.first_block, tile.count, tile.begin, cta_blocks, index);
    check_span_anywhere(split_points, tile, cta_blocks, index, span);
    if (span.empty()) continue;
    ++parts;
    check::that(span.from == done, "spans follow each other", span.from, done, tile.count, cta_blocks);
    check::that(span.from == 0 || may_split(split_points, tile, span.from), "permitted split point", span.from,
                tile.count);
    check::that(index >= first && index <= last, "the combine looks at these CTAs", index, first, last);
    check::that(span.from > 0 || index == first, "the CTA of the first n_block has the first part", index);
    done = span.to;
    if (span.from == 0 && span.to == tile.count) continue;
    check::that(slots.insert(flash::kv_slot(index, span)).second, "a slot for each partial result", index);
  }
  check::that(done == tile.count, "every n_block is computed", done, tile.count, cta_blocks, thread_blocks);
  if (split_points.rule == SplitRule::kEqualSplits)
    check::that(parts <= split_points.value, "number of parts", parts, split_points.value);
}

// kAnywhere: both CTAs of a cluster agree on their halves, and have nothing else.
void check_halves(const SplitPoints& split_points, const std::vector<Tile>& tiles, int64_t cta_blocks,
                  int thread_blocks) {
  for (int pair = 0; 2 * pair + 1 < thread_blocks; ++pair) {
    for (const Tile& tile : tiles) {
      bool is_half[2];
      for (int rank : {0, 1}) {
        const int index = 2 * pair + rank;
        const BlockSpan span =
            flash::block_span(split_points, tile.first_block, tile.count, tile.begin, cta_blocks, index);
        is_half[rank] = !span.empty() && flash::kv_is_cluster_half(span, tile.count, cta_blocks, index);
        const bool same = tile.begin == 2 * pair * cta_blocks && tile.count == 2 * cta_blocks;
        const bool is_split = span.from > 0 || span.to < tile.count;
        check::that(is_half[rank] == (same && is_split && !span.empty()), "a tile of two CTA ranges", pair, cta_blocks);
      }
      check::that(is_half[0] == is_half[1], "both halves", pair, tile.begin, cta_blocks);
    }
  }
}

void check_schedule(std::mt19937& random) {
  auto below = [&](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
  constexpr int kMany[] = {128, 1 << 30, 0x7ffffffe, 0x7fffffff};
  const SplitPoints all_rules[] = {{SplitRule::kAnywhere, below(6)},
                                   {SplitRule::kEqualSplits, below(3) ? 1 + below(9) : kMany[below(4)]},
                                   {SplitRule::kFixedSplits, 1 + below(9)},
                                   {SplitRule::kNowhere, 0}};
  const SplitPoints split_points = all_rules[below(4)];
  std::vector<Tile> tiles;
  int64_t total = 0;
  for (int i = 1 + below(12); i > 0; --i) {
    tiles.push_back({below(40), 1 + below(1 + below(60)), total});
    total += tiles.back().count;
  }
  const int thread_blocks = 1 + below(40);
  const int64_t cta_blocks = flash::blocks_per_cta(total, thread_blocks, 1 + below(5));
  check::that(cta_blocks * thread_blocks >= total, "the CTA ranges cover the work", cta_blocks, thread_blocks, total);
  std::set<int> slots;
  for (const Tile& tile : tiles) check_tile(split_points, tile, cta_blocks, thread_blocks, slots);
  if (split_points.rule == SplitRule::kAnywhere) check_halves(split_points, tiles, cta_blocks, thread_blocks);
  // The combine finds a split tile by the first CTA boundary inside it.
  for (const Tile& tile : tiles) {
    int found = 0;
    for (int index = 1; index < thread_blocks; ++index) {
      const int64_t boundary = index * cta_blocks;
      const bool inside = boundary > tile.begin && boundary < tile.begin + tile.count;
      found += inside && (index - 1) * cta_blocks <= tile.begin;
    }
    const bool reached = tile.begin / cta_blocks != (tile.begin + tile.count - 1) / cta_blocks;
    check::that(found == (reached ? 1 : 0), "one CTA boundary finds a tile", found, tile.count, cta_blocks);
  }
}

// Linearised work as long as 32 bits allow, and longer: no overflow (-fsanitize=signed-integer-overflow).
void check_long_work(std::mt19937& random) {
  auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  for (int i = 0; i < 20000; ++i) {
    const int64_t total = flash::kMaxBlocks32 - 1 - below(i % 2 ? 3 : 1 << 29) + (i % 3 == 0 ? 1 << 30 : 0);
    const int thread_blocks = 1 + static_cast<int>(below(1000));
    const int64_t cta_blocks = flash::blocks_per_cta(total, thread_blocks, 1 + below(64));
    const int64_t most = total < 0x7fffffff ? total : 0x7fffffff;
    const int count = static_cast<int>(1 + below(most));
    const Tile tile{0, count, below(total - count + 1)};
    const SplitPoints split_points{i % 5 ? SplitRule::kAnywhere : SplitRule::kNowhere,
                                   static_cast<int>(below(1 << 20))};
    // A CTA whose range begins beyond the work never asks for a span.
    const int index = static_cast<int>(below((total - 1) / cta_blocks + 1));
    check_span_anywhere(split_points, tile, cta_blocks, index,
                        flash::block_span(split_points, tile.first_block, tile.count, tile.begin, cta_blocks, index));
  }
}

void check_lengths() {
  for (int capacity : {0, 1, 96}) {
    for (int added : {0, 1, 5}) {
      for (int cached : {-2147483647 - 1, -2, -1, 0, 1, 91, 92, 95, 96, 97, 2147483647}) {
        for (int leftpad : {-5, 0, 1, 95, 96, 1000}) {
          const flash::KvLengths lengths = flash::kv_lengths(cached, leftpad, added, capacity);
          const bool fits = cached >= 0 && int64_t{cached} + added <= capacity;
          check::that(lengths.fits == fits, "fits", cached, added, capacity);
          const int total = fits ? cached + added : 0;
          check::that(lengths.first_row == std::min(std::max(leftpad, 0), total), "first row", leftpad, total);
          check::that(lengths.first_row + lengths.seqlen_k == total, "keys", lengths.seqlen_k, total);
        }
      }
    }
  }
}

void check_rotary_rows() {
  using flash::kv_rotary_rows;
  check::that(kv_rotary_rows(40, 7, 2, true) == 42, "one position: the new keys");
  check::that(kv_rotary_rows(40, 7, 0, true) == 41, "one position: the queries");
  check::that(kv_rotary_rows(40, 0, 0, true) == 40, "nothing to rotate");
  check::that(kv_rotary_rows(40, 7, 2, false) == 47, "a position for each query");
  check::that(kv_rotary_rows(40, 2, 7, false) == 47, "the new keys");
  check::that(kv_rotary_rows(0x7fffffff, 0x3fffffff, 1, false) == int64_t{0x7fffffff} + 0x3fffffff, "64 bits");
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) check_schedule(random);
  check_long_work(random);
  check_lengths();
  check_rotary_rows();
  return check::report();
}
