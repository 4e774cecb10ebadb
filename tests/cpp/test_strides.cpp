// Overlap of strided layouts against sets of addresses, and layouts that must be accepted.
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "api/strides.h"
#include "check.h"

namespace {

using flash::Layout;

Layout layout(int64_t begin, int64_t element_bytes, const std::vector<int64_t>& sizes,
              const std::vector<int64_t>& strides) {
  Layout result;
  result.begin = begin;
  result.element_bytes = element_bytes;
  for (size_t axis = 0; axis < sizes.size(); ++axis) result.add_axis(sizes[axis], strides[axis] * element_bytes);
  return result;
}

// The byte addresses of all elements, with multiplicity.
std::multiset<int64_t> bytes_of(const Layout& layout) {
  std::vector<int64_t> addresses;
  if (!layout.is_empty) addresses.push_back(layout.begin);
  for (int axis = 0; axis < layout.axes; ++axis) {
    const std::vector<int64_t> so_far = addresses;
    addresses.clear();
    for (int64_t index = 0; index <= layout.last[axis]; ++index) {
      for (int64_t address : so_far) addresses.push_back(address + index * layout.stride[axis]);
    }
  }
  std::multiset<int64_t> bytes;
  for (int64_t address : addresses) {
    for (int64_t byte = 0; byte < layout.element_bytes; ++byte) bytes.insert(address + byte);
  }
  return bytes;
}

void check_against_addresses(std::mt19937& random) {
  auto below = [&](int bound) { return static_cast<int64_t>(random() % static_cast<unsigned>(bound)); };
  auto any = [&] {
    const int axes = static_cast<int>(below(4));
    std::vector<int64_t> sizes, strides;
    for (int axis = 0; axis < axes; ++axis) {
      sizes.push_back(below(5));
      strides.push_back(below(below(2) ? 4 : 40));
    }
    return layout(below(60), 1 << below(3), sizes, strides);
  };
  const Layout a = any(), b = any();
  const std::multiset<int64_t> of_a = bytes_of(a), of_b = bytes_of(b);
  const std::set<int64_t> distinct(of_a.begin(), of_a.end());
  const bool shared = std::any_of(of_b.begin(), of_b.end(), [&](int64_t byte) { return of_a.count(byte) > 0; });
  check::that(flash::share_elements(a, b) == shared, "shared", a.begin, b.begin, a.axes, b.axes, shared);
  check::that(flash::share_elements(b, a) == shared, "either way round", a.begin, b.begin);
  check::that(flash::overlaps_itself(a) == (distinct.size() < of_a.size()), "itself", a.axes, a.element_bytes);
}

// dq, dk and dv of one buffer (batch, rows, 3, heads, dim), and of one (batch, rows, heads, 3, dim); large ones too.
void check_packed_buffers() {
  for (int64_t rows : {1, 7, 5000, 1000000}) {
    for (int64_t heads : {1, 3, 32}) {
      const int64_t dim = 64;
      std::vector<Layout> by_three, by_head;
      for (int64_t part = 0; part < 3; ++part) {
        const std::vector<int64_t> sizes{4, rows, heads, dim};
        const int64_t row = 3 * heads * dim;
        by_three.push_back(layout(2 * part * heads * dim, 2, sizes, {rows * row, row, dim, 1}));
        by_head.push_back(layout(2 * part * dim, 2, sizes, {rows * row, row, 3 * dim, 1}));
      }
      for (const auto& parts : {by_three, by_head}) {
        for (int i = 0; i < 3; ++i) {
          check::that(!flash::overlaps_itself(parts[i]), "a part by itself", rows, heads, i);
          for (int j = 0; j < 3; ++j) {
            check::that(flash::share_elements(parts[i], parts[j]) == (i == j), "parts", rows, heads, i, j);
          }
          Layout moved = parts[i];
          moved.begin += 2;
          check::that(flash::share_elements(parts[i], moved), "moved by an element", rows, heads, i);
        }
      }
      check::that(flash::share_elements(by_three[0], by_head[0]), "the first element", rows, heads);
    }
  }
}

// Expanded tensors overlap themselves; an axis of one element may have any stride.
void check_expanded() {
  check::that(flash::overlaps_itself(layout(0, 2, {2, 8}, {0, 1})), "stride 0");
  check::that(!flash::overlaps_itself(layout(0, 2, {1, 8}, {0, 1})), "one element");
  check::that(!flash::overlaps_itself(layout(0, 2, {0, 8}, {0, 1})), "no element");
  check::that(flash::overlaps_itself(layout(0, 2, {int64_t{1} << 31, 8}, {7, 1})), "rows that overlap by an element");
  check::that(!flash::overlaps_itself(layout(0, 2, {int64_t{1} << 31, 8}, {8, 1})), "rows side by side");
}

}  // namespace

int main() {
  std::mt19937 random(11);
  for (int i = 0; i < 20000; ++i) check_against_addresses(random);
  check_packed_buffers();
  check_expanded();
  return check::report();
}
