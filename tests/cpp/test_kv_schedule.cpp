// The stream-K schedule: every n_block of every tile is computed once, split points are where the rule permits, and
// partial results have slots of their own.
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

bool may_cut(const SplitPoints& split_points, const Tile& tile, int offset) {
  switch (split_points.rule) {
    case SplitRule::kWhole: return false;
    case SplitRule::kAnywhere: return tile.count > split_points.value;
    case SplitRule::kParts: return offset % ((int64_t{tile.count} + split_points.value - 1) / split_points.value) == 0;
    default: return (tile.first_block + offset) % split_points.value == 0;
  }
}

// The kernel's span under kAnywhere and kWhole, in both widths.
void check_free_segment(const SplitPoints& split_points, const Tile& tile, int64_t share, int index,
                        const BlockSpan& expected) {
  if (split_points.rule != SplitRule::kAnywhere && split_points.rule != SplitRule::kWhole) return;
  const BlockSpan wide = flash::free_block_span(split_points, tile.count, tile.begin, share, index);
  check::that(wide.from == expected.from && wide.to == expected.to, "free cuts", wide.from, expected.from, tile.count);
  if (tile.begin + tile.count >= flash::kMostShortPlaces) return;
  const BlockSpan narrow =
      flash::free_block_span(split_points, tile.count, static_cast<int>(tile.begin), static_cast<int>(share), index);
  check::that(narrow.from == expected.from && narrow.to == expected.to, "in 32 bits", narrow.from, expected.from,
              tile.count, tile.begin, share, index);
}

void check_tile(const SplitPoints& split_points, const Tile& tile, int64_t share, int thread_blocks,
                std::set<int>& slots) {
  int done = 0, parts = 0;
  const int first = static_cast<int>(tile.begin / share);
  const int last = static_cast<int>(std::min<int64_t>((tile.begin + tile.count - 1) / share, thread_blocks - 1));
  for (int index = 0; index < thread_blocks; ++index) {
    const BlockSpan segment = flash::block_span(split_points, tile.first_block, tile.count, tile.begin, share, index);
    check_free_segment(split_points, tile, share, index, segment);
    if (segment.empty()) continue;
    ++parts;
    check::that(segment.from == done, "segments follow each other", segment.from, done, tile.count, share);
    check::that(segment.from == 0 || may_cut(split_points, tile, segment.from), "permitted cut", segment.from,
                tile.count);
    check::that(index >= first && index <= last, "the merge looks at these thread blocks", index, first, last);
    check::that(segment.from > 0 || index == first, "the first part is done by the owner of the first block", index);
    done = segment.to;
    if (segment.from == 0 && segment.to == tile.count) continue;
    check::that(slots.insert(flash::kv_slot(index, segment)).second, "a slot for each partial result", index);
  }
  check::that(done == tile.count, "every block is done", done, tile.count, share, thread_blocks);
  if (split_points.rule == SplitRule::kParts)
    check::that(parts <= split_points.value, "number of parts", parts, split_points.value);
}

// kAnywhere: both CTAs of a cluster agree on their halves, and have nothing else.
void check_halves(const SplitPoints& split_points, const std::vector<Tile>& tiles, int64_t share, int thread_blocks) {
  for (int pair = 0; 2 * pair + 1 < thread_blocks; ++pair) {
    for (const Tile& tile : tiles) {
      bool is_half[2];
      for (int rank : {0, 1}) {
        const int index = 2 * pair + rank;
        const BlockSpan segment =
            flash::block_span(split_points, tile.first_block, tile.count, tile.begin, share, index);
        is_half[rank] = !segment.empty() && flash::kv_is_cluster_half(segment, tile.count, share, index);
        const bool same = tile.begin == 2 * pair * share && tile.count == 2 * share;
        const bool is_cut = segment.from > 0 || segment.to < tile.count;
        check::that(is_half[rank] == (same && is_cut && !segment.empty()), "a tile of two stretches", pair, share);
      }
      check::that(is_half[0] == is_half[1], "both halves", pair, tile.begin, share);
    }
  }
}

void check_line(std::mt19937& random) {
  auto below = [&](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
  constexpr int kMany[] = {128, 1 << 30, 0x7ffffffe, 0x7fffffff};
  const SplitPoints all_cuts[] = {{SplitRule::kAnywhere, below(6)},
                                  {SplitRule::kParts, below(3) ? 1 + below(9) : kMany[below(4)]},
                                  {SplitRule::kChunks, 1 + below(9)},
                                  {SplitRule::kWhole, 0}};
  const SplitPoints split_points = all_cuts[below(4)];
  std::vector<Tile> tiles;
  int64_t total = 0;
  for (int i = 1 + below(12); i > 0; --i) {
    tiles.push_back({below(40), 1 + below(1 + below(60)), total});
    total += tiles.back().count;
  }
  const int thread_blocks = 1 + below(40);
  const int64_t share = flash::blocks_per_cta(total, thread_blocks, 1 + below(5));
  check::that(share * thread_blocks >= total, "the shares cover the line", share, thread_blocks, total);
  std::set<int> slots;
  for (const Tile& tile : tiles) check_tile(split_points, tile, share, thread_blocks, slots);
  if (split_points.rule == SplitRule::kAnywhere) check_halves(split_points, tiles, share, thread_blocks);
  // The combine finds a split tile by the first CTA boundary inside it.
  for (const Tile& tile : tiles) {
    int found = 0;
    for (int index = 1; index < thread_blocks; ++index) {
      const int64_t place = index * share;
      const bool inside = place > tile.begin && place < tile.begin + tile.count;
      found += inside && (index - 1) * share <= tile.begin;
    }
    const bool reached = tile.begin / share != (tile.begin + tile.count - 1) / share;
    check::that(found == (reached ? 1 : 0), "one thread block merges a tile", found, tile.count, share);
  }
}

// Linearised work as long as 32 bits allow, and longer: no product or sum overflows (-fsanitize=undefined).
void check_long_lines(std::mt19937& random) {
  auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  for (int i = 0; i < 20000; ++i) {
    const int64_t total = flash::kMostShortPlaces - 1 - below(i % 2 ? 3 : 1 << 29) + (i % 3 == 0 ? 1 << 30 : 0);
    const int thread_blocks = 1 + static_cast<int>(below(1000));
    const int64_t share = flash::blocks_per_cta(total, thread_blocks, 1 + below(64));
    const int64_t most = total < 0x7fffffff ? total : 0x7fffffff;
    const int count = static_cast<int>(1 + below(most));
    const Tile tile{0, count, below(total - count + 1)};
    const SplitPoints split_points{i % 5 ? SplitRule::kAnywhere : SplitRule::kWhole, static_cast<int>(below(1 << 20))};
    // A CTA whose range begins beyond the work never asks for a span.
    const int index = static_cast<int>(below((total - 1) / share + 1));
    check_free_segment(split_points, tile, share, index,
                       flash::block_span(split_points, tile.first_block, tile.count, tile.begin, share, index));
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
  for (int i = 0; i < 20000; ++i) check_line(random);
  check_long_lines(random);
  check_lengths();
  check_rotary_rows();
  return check::report();
}
