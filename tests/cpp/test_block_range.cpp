// Windows: core/visibility.h, core/block_range.h, core/visible_range.h and core/trip_count.h against brute force over
// every small problem, and their sums near 2^31.
#include <algorithm>

#include "check.h"
#include "mask_checks.h"

namespace flash {

// What a window means.
bool sees(const Visibility& visibility, int row, int key) {
  const Window& window = visibility.window;
  const int64_t position = int64_t{row} + visibility.seqlen_k - visibility.seqlen_q;
  return key >= 0 && key < visibility.seqlen_k && (window.left == kUnbounded || key >= position - window.left) &&
         (window.right == kUnbounded || key <= position + window.right);
}

std::string case_of(const Visibility& visibility) {
  return std::to_string(visibility.window.left) + ' ' + std::to_string(visibility.window.right);
}

}  // namespace flash

namespace {

using flash::BlockRange;
using flash::FastDiv;
using flash::kUnbounded;
using flash::Visibility;
using flash::Window;

// The common start of the loads of work tiles with a left window bound.
void check_alignment(const Visibility& visibility, int block_m, int block_n) {
  const Window& window = visibility.window;
  const int apart = flash::max_unmasked_blocks(window, block_m, block_n);
  const bool is_open = window.left == kUnbounded || window.right == kUnbounded;
  for (int row = 0; row < visibility.seqlen_q; row += block_m) {
    const int row_end = std::min(row + block_m, visibility.seqlen_q);
    const BlockRange range = flash::block_range(visibility, row, row_end, block_n);
    check::that(row_end < row + block_m || is_open || range.unmasked_end - range.unmasked_begin <= apart,
                "most unmasked blocks", range.unmasked_begin, range.unmasked_end, apart, window.left, window.right);
    mask_checks::check_load_order(range, apart, block_n);
  }
}

// A warpgroup's rows begin at most so many blocks after the tile's first row, and end as many before its last.
void check_most_skipped(const Visibility& visibility, int block_m, int block_n) {
  for (int row = 0; row < visibility.seqlen_q; row += block_m) {
    const int row_end = std::min(row + block_m, visibility.seqlen_q);
    const flash::KvBlockOrder order{flash::block_range(visibility, row, row_end, block_n)};
    for (int begin = row; order.count() > 0 && begin < row_end; ++begin) {
      const flash::SkippedBlocks skipped = flash::skipped_blocks(visibility, order, begin, begin + 1, block_n);
      check::that(skipped.left <= (begin - row + block_n - 1) / block_n, "skipped on the left", skipped.left, begin);
      check::that(skipped.right <= (row_end - begin - 1 + block_n - 1) / block_n, "skipped on the right", skipped.right,
                  begin, row_end);
    }
  }
}

void check_all_small_problems() {
  const int windows[] = {kUnbounded, kUnbounded - 1, 0, 1, 2, 3, 5, 8, 20};
  for (int seqlen_q = 1; seqlen_q <= 9; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k <= 11; ++seqlen_k) {
      for (int left : windows) {
        for (int right : windows) {
          const Visibility visibility{seqlen_q, seqlen_k, Window{left, right}};
          mask_checks::check_mask(visibility);
          for (int block_m : {1, 2, 3, 4, 6, 16}) {
            for (int block_n : {1, 2, 3, 4, 16}) {
              check_alignment(visibility, block_m, block_n);
              check_most_skipped(visibility, block_m, block_n);
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

void check_large_keys(const Visibility& visibility) {
  const Window& window = visibility.window;
  const int64_t rows = visibility.seqlen_q, keys = visibility.seqlen_k;
  for (int key : {0, visibility.seqlen_k / 2, visibility.seqlen_k - 1}) {
    const int64_t row = key - keys + rows;  // whose diagonal it is
    const int64_t begin = window.right == kUnbounded ? 0 : std::clamp<int64_t>(row - window.right, 0, rows);
    const int64_t end = window.left == kUnbounded ? rows : std::clamp<int64_t>(row + window.left + 1, 0, rows);
    check::that(visibility.row_begin(key) == begin, "large row_begin", key, rows, keys, window.left, window.right);
    check::that(visibility.row_end(key) == end, "large row_end", key, rows, keys, window.left, window.right);
    const flash::RowRange range = flash::row_range(visibility, key / 128, 64, 128);
    const flash::RowRange generic = flash::row_range<Visibility>(visibility, key / 128, 64, 128);
    check::that(range.begin == generic.begin && range.end == generic.end, "large row range", key, rows, keys,
                window.left, window.right);
  }
}

// Built with -fsanitize=signed-integer-overflow: a 32-bit overflow ends the program.
void check_large_problems() {
  const int longest = (1 << 30) - 1;  // the maximum of checks.h
  const int lengths[] = {1, 128, 1 << 20, longest - 128, longest};
  const int windows[] = {kUnbounded, kUnbounded - 1, 2000000000, 1 << 30, 1000, 0};
  for (int seqlen_q : lengths) {
    for (int seqlen_k : lengths) {
      for (int left : windows) {
        for (int right : windows) {
          const Visibility visibility{seqlen_q, seqlen_k, Window{left, right}};
          check_large_keys(visibility);
          for (int row : {0, seqlen_q / 2, seqlen_q - 1}) {
            const int64_t position = int64_t{row} + seqlen_k - seqlen_q, limit = seqlen_k;
            const int64_t begin = left == kUnbounded ? 0 : std::clamp<int64_t>(position - left, 0, limit);
            const int64_t end = right == kUnbounded ? limit : std::clamp<int64_t>(position + right + 1, 0, limit);
            check::that(visibility.key_begin(row) == begin, "large key_begin", row, seqlen_q, seqlen_k, left, right);
            check::that(visibility.key_end(row) == end, "large key_end", row, seqlen_q, seqlen_k, left, right);
            for (int first_row : {0, row / 2, row}) mask_checks::check_column_bounds(visibility, first_row, row);
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
