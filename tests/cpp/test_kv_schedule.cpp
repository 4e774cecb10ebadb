// Sharing out of the work on a KV cache: every block of every tile is done once, cuts are where they may be, partial
// results have slots of their own, and the host's bounds hold.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "plan/kvcache.h"

namespace {

using flash::CutRule;
using flash::KvCuts;
using flash::KvSegment;

struct Tile {
  int first_block;
  int count;
  int64_t begin;
};

bool may_cut(const KvCuts& cuts, const Tile& tile, int offset) {
  switch (cuts.rule) {
    case CutRule::kWhole: return false;
    case CutRule::kAnywhere: return tile.count > cuts.value;
    case CutRule::kParts: return offset % ((int64_t{tile.count} + cuts.value - 1) / cuts.value) == 0;
    default: return (tile.first_block + offset) % cuts.value == 0;
  }
}

// The kernel's way to find a segment where tiles are cut anywhere or nowhere, in both widths.
void check_free_segment(const KvCuts& cuts, const Tile& tile, int64_t share, int index, const KvSegment& expected) {
  if (cuts.rule != CutRule::kAnywhere && cuts.rule != CutRule::kWhole) return;
  const KvSegment wide = flash::kv_free_segment(cuts, tile.count, tile.begin, share, index);
  check::that(wide.from == expected.from && wide.to == expected.to, "free cuts", wide.from, expected.from, tile.count);
  if (tile.begin + tile.count >= flash::kMostShortPlaces) return;
  const KvSegment narrow = flash::kv_free_segment(cuts, tile.count, static_cast<int>(tile.begin),
                                                  static_cast<int>(share), index);
  check::that(narrow.from == expected.from && narrow.to == expected.to, "in 32 bits", narrow.from, expected.from,
              tile.count, tile.begin, share, index);
}

void check_tile(const KvCuts& cuts, const Tile& tile, int64_t share, int thread_blocks, std::set<int>& slots) {
  int done = 0, parts = 0;
  const int first = static_cast<int>(tile.begin / share);
  const int last = static_cast<int>(std::min<int64_t>((tile.begin + tile.count - 1) / share, thread_blocks - 1));
  for (int index = 0; index < thread_blocks; ++index) {
    const KvSegment segment = flash::kv_segment(cuts, tile.first_block, tile.count, tile.begin, share, index);
    check_free_segment(cuts, tile, share, index, segment);
    if (segment.empty()) continue;
    ++parts;
    check::that(segment.from == done, "segments follow each other", segment.from, done, tile.count, share);
    check::that(segment.from == 0 || may_cut(cuts, tile, segment.from), "permitted cut", segment.from, tile.count);
    check::that(index >= first && index <= last, "the merge looks at these thread blocks", index, first, last);
    check::that(segment.from > 0 || index == first, "the first part is done by the owner of the first block", index);
    done = segment.to;
    if (segment.from == 0 && segment.to == tile.count) continue;
    check::that(slots.insert(flash::kv_slot(index, segment)).second, "a slot for each partial result", index);
  }
  check::that(done == tile.count, "every block is done", done, tile.count, share, thread_blocks);
  if (cuts.rule == CutRule::kParts) check::that(parts <= cuts.value, "number of parts", parts, cuts.value);
}

// Free cuts: both stretches of a pair know of a half, and have nothing else.
void check_halves(const KvCuts& cuts, const std::vector<Tile>& tiles, int64_t share, int thread_blocks) {
  for (int pair = 0; 2 * pair + 1 < thread_blocks; ++pair) {
    for (const Tile& tile : tiles) {
      bool is_half[2];
      for (int rank : {0, 1}) {
        const int index = 2 * pair + rank;
        const KvSegment segment = flash::kv_segment(cuts, tile.first_block, tile.count, tile.begin, share, index);
        is_half[rank] = !segment.empty() && flash::kv_is_half(segment, tile.count, share, index);
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
  const KvCuts all_cuts[] = {{CutRule::kAnywhere, below(6)},
                             {CutRule::kParts, below(3) ? 1 + below(9) : kMany[below(4)]},
                             {CutRule::kChunks, 1 + below(9)},
                             {CutRule::kWhole, 0}};
  const KvCuts cuts = all_cuts[below(4)];
  std::vector<Tile> tiles;
  int64_t total = 0;
  for (int i = 1 + below(12); i > 0; --i) {
    tiles.push_back({below(40), 1 + below(1 + below(60)), total});
    total += tiles.back().count;
  }
  const int thread_blocks = 1 + below(40);
  const int64_t share = flash::kv_share(total, thread_blocks, 1 + below(5));
  check::that(share * thread_blocks >= total, "the shares cover the line", share, thread_blocks, total);
  std::set<int> slots;
  for (const Tile& tile : tiles) check_tile(cuts, tile, share, thread_blocks, slots);
  if (cuts.rule == CutRule::kAnywhere) check_halves(cuts, tiles, share, thread_blocks);
  // A merge is found by the first stretch that begins inside of the tile.
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

// Lines as long as 32 bits allow, and beyond: no product or sum passes the type (-fsanitize=undefined).
void check_long_lines(std::mt19937& random) {
  auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  for (int i = 0; i < 20000; ++i) {
    const int64_t total = flash::kMostShortPlaces - 1 - below(i % 2 ? 3 : 1 << 29) + (i % 3 == 0 ? 1 << 30 : 0);
    const int thread_blocks = 1 + static_cast<int>(below(1000));
    const int64_t share = flash::kv_share(total, thread_blocks, 1 + below(64));
    const int64_t most = total < 0x7fffffff ? total : 0x7fffffff;
    const int count = static_cast<int>(1 + below(most));
    const Tile tile{0, count, below(total - count + 1)};
    const KvCuts cuts{i % 5 ? CutRule::kAnywhere : CutRule::kWhole, static_cast<int>(below(1 << 20))};
    // A stretch that begins beyond the line is never asked for its segments.
    const int index = static_cast<int>(below((total - 1) / share + 1));
    check_free_segment(cuts, tile, share, index,
                       flash::kv_segment(cuts, tile.first_block, tile.count, tile.begin, share, index));
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

constexpr flash::plan::KvDevice kDevices[] = {
    {132, 228 * 1024, 227 * 1024}, {108, 164 * 1024, 163 * 1024}, {84, 100 * 1024, 99 * 1024}};

void check_plans() {
  using namespace flash::plan;
  for (const KvDevice& device : kDevices) {
    for (int head_dim : {8, 64, 128, 192, 256}) {
      for (int size = 0; size < kKvSizes; ++size) {
        const KvTile tile = kv_tile(head_dim, size);
        const KvResidency residency = kv_residency(tile, device.smem_per_sm, device.smem_per_block);
        const int bytes = kv_smem_bytes(tile, residency.stages);
        check::that(residency.stages >= 1, "a stage fits", head_dim, size, device.smem_per_sm);
        check::that(bytes <= device.smem_per_block, "shared memory of a block", bytes);
        check::that(residency.blocks_per_sm * (bytes + kReservedSmemBytes) <= device.smem_per_sm, "of all blocks",
                    bytes, residency.blocks_per_sm);
        check::that(tile.step == kv_tile(head_dim, 0).step, "all sizes take the same steps", head_dim, size);
        check::that(tile.blocks_per_sm * kv_threads(tile) * 255 <= 65536 * 2, "register file", head_dim, size);
        check::that(kRunKeys % kv_block_n(tile) == 0, "runs are whole blocks", head_dim);
      }
      for (int64_t rows : {1, 16, 17, 32, 33, 1000}) {
        const KvTile tile = kv_tile(head_dim, kv_tile_size(head_dim, rows));
        const KvTile largest = kv_tile(head_dim, kKvSizes - 1);
        check::that(tile.rows() >= rows || tile.rows() == largest.rows(), "the rows fit or the tile is large", rows);
        check::that(kv_size_exists(head_dim, kv_tile_size(head_dim, rows)), "the size has a kernel", head_dim, rows);
      }
    }
  }
}

// Any number of splits: more than there are key blocks are as many as there are, and the plan is the same.
void check_many_splits() {
  using namespace flash::plan;
  for (const KvDevice& device : kDevices) {
    for (int capacity : {1, 64, 4096, 0x3fffffff}) {
      const KvPlan expected = kv_plan({3, 1, 8, 2, 64, capacity, 0x3fffffff, false}, device);
      for (int num_splits : {1 << 30, 0x7ffffffe, 0x7fffffff}) {
        const KvPlan plan = kv_plan({3, 1, 8, 2, 64, capacity, num_splits, false}, device);
        check::that(plan.cuts.rule == CutRule::kParts && plan.cuts.value > 0, "parts", plan.cuts.value);
        check::that(plan.thread_blocks == expected.thread_blocks && plan.slots == expected.slots, "plan", capacity);
        for (int count : {1, 2, 3, 1000, 0x1000000}) {
          for (int offset : {0, 1, 2, count - 1, count}) {
            const int cut = plan.cuts.next(0, count, offset);
            check::that(cut == std::min(offset, count), "a part for each block", cut, count, offset);
          }
        }
      }
    }
  }
}

// Sizes as large as their types: refused, or counted without overflow.
void check_large_plans() {
  using namespace flash::plan;
  constexpr int kMost = 0x7fffffff, kRows = 0x3fffffff;
  for (int i = 0; i < 2 * 3 * 2 * 4 * 4 * 3; ++i) {
    int rest = i;
    auto one_of = [&rest](std::initializer_list<int> values) {
      const int count = static_cast<int>(values.size()), chosen = rest % count;
      rest /= count;
      return values.begin()[chosen];
    };
    const bool batch_invariant = one_of({0, 1});
    const int num_splits = one_of({0, 1, kMost}), capacity = one_of({0, kRows}), heads = one_of({0, 1, 1 << 20, kMost});
    const int batch = one_of({0, 1, 1 << 11, kMost}), seqlen_q = one_of({0, 1, kRows});
    const KvPlan plan =
        kv_plan({batch, seqlen_q, heads, heads, 256, capacity, num_splits, batch_invariant}, kDevices[0]);
    const double tiles = static_cast<double>(plan.items) * std::max(heads, 1);
    check::that(plan.is_too_large == (tiles > kMaxKvTiles), "too large", plan.items, heads);
    if (plan.is_too_large) continue;
    check::that(plan.thread_blocks >= 0 && plan.thread_blocks <= 1000, "thread blocks", plan.thread_blocks);
    const int64_t words = kv_workspace_words(plan, 256);
    check::that(0 <= words && words <= kMaxRunWorkspaceBytes / 4 + 1000 * 64 * 258, "workspace", words);
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

// The number of thread blocks follows the allocation where idle ones would be launched; the shares must not.
void check_allocation_does_not_matter() {
  using namespace flash::plan;
  for (int num_splits : {0, 1, 7}) {
    for (int keys : {1, 300, 511, 5000}) {
      int64_t expected = -1;
      for (int capacity : {keys, keys + 1, 4 * keys, 300000}) {
        const KvPlan plan = kv_plan({3, 1, 8, 2, 128, capacity, num_splits, false}, kDevices[0]);
        const int64_t total = 6 * ceil_div(keys, kv_block_n(kv_tile(128, plan.tile_size)));
        const int64_t share = flash::kv_share(total, plan.thread_blocks, plan.least_share);
        check::that(expected < 0 || share == expected, "share", share, expected, capacity);
        expected = share;
      }
    }
  }
}

// Equal lengths: no tile is cut where some nine tenths of the thread blocks can have whole tiles each.
void check_whole_tiles() {
  using namespace flash::plan;
  struct Expected {
    int batch, heads_k, thread_blocks;
    bool is_cut;
  };
  for (const Expected& expected :
       {Expected{16, 8, 264, true}, Expected{16, 16, 256, false}, Expected{64, 8, 256, false},
        Expected{128, 8, 256, false}, Expected{1, 8, 264, true}, Expected{10, 8, 264, true},
        Expected{10, 15, 264, true}, Expected{40, 10, 264, true}}) {
    for (int keys : {2048, 4096, 4100, 8192}) {
      const KvPlan plan = kv_plan({expected.batch, 1, 32, expected.heads_k, 128, 1 << 20, 0, false}, kDevices[0]);
      const int count = static_cast<int>(ceil_div(keys, kv_block_n(kv_tile(128, plan.tile_size))));
      const int64_t tiles = expected.batch * expected.heads_k;
      check::that(plan.thread_blocks == expected.thread_blocks, "thread blocks", plan.thread_blocks, tiles);
      const int64_t share = flash::kv_share(tiles * count, plan.thread_blocks, plan.least_share);
      check::that((share % count != 0) == expected.is_cut, "equal lengths", share, count, tiles);
    }
  }
}

// Equal lengths: thread blocks are launched in pairs only where stretches are halves of tiles up to some length.
void check_pairs() {
  using namespace flash::plan;
  struct Expected {
    int batch, heads_k;
    bool in_pairs;
    int most_keys;  // of which a tile is cut into halves
  };
  for (const Expected& expected :
       {Expected{16, 8, true, 4096}, Expected{132, 1, true, 1 << 20}, Expected{126, 1, true, 1280},
        Expected{15, 8, false, 0}, Expected{1, 8, false, 0}, Expected{17, 8, false, 0}, Expected{64, 8, false, 0}}) {
    const KvPlan plan = kv_plan({expected.batch, 1, 32, expected.heads_k, 128, 1 << 20, 0, false}, kDevices[0]);
    check::that(plan.in_pairs == expected.in_pairs, "in pairs", expected.batch, expected.heads_k);
    if (!plan.in_pairs) continue;
    const int block_n = kv_block_n(kv_tile(128, plan.tile_size));
    for (int keys = 1024; keys <= expected.most_keys; keys *= 2) {
      const int64_t count = ceil_div(keys, block_n), tiles = expected.batch * expected.heads_k;
      check::that(2 * flash::kv_share(tiles * count, plan.thread_blocks, plan.least_share) == count, "halves", keys);
    }
  }
  check::that(!kv_plan({16, 1, 32, 8, 128, 4096, 3, false}, kDevices[0]).in_pairs, "given splits");
  check::that(!kv_plan({16, 1, 32, 8, 128, 4096, 0, true}, kDevices[0]).in_pairs, "batch invariant");
}

}  // namespace

int main() {
  std::mt19937 random(7);
  for (int i = 0; i < 20000; ++i) check_line(random);
  check_long_lines(random);
  check_lengths();
  check_plans();
  check_many_splits();
  check_large_plans();
  check_rotary_rows();
  check_allocation_does_not_matter();
  check_whole_tiles();
  check_pairs();
  return check::report();
}
