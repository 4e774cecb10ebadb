// Checks of a mask type (core/visibility.h) against brute force: its accessors, and core/block_range.h,
// core/visible_range.h and core/trip_count.h over it. `sees(mask, row, key)`, found by argument-dependent lookup, is
// what the mask means.
#pragma once

#include <algorithm>
#include <vector>

#include "check.h"
#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "core/trip_count.h"
#include "core/visible_range.h"

namespace mask_checks {

using flash::BlockRange;
using flash::FastDiv;

// The column bounds of rows from `first_row` on, shifted to a row, are that row's visible keys.
template <class Mask>
void check_column_bounds(const Mask& mask, int first_row, int row) {
  const typename Mask::Bounds bounds = mask.bounds(first_row);
  const int begin = bounds.key_begin(row - first_row), end = bounds.key_end(row - first_row);
  check::that(std::clamp(begin, 0, mask.seqlen_k) == mask.key_begin(row) &&
                  std::clamp(end, 0, mask.seqlen_k) == mask.key_end(row),
              "column bounds of a row", first_row, row, mask.seqlen_q, mask.seqlen_k, case_of(mask));
}

template <class Mask>
void check_rows(const Mask& mask) {
  for (int row = 0; row < mask.seqlen_q; ++row) {
    const int begin = mask.key_begin(row), end = mask.key_end(row);
    check::that(begin >= 0 && begin <= mask.seqlen_k && end >= 0 && end <= mask.seqlen_k,
                "visible keys within the sequence", row, begin, end, mask.seqlen_q, mask.seqlen_k);
    check_column_bounds(mask, row / 2, row);
    for (int key = 0; key < mask.seqlen_k; ++key) {
      const bool expected = sees(mask, row, key);
      check::that((key >= begin && key < end) == expected, "row visibility", row, key, mask.seqlen_q, mask.seqlen_k,
                  case_of(mask));
    }
  }
}

// The rows that see a key are the other side of the keys that a row sees.
template <class Mask>
void check_keys(const Mask& mask) {
  for (int key = 0; key < mask.seqlen_k; ++key) {
    const int begin = mask.row_begin(key), end = mask.row_end(key);
    check::that(begin >= 0 && begin <= mask.seqlen_q && end >= 0 && end <= mask.seqlen_q, "rows within the sequence",
                key, begin, end, mask.seqlen_q, mask.seqlen_k);
    for (int row = 0; row < mask.seqlen_q; ++row) {
      check::that((row >= begin && row < end) == sees(mask, row, key), "key visibility", row, key, begin, end,
                  mask.seqlen_q, mask.seqlen_k, case_of(mask));
    }
    check::that(mask.may_mask_left() || end == mask.seqlen_q, "rows that see a key and what follows", key, end);
    check::that(mask.may_mask_right() || begin == 0, "rows that see a key and what is before", key, begin);
  }
}

// Keys that no row sees, and fully masked rows, all come before the others.
template <class Mask>
void check_first_unmasked(const Mask& mask) {
  const int first_key = flash::first_visible_key(mask), first_row = flash::first_visible_row(mask);
  const auto pair = [&](int row, int key) { return sees(mask, row, key); };
  for (int key = 0; key < mask.seqlen_k; ++key) {
    bool seen = false;
    for (int row = 0; row < mask.seqlen_q; ++row) seen |= pair(row, key);
    check::that(mask.seqlen_q == 0 || (key >= first_key) == seen, "first visible key", key, first_key, mask.seqlen_q,
                mask.seqlen_k, case_of(mask));
  }
  for (int row = 0; row < mask.seqlen_q; ++row) {
    bool sees_one = false;
    for (int key = 0; key < mask.seqlen_k; ++key) sees_one |= pair(row, key);
    check::that((row >= first_row) == sees_one, "first row that sees a key", row, first_row, mask.seqlen_q,
                mask.seqlen_k, case_of(mask));
  }
}

struct BlockFacts {
  bool needed = false;   // some row sees some key of the block
  bool unmasked = true;  // every row sees every key of the block
};

template <class Mask>
BlockFacts block_facts(const Mask& mask, int row_begin, int row_end, int block, int block_n) {
  BlockFacts facts;
  for (int row = row_begin; row < row_end; ++row) {
    for (int key = block * block_n; key < (block + 1) * block_n; ++key) {
      const bool seen = sees(mask, row, key);
      facts.needed |= seen;
      facts.unmasked &= seen;
    }
  }
  return facts;
}

// The backward's range of m_blocks of an n_block and the forward's range of n_blocks of an m_block hold the same pairs.
template <class Mask>
void check_directions(const Mask& mask, int block_m, int block_n) {
  const int m_blocks = (mask.seqlen_q + block_m - 1) / block_m;
  for (int n = 0; n * block_n < mask.seqlen_k; ++n) {
    const flash::RowRange rows = flash::row_range(mask, n, block_m, block_n);
    const flash::RowRange generic = flash::row_range<Mask>(mask, n, block_m, block_n);  // not an overload of the mask's
    check::that(rows.begin >= 0 && rows.end <= m_blocks, "row range within the sequence", n, rows.begin, rows.end);
    check::that(rows.begin == generic.begin && rows.end == generic.end, "row range of the accessors", n, rows.begin,
                rows.end, generic.begin, generic.end, mask.seqlen_q, mask.seqlen_k, case_of(mask), block_m, block_n);
    const flash::RowRange pair = flash::row_range(mask, n / 2, block_m, 2 * block_n);
    check::that(rows.end <= rows.begin || (pair.begin <= rows.begin && rows.end <= pair.end),
                "rows of two n_blocks contain those of each", n, rows.begin, rows.end, pair.begin, pair.end);
    for (int m = 0; m < m_blocks; ++m) {
      const int row_end = std::min((m + 1) * block_m, mask.seqlen_q);
      const BlockRange keys = flash::block_range(mask, m * block_m, row_end, block_n);
      const bool forwards = keys.count() > 0 && n >= keys.begin && n < keys.end;
      check::that(!forwards || flash::dq_semaphore_value(mask, m, n, block_m, block_n) == n - keys.begin,
                  "n_blocks that reduce into dQ before", m, n, keys.begin, block_m, block_n);
      check::that((m >= rows.begin && m < rows.end) == forwards, "both directions agree", m, n, mask.seqlen_q,
                  mask.seqlen_k, case_of(mask), block_m, block_n);
    }
  }
}

// The m_blocks that need no mask for a range of keys are exactly those of which every row sees every key.
template <class Mask>
void check_unmasked_rows(const Mask& mask, int block_m, int block_n) {
  for (int n = 0; n * block_n < mask.seqlen_k; ++n) {
    const flash::RowRange range = flash::unmasked_rows(mask, n * block_n, (n + 1) * block_n, block_m);
    const flash::RowRange generic = flash::unmasked_rows<Mask>(mask, n * block_n, (n + 1) * block_n, block_m);
    for (int m = 0; m * block_m < mask.seqlen_q; ++m) {
      const int row_end = std::min((m + 1) * block_m, mask.seqlen_q);
      const bool unmasked = block_facts(mask, m * block_m, row_end, n, block_n).unmasked;
      for (const flash::RowRange& rows : {range, generic}) {
        check::that((m >= rows.begin && m < rows.end) == unmasked, "m_blocks without a mask", m, n, mask.seqlen_q,
                    mask.seqlen_k, case_of(mask), block_m, block_n);
      }
    }
  }
}

template <class Mask>
void check_m_block(const Mask& mask, int row_begin, int row_end, int block_n) {
  const BlockRange range = flash::block_range(mask, row_begin, row_end, block_n);
  const int blocks = (mask.seqlen_k + block_n - 1) / block_n;
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
    const BlockFacts facts = block_facts(mask, row_begin, row_end, block, block_n);
    check::that(visits[block] == (facts.needed ? 1 : 0), "needed blocks visited once, others never", block,
                visits[block], mask.seqlen_q, mask.seqlen_k, case_of(mask), row_begin, row_end, block_n);
    const bool unmasked = visits[block] && block >= range.unmasked_begin && block < range.unmasked_end;
    check::that(unmasked == facts.unmasked, "unmasked blocks are exactly the wholly visible ones", block, mask.seqlen_q,
                mask.seqlen_k, case_of(mask), row_begin, row_end, block_n);
  }
}

// 0: unmasked block, 1: masked on the left, 2: masked on the right.
inline int part_of(const BlockRange& range, int block) {
  return block >= range.unmasked_begin && block < range.unmasked_end ? 0 : block < range.unmasked_begin ? 1 : 2;
}

// The wgmma forward's order: the blocks of block_at(), each once, unmasked before masked ones, ascending in each part.
inline void check_unmasked_first(const BlockRange& range, int row_begin, int row_end, int block_n) {
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
inline void check_orders(const BlockRange& range, int block_n) {
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
inline void check_load_order(const BlockRange& range, int apart, int block_n) {
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

// Blocks that a warpgroup of an m_block skips: exactly those after the first step that no row of it sees. A
// warpgroup of a short m_block may have no rows: it skips what the last row does not see.
template <class Mask>
void check_skipped_blocks(const Mask& mask, const BlockRange& range, int row_begin, int row_end, int part_rows,
                          int parts, int block_n) {
  for (int part = 0; range.count() > 0 && part < parts; ++part) {
    const int begin = row_begin + part * part_rows, part_end = std::min(begin + part_rows, row_end);
    const int row = std::min(begin, row_end - 1);
    for (int first = range.begin; first < range.end; ++first) {
      flash::KvBlockOrder order{range};
      order.start_at(first);
      const flash::SkippedBlocks skipped = flash::skipped_blocks(mask, order, begin, part_end, block_n);
      check::that(skipped.left >= 0 && skipped.right >= 0, "skipped blocks", skipped.left, skipped.right, row, first);
      check::that(skipped.begin == order.unmasked_steps_end(), "where masked blocks begin", skipped.begin, row, first);
      for (int step = 1; step < order.count(); ++step) {
        const bool skips =
            (step >= skipped.begin && step < skipped.begin + skipped.left) || step >= order.count() - skipped.right;
        const bool needed = block_facts(mask, row, part_end, order.block(step), block_n).needed;
        check::that(skips == !needed, "skipped steps", step, order.count(), row, row_begin, row_end, block_n, first);
      }
    }
  }
}

// A warpgroup's trip count: whether its first block needs a mask, and its first masked block. A warpgroup without rows
// has those of the last row, but for the mask.
template <class Mask>
void check_trip_counts(const Mask& mask, const BlockRange& range, int row_begin, int row_end, int part_rows, int parts,
                       int block_n) {
  for (int part = 0; range.count() > 0 && part < parts; ++part) {
    const int begin = row_begin + part * part_rows, part_end = std::min(begin + part_rows, row_end);
    const int row = std::min(begin, row_end - 1);
    for (int first = range.begin; first < range.end; ++first) {
      flash::KvBlockOrder order{range};
      order.start_at(first);
      const auto steps = flash::warpgroup_trip_count(mask, order, begin, part_end, block_n);
      check::that(steps.count == order.count() - steps.skipped.right, "trip count", steps.count, row, first);
      const bool is_masked = steps.first_to_mask != decltype(steps)::kNoBlock;
      const bool is_whole = block_facts(mask, row, part_end, order.block(0), block_n).unmasked;
      check::that(begin > row || is_masked != is_whole, "mask of the first step", row, part_end, block_n, first,
                  mask.seqlen_q, mask.seqlen_k, case_of(mask));
      if (is_masked) check::that(steps.first_to_mask == order.block(0), "first step", steps.first_to_mask, row, first);
      int step = std::min(steps.skipped.begin, steps.count);
      while (step < steps.count && !block_facts(mask, row, part_end, order.block(step), block_n).needed) ++step;
      if (step < steps.count) {
        check::that(steps.first_masked_block == order.block(step), "first masked block", steps.first_masked_block, step,
                    row, first);
      }
    }
  }
}

// Downwards: the blocks that a part needs are one stretch, those before and after it are skipped; a part without rows
// or visible keys skips all.
template <class Mask>
void check_descending(const Mask& mask, const BlockRange& range, int row_begin, int row_end, int part_rows, int parts,
                      int block_n) {
  for (int part = 0; range.count() > 0 && part < parts; ++part) {
    const int begin = row_begin + part * part_rows, part_end = std::min(begin + part_rows, row_end);
    const auto steps = flash::descending_trip_count(mask, flash::KvBlockOrder{range}, begin, part_end, block_n);
    check::that(steps.skipped_first + steps.count + steps.skipped_last == range.count(), "descending steps",
                steps.skipped_first, steps.count, steps.skipped_last, range.count());
    for (int step = 0; step < range.count(); ++step) {
      const int block = range.end - 1 - step;
      const bool computed = step >= steps.skipped_first && step < steps.skipped_first + steps.count;
      if (begin >= part_end) {
        check::that(!computed, "a part without rows", step, begin, part_end);
        continue;
      }
      const auto facts = block_facts(mask, begin, part_end, block, block_n);
      check::that(computed == facts.needed, "descending steps computed", step, range.count(), begin, part_end, block_n);
      if (!computed) continue;
      check::that(block == steps.first_block - (step - steps.skipped_first), "descending block", step, block);
      const bool masks = block < steps.unmasked_begin || block >= steps.unmasked_end;
      check::that(masks || facts.unmasked, "descending block that needs a mask", block, begin, part_end, block_n);
    }
  }
}

// Splits are contiguous and of one length but for the last ones; unmasked and skipped blocks are known in each.
template <class Mask>
void check_splits(const Mask& mask, const BlockRange& range, int row_begin, int row_end, int block_n) {
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
        check_skipped_blocks(mask, own, row_begin, row_end, 2, parts, block_n);
        check_trip_counts(mask, own, row_begin, row_end, 2, parts, block_n);
      }
      next = own.end;
      longest = std::max(longest, own.count());
    }
    check::that(next == range.end, "splits have all blocks", next, range.end, splits);
    check::that(longest == (range.count() + splits - 1) / splits, "the longest split", longest, range.count(), splits);
  }
}

// Everything, with tiles of many sizes.
template <class Mask>
void check_mask(const Mask& mask) {
  check_rows(mask);
  check_keys(mask);
  check_first_unmasked(mask);
  for (int block_m : {1, 2, 3, 4, 6, 16}) {
    for (int block_n : {1, 2, 3, 4, 16}) {
      for (int row = 0; row < mask.seqlen_q; row += block_m) {
        const int row_end = std::min(row + block_m, mask.seqlen_q);
        check_m_block(mask, row, row_end, block_n);
        const BlockRange range = flash::block_range(mask, row, row_end, block_n);
        check_unmasked_first(range, row, row_end, block_n);
        check_orders(range, block_n);
        for (int parts : {2, 3}) {
          if (block_m % parts != 0) continue;
          check_skipped_blocks(mask, range, row, row_end, block_m / parts, parts, block_n);
          check_trip_counts(mask, range, row, row_end, block_m / parts, parts, block_n);
          check_descending(mask, range, row, row_end, block_m / parts, parts, block_n);
        }
        check_splits(mask, range, row, row_end, block_n);
      }
      check_directions(mask, block_m, block_n);
      check_unmasked_rows(mask, block_m, block_n);
    }
  }
}

}  // namespace mask_checks
