// core/block_range.h, core/unmasked.h and core/trip_count.h against brute force over every small problem, and their
// sums near 2^31.
#include <algorithm>
#include <vector>

#include "check.h"
#include "core/block_range.h"
#include "core/trip_count.h"
#include "core/unmasked.h"

namespace {

using flash::BlockRange;
using flash::FastDiv;
using flash::kUnbounded;
using flash::Visibility;
using flash::Window;

bool sees(int64_t row, int64_t key, int64_t seqlen_q, int64_t seqlen_k, Window window) {
  const int64_t position = row + seqlen_k - seqlen_q;
  return key >= 0 && key < seqlen_k && (window.left == kUnbounded || key >= position - window.left) &&
         (window.right == kUnbounded || key <= position + window.right);
}

// The column bounds of rows from `first_row` on, shifted to a row, are that row's visible keys.
void check_column_bounds(const Visibility& visibility, int first_row, int row) {
  const flash::ColBounds bounds = flash::col_bounds(visibility, first_row);
  const int begin = bounds.begin + (row - first_row), end = bounds.end + (row - first_row);
  check::that(std::clamp(begin, 0, visibility.seqlen_k) == visibility.key_begin(row) &&
                  std::clamp(end, 0, visibility.seqlen_k) == visibility.key_end(row),
              "column bounds of a row", first_row, row, visibility.seqlen_q, visibility.seqlen_k,
              visibility.window.left, visibility.window.right);
}

void check_rows(const Visibility& visibility) {
  for (int row = 0; row < visibility.seqlen_q; ++row) {
    const int begin = visibility.key_begin(row), end = visibility.key_end(row);
    check::that(begin >= 0 && begin <= visibility.seqlen_k && end >= 0 && end <= visibility.seqlen_k,
                "visible keys within the sequence", row, begin, end, visibility.seqlen_q, visibility.seqlen_k);
    check_column_bounds(visibility, row / 2, row);
    for (int key = 0; key < visibility.seqlen_k; ++key) {
      const bool expected = sees(row, key, visibility.seqlen_q, visibility.seqlen_k, visibility.window);
      check::that((key >= begin && key < end) == expected, "row visibility", row, key, visibility.seqlen_q,
                  visibility.seqlen_k, visibility.window.left, visibility.window.right);
    }
  }
}

// Keys that no row sees, and fully masked rows, all come before the others.
void check_first_unmasked(const Visibility& visibility) {
  const int first_key = flash::first_unmasked_key(visibility), first_row = flash::first_unmasked_row(visibility);
  const auto pair = [&](int row, int key) {
    return sees(row, key, visibility.seqlen_q, visibility.seqlen_k, visibility.window);
  };
  for (int key = 0; key < visibility.seqlen_k; ++key) {
    bool seen = false;
    for (int row = 0; row < visibility.seqlen_q; ++row) seen |= pair(row, key);
    check::that(visibility.seqlen_q == 0 || (key >= first_key) == seen, "first visible key", key, first_key,
                visibility.seqlen_q, visibility.seqlen_k, visibility.window.left, visibility.window.right);
  }
  for (int row = 0; row < visibility.seqlen_q; ++row) {
    bool sees_one = false;
    for (int key = 0; key < visibility.seqlen_k; ++key) sees_one |= pair(row, key);
    check::that((row >= first_row) == sees_one, "first row that sees a key", row, first_row, visibility.seqlen_q,
                visibility.seqlen_k, visibility.window.left, visibility.window.right);
  }
}

struct BlockFacts {
  bool needed = false;   // some row sees some key of the block
  bool unmasked = true;  // every row sees every key of the block
};

BlockFacts block_facts(const Visibility& visibility, int row_begin, int row_end, int block, int block_n) {
  BlockFacts facts;
  for (int row = row_begin; row < row_end; ++row) {
    for (int key = block * block_n; key < (block + 1) * block_n; ++key) {
      const bool seen = sees(row, key, visibility.seqlen_q, visibility.seqlen_k, visibility.window);
      facts.needed |= seen;
      facts.unmasked &= seen;
    }
  }
  return facts;
}

// The backward's range of m_blocks of an n_block and the forward's range of n_blocks of an m_block hold the same pairs.
void check_directions(const Visibility& visibility, int block_m, int block_n) {
  const int m_blocks = (visibility.seqlen_q + block_m - 1) / block_m;
  for (int n = 0; n * block_n < visibility.seqlen_k; ++n) {
    const flash::RowRange rows = flash::row_range(visibility, n, block_m, block_n);
    check::that(rows.begin >= 0 && rows.end <= m_blocks, "row range within the sequence", n, rows.begin, rows.end);
    for (int m = 0; m < m_blocks; ++m) {
      const int row_end = std::min((m + 1) * block_m, visibility.seqlen_q);
      const BlockRange keys = flash::block_range(visibility, m * block_m, row_end, block_n);
      const bool forwards = keys.count() > 0 && n >= keys.begin && n < keys.end;
      check::that((m >= rows.begin && m < rows.end) == forwards, "both directions agree", m, n, visibility.seqlen_q,
                  visibility.seqlen_k, visibility.window.left, visibility.window.right, block_m, block_n);
    }
  }
}

// The m_blocks that need no mask for a range of keys are exactly those of which every row sees every key.
void check_unmasked_rows(const Visibility& visibility, int block_m, int block_n) {
  for (int n = 0; n * block_n < visibility.seqlen_k; ++n) {
    const flash::RowRange range = flash::unmasked_rows(visibility, n * block_n, (n + 1) * block_n, block_m);
    for (int m = 0; m * block_m < visibility.seqlen_q; ++m) {
      const int row_end = std::min((m + 1) * block_m, visibility.seqlen_q);
      const bool unmasked = block_facts(visibility, m * block_m, row_end, n, block_n).unmasked;
      check::that((m >= range.begin && m < range.end) == unmasked, "m_blocks without a mask", m, n, visibility.seqlen_q,
                  visibility.seqlen_k, visibility.window.left, visibility.window.right, block_m, block_n);
    }
  }
}

void check_m_block(const Visibility& visibility, int row_begin, int row_end, int block_n) {
  const BlockRange range = flash::block_range(visibility, row_begin, row_end, block_n);
  const int blocks = (visibility.seqlen_k + block_n - 1) / block_n;
  std::vector<int> visits(blocks + 1, 0);
  bool in_unmasked = false;
  for (int step = 0; step < std::max(range.count(), 0); ++step) {
    const int block = range.block_at(step);
    check::that(block >= 0 && block < blocks, "visited block exists", block, blocks);
    if (block < 0 || block >= blocks) continue;
    ++visits[block];
    const bool unmasked = block >= range.unmasked_begin && block < range.unmasked_end;
    check::that(unmasked == (step >= range.masked_count()), "masked blocks come before unmasked ones", step, block);
    check::that(unmasked || !in_unmasked, "no masked block after an unmasked one", step, block);
    in_unmasked |= unmasked;
  }
  for (int block = 0; block < blocks; ++block) {
    const BlockFacts facts = block_facts(visibility, row_begin, row_end, block, block_n);
    check::that(visits[block] == (facts.needed ? 1 : 0), "needed blocks visited once, others never", block,
                visits[block], visibility.seqlen_q, visibility.seqlen_k, visibility.window.left,
                visibility.window.right, row_begin, row_end, block_n);
    const bool unmasked = visits[block] && block >= range.unmasked_begin && block < range.unmasked_end;
    check::that(unmasked == facts.unmasked, "unmasked blocks are exactly the wholly visible ones", block,
                visibility.seqlen_q, visibility.seqlen_k, visibility.window.left, visibility.window.right, row_begin,
                row_end, block_n);
  }
}

// 0: unmasked block, 1: masked on the left, 2: masked on the right.
int part_of(const BlockRange& range, int block) {
  return block >= range.unmasked_begin && block < range.unmasked_end ? 0 : block < range.unmasked_begin ? 1 : 2;
}

// The wgmma forward's order: the blocks of block_at(), each once, unmasked before masked ones, ascending in each part.
void check_unmasked_first(const BlockRange& range, int row_begin, int row_end, int block_n) {
  int previous = 0;
  for (int step = 0; step < range.count(); ++step) {
    const int block = range.block_unmasked_first(step);
    check::that(block >= range.begin && block < range.end, "unmasked first: a visited block", step, block, row_begin,
                row_end, block_n);
    const int unmasked = range.unmasked_end - range.unmasked_begin;
    check::that((part_of(range, block) == 0) == (step < unmasked), "unmasked first", step, block, row_begin, row_end,
                block_n);
    if (step > 0) {
      const bool rises = part_of(range, block) == part_of(range, previous)
                             ? block > previous
                             : part_of(range, block) > part_of(range, previous);
      check::that(rises, "unmasked first: ascending, part after part", step, previous, block, row_begin, row_end,
                  block_n);
      const bool follows = step <= unmasked || block == range.next_masked(previous);
      check::that(follows, "the next masked block", step, previous, block, row_begin, row_end, block_n);
    }
    previous = block;
  }
}

// Any block may come first; the others keep their order.
void check_orders(const BlockRange& range, int block_n) {
  for (int first = 0; first < range.count(); ++first) {
    flash::KvBlockOrder order{range};
    order.start_at(range.block_unmasked_first(first));
    check::that(order.first == first, "the step of the first block", order.first, first, block_n);
    check::that(order.block(0) == range.block_unmasked_first(first), "the first block", first, block_n);
    int next = 0;
    for (int step = 1; step < order.count(); ++step, ++next) {
      if (next == first) ++next;
      check::that(order.block(step) == range.block_unmasked_first(next), "the others", first, step, block_n);
      const bool is_unmasked = part_of(range, order.block(step)) == 0;
      check::that(is_unmasked == (step < order.unmasked_steps_end()), "unmasked steps", first, step, block_n);
    }
  }
}

// The producer loads unmasked blocks cyclically, from the multiple of `apart` among them on; masked blocks in order.
void check_load_order(const BlockRange& range, int apart, int block_n) {
  const flash::KvBlockOrder plain{range};
  flash::KvBlockOrder order{range};
  order.align_unmasked(FastDiv(apart));
  const int unmasked = order.unmasked();
  const bool has_multiple = (range.unmasked_end - 1) / apart * apart >= range.unmasked_begin;
  for (int step = 0; step < order.count(); ++step) {
    check::that(plain.block_to_load(step) == plain.block(step), "loads of an order that is not aligned", step, block_n);
    check::that(order.block(step) == plain.block(step), "steps of an aligned order", step, block_n);
    const int block = order.block_to_load(step);
    if (step >= unmasked) {
      check::that(block == order.block(step), "loads of masked blocks", step, block, block_n);
    } else if (step == 0) {
      check::that(part_of(range, block) == 0 && (has_multiple ? block % apart == 0 : block == range.unmasked_begin),
                  "the first load", block, unmasked, apart);
    } else {
      const int before = order.block_to_load(step - 1);
      check::that(block == (before + 1 == range.unmasked_end ? range.unmasked_begin : before + 1), "the next load",
                  step, block, block_n);
    }
  }
}

// Blocks that a warpgroup of an m_block skips: exactly those after the first step that none of its rows sees. A
// warpgroup of a short m_block may have no rows: it skips what the last row does not see.
void check_skipped_blocks(const Visibility& visibility, const BlockRange& range, int row_begin, int row_end,
                          int part_rows, int parts, int block_n) {
  for (int part = 0; range.count() > 0 && part < parts; ++part) {
    const int begin = row_begin + part * part_rows, part_end = std::min(begin + part_rows, row_end);
    const int row = std::min(begin, row_end - 1);
    const int most_left = (row - row_begin + block_n - 1) / block_n;
    const int most_right = (row_end - part_end + block_n - 1) / block_n;
    for (int first = range.begin; first < range.end; ++first) {
      flash::KvBlockOrder order{range};
      order.start_at(first);
      const flash::SkippedBlocks skipped = flash::skipped_blocks(visibility, order, begin, part_end, block_n);
      check::that(skipped.left >= 0 && skipped.left <= most_left, "skipped on the left", skipped.left, row, first);
      check::that(skipped.right >= 0 && skipped.right <= most_right, "skipped on the right", skipped.right, row, first);
      check::that(skipped.begin == order.unmasked_steps_end(), "where masked blocks begin", skipped.begin, row, first);
      for (int step = 1; step < order.count(); ++step) {
        const bool skips =
            (step >= skipped.begin && step < skipped.begin + skipped.left) || step >= order.count() - skipped.right;
        const bool needed = block_facts(visibility, row, part_end, order.block(step), block_n).needed;
        check::that(skips == !needed, "skipped steps", step, order.count(), row, row_begin, row_end, block_n, first);
      }
    }
  }
}

// A warpgroup's trip count: whether its first block needs a mask, and its first masked block. A warpgroup without rows
// has those of the last row, but for the mask.
void check_trip_counts(const Visibility& visibility, const BlockRange& range, int row_begin, int row_end, int part_rows,
                       int parts, int block_n) {
  for (int part = 0; range.count() > 0 && part < parts; ++part) {
    const int begin = row_begin + part * part_rows, part_end = std::min(begin + part_rows, row_end);
    const int row = std::min(begin, row_end - 1);
    for (int first = range.begin; first < range.end; ++first) {
      flash::KvBlockOrder order{range};
      order.start_at(first);
      const flash::WarpgroupTripCount steps = flash::warpgroup_trip_count(visibility, order, begin, part_end, block_n);
      check::that(steps.count == order.count() - steps.skipped.right, "trip count", steps.count, row, first);
      const bool is_masked = steps.first_to_mask != flash::WarpgroupTripCount::kNoBlock;
      const bool is_whole = block_facts(visibility, row, part_end, order.block(0), block_n).unmasked;
      check::that(begin > row || is_masked != is_whole, "mask of the first step", row, part_end, block_n, first,
                  visibility.seqlen_q, visibility.seqlen_k, visibility.window.left, visibility.window.right);
      if (is_masked) check::that(steps.first_to_mask == order.block(0), "first step", steps.first_to_mask, row, first);
      int step = std::min(steps.skipped.begin, steps.count);
      while (step < steps.count && !block_facts(visibility, row, part_end, order.block(step), block_n).needed) ++step;
      if (step < steps.count) {
        check::that(steps.first_masked_block == order.block(step), "first masked block", steps.first_masked_block, step,
                    row, first);
      }
    }
  }
}

// Splits are contiguous and of one length but for the last ones; unmasked and skipped blocks are known in each.
void check_splits(const Visibility& visibility, const BlockRange& range, int row_begin, int row_end, int block_n) {
  const int parts = (row_end - row_begin) / 2 + 2;
  for (int splits : {1, 2, 3, 7}) {
    int next = range.begin, longest = 0;
    for (int split = 0; split < splits; ++split) {
      const BlockRange own = flash::split_range(range, split, splits);
      check::that(own.begin == next && own.count() >= 0, "splits are contiguous", own.begin, next, split, splits);
      for (int block = own.begin; block < own.end; ++block) {
        const bool unmasked = block >= own.unmasked_begin && block < own.unmasked_end;
        check::that(unmasked == (part_of(range, block) == 0), "unmasked blocks of a split", block, split, splits);
        check::that(part_of(own, block) == part_of(range, block) || own.unmasked_begin == own.unmasked_end,
                    "masked blocks of a split", block, split, splits);
      }
      check_unmasked_first(own, row_begin, row_end, block_n);
      check_orders(own, block_n);
      for (int apart : {1, 2, 3}) check_load_order(own, apart, block_n);
      if (block_n % 2 == 0) {
        check_skipped_blocks(visibility, own, row_begin, row_end, 2, parts, block_n);
        check_trip_counts(visibility, own, row_begin, row_end, 2, parts, block_n);
      }
      next = own.end;
      longest = std::max(longest, own.count());
    }
    check::that(next == range.end, "splits have all blocks", next, range.end, splits);
    check::that(longest == (range.count() + splits - 1) / splits, "the longest split", longest, range.count(), splits);
  }
}

void check_all_small_problems() {
  const int windows[] = {kUnbounded, kUnbounded - 1, 0, 1, 2, 3, 5, 8, 20};
  for (int seqlen_q = 1; seqlen_q <= 9; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k <= 11; ++seqlen_k) {
      for (int left : windows) {
        for (int right : windows) {
          const Visibility visibility{seqlen_q, seqlen_k, Window{left, right}};
          check_rows(visibility);
          check_first_unmasked(visibility);
          for (int block_m : {1, 2, 3, 4, 6, 16}) {
            for (int block_n : {1, 2, 3, 4, 16}) {
              for (int row = 0; row < seqlen_q; row += block_m) {
                const int row_end = std::min(row + block_m, seqlen_q);
                check_m_block(visibility, row, row_end, block_n);
                const BlockRange range = flash::block_range(visibility, row, row_end, block_n);
                check_unmasked_first(range, row, row_end, block_n);
                check_orders(range, block_n);
                const int apart = flash::max_unmasked_blocks(visibility.window, block_m, block_n);
                const bool is_short = row_end < row + block_m, is_open = left == kUnbounded || right == kUnbounded;
                check::that(is_short || is_open || range.unmasked_end - range.unmasked_begin <= apart,
                            "most unmasked blocks", range.unmasked_begin, range.unmasked_end, apart, left, right);
                check_load_order(range, apart, block_n);
                for (int parts : {2, 3}) {
                  if (block_m % parts != 0) continue;
                  check_skipped_blocks(visibility, range, row, row_end, block_m / parts, parts, block_n);
                  check_trip_counts(visibility, range, row, row_end, block_m / parts, parts, block_n);
                }
                check_splits(visibility, range, row, row_end, block_n);
              }
              check_directions(visibility, block_m, block_n);
              check_unmasked_rows(visibility, block_m, block_n);
            }
          }
        }
      }
    }
  }
}

// Under a window consecutive m_blocks load the same n_block first, as long as it is unmasked for all of them, also
// where their numbers of unmasked blocks differ.
void check_first_loads() {
  constexpr int kRows = 16384;
  const int tiles[][2] = {{192, 64}, {192, 128}, {128, 128}, {128, 96}, {128, 64}};
  for (const auto& tile : tiles) {
    const int block_m = tile[0], block_n = tile[1];
    for (int left : {512, 1000, 1023, 2048, 4096}) {
      const Visibility visibility{kRows, kRows, Window{left, 0}};
      const int apart = flash::max_unmasked_blocks(visibility.window, block_m, block_n);
      int previous = -1, changes = 0, m_blocks = 0;
      for (int row = left; row + block_m <= kRows; row += block_m, ++m_blocks) {
        flash::KvBlockOrder order{flash::block_range(visibility, row, row + block_m, block_n)};
        order.align_unmasked(FastDiv(apart));
        const int first = order.block_to_load(0);
        // One unmasked block fewer may leave no multiple among them.
        changes += first != previous && (first % apart == 0 || order.unmasked() == apart);
        previous = first;
      }
      const int passed = m_blocks * block_m / block_n;  // n_blocks by which the unmasked ones advance
      check::that(changes <= passed / apart + 2, "first loads", changes, m_blocks, apart, left, block_m, block_n);
    }
  }
}

// Built with -fsanitize=undefined: a 32-bit overflow ends the program.
void check_large_problems() {
  const int longest = (1 << 30) - 1;  // the maximum of checks.h
  const int lengths[] = {1, 128, 1 << 20, longest - 128, longest};
  const int windows[] = {kUnbounded, kUnbounded - 1, 2000000000, 1 << 30, 1000, 0};
  for (int seqlen_q : lengths) {
    for (int seqlen_k : lengths) {
      for (int left : windows) {
        for (int right : windows) {
          const Visibility visibility{seqlen_q, seqlen_k, Window{left, right}};
          for (int row : {0, seqlen_q / 2, seqlen_q - 1}) {
            const int64_t position = int64_t{row} + seqlen_k - seqlen_q, limit = seqlen_k;
            const int64_t begin = left == kUnbounded ? 0 : std::clamp<int64_t>(position - left, 0, limit);
            const int64_t end = right == kUnbounded ? limit : std::clamp<int64_t>(position + right + 1, 0, limit);
            check::that(visibility.key_begin(row) == begin, "large key_begin", row, seqlen_q, seqlen_k, left, right);
            check::that(visibility.key_end(row) == end, "large key_end", row, seqlen_q, seqlen_k, left, right);
            for (int first_row : {0, row / 2, row}) check_column_bounds(visibility, first_row, row);
            const int row_end = static_cast<int>(std::min<int64_t>(int64_t{row} + 128, seqlen_q));
            const BlockRange range = flash::block_range(visibility, row, row_end, 128);
            check::that(range.count() >= 0 && range.begin >= 0 && range.end <= (limit + 127) / 128, "large range", row,
                        seqlen_q, seqlen_k, left, right);
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  check_all_small_problems();
  check_first_loads();
  check_large_problems();
  return check::report();
}
