// A second mask type: keys of each row as intervals in a table, as packed documents, blocks of an image or a prefix
// give them. All functions of windows accept it.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "mask_checks.h"

namespace toy {

// Bounds of rows from one on.
struct TableBounds {
  const int* begin;
  const int* end;

  constexpr int key_begin(int i) const { return begin[i]; }
  constexpr int key_end(int i) const { return end[i]; }
};

// Row i sees keys [begin[i], end[i]); neither end moves back from row to row.
struct IntervalMask {
  using Bounds = TableBounds;

  int seqlen_q;
  int seqlen_k;
  const int* begin;
  const int* end;

  constexpr bool may_mask_left() const { return true; }
  constexpr bool may_mask_right() const { return true; }
  constexpr int key_begin(int row) const { return begin[row]; }
  constexpr int key_end(int row) const { return end[row]; }
  constexpr int row_begin(int key) const { return first_row_beyond(end, key); }
  constexpr int row_end(int key) const { return first_row_beyond(begin, key); }
  constexpr TableBounds bounds(int row) const { return {begin + row, end + row}; }

 private:
  constexpr int first_row_beyond(const int* ends, int key) const {
    int row = 0;
    while (row < seqlen_q && ends[row] <= key) ++row;
    return row;
  }
};

bool sees(const IntervalMask& mask, int row, int key) { return key >= mask.begin[row] && key < mask.end[row]; }

std::string case_of(const IntervalMask& mask) {
  std::string text;
  for (int row = 0; row < mask.seqlen_q; ++row) {
    text += '[' + std::to_string(mask.begin[row]) + ',' + std::to_string(mask.end[row]) + ')';
  }
  return text;
}

}  // namespace toy

namespace {

void check_intervals(int seqlen_k, const std::vector<int>& begin, const std::vector<int>& end) {
  mask_checks::check_mask(toy::IntervalMask{static_cast<int>(begin.size()), seqlen_k, begin.data(), end.data()});
}

// Documents of these lengths, each seen by its own rows only; causal, or both ways in blocks of `block` tokens.
void check_documents(const std::vector<int>& lengths, int block) {
  std::vector<int> begin, end;
  int first = 0;
  for (int length : lengths) {
    for (int i = 0; i < length; ++i) {
      begin.push_back(first);
      end.push_back(first + std::min((i / block + 1) * block, length));
    }
    first += length;
  }
  check_intervals(first, begin, end);
}

// Consecutive rows with any intervals whose ends do not move back and which leave no key out, after some rows
// that see none.
void check_random(uint32_t seed) {
  const auto random = [&seed](int limit) {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<int>((seed >> 16) % limit);
  };
  const int rows = 1 + random(12), blind = random(3), seqlen_k = 1 + random(14);
  std::vector<int> begin, end;
  int b = 0, e = 0;
  for (int row = 0; row < rows; ++row) {
    const bool is_last = row + 1 == rows;
    if (row >= blind || is_last) {
      const int last_end = e;
      e = is_last ? seqlen_k : std::min(seqlen_k, std::max(1, last_end + random(4)));
      b = std::min(b + random(4), std::min(std::max(last_end, b), e - 1));
    }
    begin.push_back(b);
    end.push_back(e);
  }
  check_intervals(seqlen_k, begin, end);
}

}  // namespace

int main() {
  for (int block : {1, 3, 100}) {
    check_documents({7}, block);
    check_documents({1, 5, 2, 8}, block);
    check_documents({4, 4, 4}, block);
  }
  for (uint32_t seed = 1; seed <= 200; ++seed) check_random(seed);
  return check::report();
}
