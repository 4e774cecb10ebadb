// Do two strided tensors share elements, or two indices of one? Plain C++17, checked by brute force in tests/cpp.
// Address ranges do not tell: those of dq, dk and dv in one packed buffer interleave.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace flash {

constexpr int kMaxAxes = 8;

// Of a tensor, in bytes. Axes of size 1 are left out.
struct Layout {
  int64_t begin = 0;
  int64_t element_bytes = 1;
  int64_t reach = 0;  // from the first element to the last
  bool is_empty = false;
  int axes = 0;
  std::array<int64_t, kMaxAxes> last{};  // largest index
  std::array<int64_t, kMaxAxes> stride{};

  void add_axis(int64_t size, int64_t byte_stride) {
    is_empty = is_empty || size == 0;
    if (size <= 1) return;
    last[axes] = size - 1;
    stride[axes++] = byte_stride;
    reach += byte_stride * (size - 1);
  }

  int64_t end() const { return begin + reach + element_bytes; }
};

// Which multiples of strides, low <= multiple <= high, add up to a target?
class StrideSum {
 public:
  void add(int64_t stride, int64_t low, int64_t high) {
    if (stride == 0) return;
    for (int i = 0; i < size_; ++i) {
      if (terms_[i].stride != stride) continue;
      terms_[i].low += low;
      terms_[i].high += high;
      return;
    }
    terms_[size_++] = {stride, low, high};
  }

  // Nested strides leave one or two multiples of each to try. Of others nothing is known after kMaxSteps: false.
  bool reaches(int64_t target) {
    std::sort(terms_.begin(), terms_.begin() + size_, [](const Term& a, const Term& b) { return a.stride > b.stride; });
    steps_ = 0;
    return reaches(0, target);
  }

 private:
  static constexpr int kMaxSteps = 10000;

  struct Term {
    int64_t stride, low, high;
  };

  static int64_t floor_div(int64_t value, int64_t divisor) { return value / divisor - (value % divisor < 0 ? 1 : 0); }

  bool reaches(int first, int64_t target) {
    if (first == size_) return target == 0;
    int64_t rest_low = 0, rest_high = 0;
    for (int i = first + 1; i < size_; ++i) {
      rest_low += terms_[i].stride * terms_[i].low;
      rest_high += terms_[i].stride * terms_[i].high;
    }
    const Term& term = terms_[first];
    const int64_t least = std::max(term.low, -floor_div(rest_high - target, term.stride));
    const int64_t most = std::min(term.high, floor_div(target - rest_low, term.stride));
    for (int64_t multiple = least; multiple <= most; ++multiple) {
      if (++steps_ > kMaxSteps) return false;
      if (reaches(first + 1, target - multiple * term.stride)) return true;
    }
    return false;
  }

  std::array<Term, 2 * kMaxAxes + 1> terms_{};
  int size_ = 0;
  int steps_ = 0;
};

inline bool share_elements(const Layout& a, const Layout& b) {
  if (a.is_empty || b.is_empty || a.begin >= b.end() || b.begin >= a.end()) return false;
  StrideSum sum;
  for (int axis = 0; axis < a.axes; ++axis) sum.add(a.stride[axis], 0, a.last[axis]);
  for (int axis = 0; axis < b.axes; ++axis) sum.add(b.stride[axis], -b.last[axis], 0);
  sum.add(1, 1 - b.element_bytes, a.element_bytes - 1);
  return sum.reaches(b.begin - a.begin);
}

// Of two indices with one address, take the first axis in which they differ: its difference is positive, those of the
// axes before it are 0.
inline bool overlaps_itself(const Layout& layout) {
  if (layout.is_empty) return false;
  for (int first = 0; first < layout.axes; ++first) {
    if (layout.stride[first] == 0) return true;
    StrideSum sum;
    sum.add(layout.stride[first], 1, layout.last[first]);
    for (int axis = first + 1; axis < layout.axes; ++axis) {
      sum.add(layout.stride[axis], -layout.last[axis], layout.last[axis]);
    }
    sum.add(1, 1 - layout.element_bytes, layout.element_bytes - 1);
    if (sum.reaches(0)) return true;
  }
  return false;
}

}  // namespace flash
