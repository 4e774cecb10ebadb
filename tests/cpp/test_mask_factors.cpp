// core/mask_factors.h and core/block_list.h against brute force: what a query sees, classes of blocks, words of bits.
#include <algorithm>
#include <vector>

#include "check.h"
#include "core/block_class.h"
#include "core/block_list.h"
#include "core/mask_factors.h"
#include "random_masks.h"

namespace {

using flash::BlockClass;
using flash::BlockEntry;
using flash::BlockList;
using flash::IntervalBounds;
using flash::Intervals;
using flash::kMaskStrip;
using flash::kUnbounded;
using flash::ListedTile;
using flash::MaskFactors;
using flash::MaskMatrices;
using flash::Rectangle;
using flash::Span;
using flash::TileIntervals;
using flash::TilePart;
using flash::Visibility;
using flash::Window;
using random_masks::draw;
using random_masks::Problem;

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
int check_classes(const Problem& problem, const Visibility& window, bool of_keys) {
  const ListedTile tile{of_keys,         0, problem.seqlen_q + problem.seqlen_k, kMaskStrip, problem.seqlen_q,
                        problem.seqlen_k};
  int settled = 0;
  for (int strip = 0; strip < tile.strips(); ++strip) {
    const Span own = tile.strip(strip);
    const TilePart part(problem.factors, window, of_keys, own,
                        bounds_of(problem.factors, !of_keys, own.begin, own.end));
    for (int column = 0; column < tile.columns(); ++column) {
      const Span others = tile.column(column);
      const Rectangle at = tile.rectangle(own, others);
      int seen = 0;
      for (int i = at.rows.begin; i < at.rows.end; ++i) {
        for (int j = at.keys.begin; j < at.keys.end; ++j) {
          seen += problem.sees(i, j) && j >= window.key_begin(i) && j < window.key_end(i);
        }
      }
      const BlockClass found = part.class_by_bounds(problem.factors, of_keys, others,
                                                    bounds_of(problem.factors, of_keys, others.begin, others.end));
      const int all = own.size() * others.size();
      check::that(found != BlockClass::kHidden || seen == 0, "a hidden block", of_keys, strip, column, seen);
      check::that(found != BlockClass::kWhole || seen == all, "a whole block", of_keys, strip, column, seen, all);
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
    settled += check_classes(problem, window, i % 2);
    window.window = {draw(0, 1) ? kUnbounded : draw(0, 200), draw(0, 50)};
    settled += check_classes(problem, window, i % 2);
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

// What rows see of the keys of a tile, as the backward passes it.
void check_tile_intervals() {
  constexpr int kWords = TileIntervals::kMostKeys / 32;
  for (int i = 0; i < 400; ++i) {
    const Problem problem(draw(1, 200), draw(1, 400), 1);
    Visibility window{problem.seqlen_q, problem.seqlen_k, {}};
    if (i % 2) window.window = {draw(0, 1) ? kUnbounded : draw(0, 200), draw(0, 50)};
    for (int row = 0; row < problem.seqlen_q; ++row) {
      const flash::ColBounds bounds = window.bounds(row / 64 * 64);
      const int begin = bounds.key_begin(row % 64), end = std::min(bounds.key_end(row % 64), problem.seqlen_k);
      for (int tile = 0; tile < problem.seqlen_k; tile += TileIntervals::kMostKeys) {
        const auto seen = TileIntervals::of(problem.factors.keys_of(row), begin, end, tile);
        for (int word = 0; word < kWords; ++word) {
          uint32_t expected = 0u;
          for (int bit = 0; bit < 32; ++bit) {
            const int key = tile + 32 * word + bit;
            const bool sees = key >= window.key_begin(row) && key < window.key_end(row) && problem.sees(row, key);
            expected |= sees ? 1u << bit : 0u;
          }
          check::that(seen.word(32 * word) == expected, "keys of a tile", row, tile + 32 * word, problem.seqlen_k);
        }
      }
    }
  }
}

// Mask heads and batch entries of factors that differ in them, as tensors of running numbers.
void check_matrices() {
  constexpr int kBatch = 3, kHeads = 12, kRows = 5, kKeys = 7;
  const auto matrices = [](int heads, bool per_batch) {
    MaskMatrices result;
    result.heads = heads;
    result.per_batch = per_batch;
    result.group = flash::FastDiv(kHeads / heads);
    return result;
  };
  std::vector<int> numbers(kBatch * kHeads * kRows * kKeys * 4);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<int>(i);
  for (const int heads : {1, 2, 3, 4, 6, 12}) {
    for (const bool per_batch : {false, true}) {
      const MaskMatrices own = matrices(heads, per_batch);
      MaskFactors factors;
      factors.query_ranges = factors.key_hidden = numbers.data();
      factors.query_intervals = 2;
      factors.key_intervals = 1;
      factors.of_ranges = own;
      factors.of_hidden = matrices(4, true);
      for (int batch = 0; batch < kBatch; ++batch) {
        for (int head = 0; head < kHeads; ++head) {
          const int matrix = own.index(batch, head), expected = (per_batch ? batch * heads : 0) + head * heads / kHeads;
          check::that(matrix == expected && matrix < own.count(kBatch), "matrix", heads, per_batch, batch, head);
          check::that(own.batch_of(matrix) == (per_batch ? batch : 0), "its batch entry", heads, batch, head);
          check::that(own.index(own.batch_of(matrix), own.first_head_of(matrix)) == matrix, "its head", heads, head);
          const MaskFactors of = factors.of(batch, head, kRows, kKeys, 1, 2);
          check::that(*of.query_ranges == (expected * kRows + 1) * 4, "ranges of a matrix", heads, batch, head);
          check::that(*of.key_hidden == ((batch * 4 + head / 3) * kKeys + 2) * 2, "hidden of a matrix", batch, head);
        }
      }
    }
  }
}

void check_entries() {
  BlockEntry entry = BlockEntry::of_block((1 << BlockEntry::kIndexBits) - 1);
  for (int strip = 0; strip < flash::kMaxTileStrips; ++strip) entry.set(strip, static_cast<BlockClass>(strip % 3));
  check::that(entry.block() == (1 << BlockEntry::kIndexBits) - 1, "block of an entry", entry.block());
  check::that(!entry.has_whole_strips(3), "strips of an entry");
  entry = BlockEntry::of_block(1);
  for (int strip = 0; strip < 2; ++strip) entry.set(strip, BlockClass::kWhole);
  check::that(entry.has_whole_strips(2) && !entry.has_whole_strips(3), "whole strips of an entry");
  entry = BlockEntry::of_block((1 << BlockEntry::kIndexBits) - 1);
  for (int strip = 0; strip < flash::kMaxTileStrips; ++strip) entry.set(strip, static_cast<BlockClass>(strip % 3));
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
  check_tile_intervals();
  check_matrices();
  check_entries();
  check_random_problems();
  return check::report();
}
