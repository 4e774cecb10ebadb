// The map from grid slots to (sequence, m_block) over every small list of sequence lengths.
#include <vector>

#include "check.h"
#include "core/block_range.h"
#include "plan/grid.h"

namespace {

// Rows of sequence i are [offsets[i], offsets[i + 1]); the rows before the first and after the last sequence are the
// first and the last segment.
void check_lengths(const std::vector<int>& offsets, int total_rows, int block_m) {
  const int batch = static_cast<int>(offsets.size()) - 1;
  const int slots = flash::varlen_slot_count(total_rows, batch, block_m);
  check::that(flash::plan::m_blocks(true, batch, total_rows, block_m) == slots, "the grid has every slot", slots);
  std::vector<int> bounds{0};
  bounds.insert(bounds.end(), offsets.begin(), offsets.end());
  bounds.push_back(total_rows);
  int previous_end = 0;
  for (int i = 0; i <= batch + 1; ++i) {
    const int row_begin = bounds[i], row_end = bounds[i + 1];
    const int first = flash::varlen_first_slot(row_begin, i, block_m);
    const int end = i <= batch ? flash::varlen_first_slot(row_end, i + 1, block_m) : slots;
    check::that(first == previous_end, "slots are contiguous", i, first, previous_end);
    check::that((end - first) * block_m >= row_end - row_begin, "every row has a slot", i, first, end, row_begin,
                row_end, block_m);
    previous_end = end;
  }
  check::that(previous_end == slots, "the last segment ends the grid", previous_end, slots);
}

void check_all_lists(std::vector<int>& offsets, int sequences_left) {
  for (int block_m : {1, 2, 3, 4, 7}) {
    for (int tail = 0; tail <= 8; ++tail) check_lengths(offsets, offsets.back() + tail, block_m);
  }
  if (sequences_left == 0) return;
  for (int length = 0; length <= 9; ++length) {
    offsets.push_back(offsets.back() + length);
    check_all_lists(offsets, sequences_left - 1);
    offsets.pop_back();
  }
}

void check_dense() {
  for (int batch = 0; batch <= 3; ++batch) {
    for (int seqlen = 0; seqlen <= 20; ++seqlen) {
      for (int block_m : {1, 4, 7, 16}) {
        int64_t blocks = 0;
        for (int row = 0; row < seqlen; row += block_m) ++blocks;
        check::that(flash::plan::m_blocks(false, batch, seqlen, block_m) == batch * blocks, "dense row blocks", batch,
                    seqlen, block_m);
      }
    }
  }
  check::that(flash::plan::m_blocks(false, 1 << 20, 0x7fffffff, 128) == (int64_t{1} << 20) * (1 << 24),
              "dense row blocks beyond 32 bits");
}

}  // namespace

int main() {
  for (int first = 0; first <= 8; ++first) {
    std::vector<int> offsets{first};
    check_all_lists(offsets, first == 0 ? 4 : 3);
  }
  check_dense();
  return check::report();
}
