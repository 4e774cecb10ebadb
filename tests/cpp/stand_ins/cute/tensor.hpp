// The names of CuTe that templates of the kernels mention, and the sizes of views of accumulators.
#pragma once

#include <type_traits>

#define CUTE_HOST_DEVICE

namespace cute {

struct Underscore {};
using _1 = std::integral_constant<int, 1>;
using _2 = std::integral_constant<int, 2>;
using _8 = std::integral_constant<int, 8>;
using _16 = std::integral_constant<int, 16>;
template <int kValue>
using Int = std::integral_constant<int, kValue>;
template <class...>
struct Shape {};
template <class...>
struct Stride {};
template <class...>
struct Layout {};
template <class...>
struct Tile {};
template <class...>
struct TiledMMA {};

template <int... kModes, class T>
int get(const T&);
template <int... kModes, class T>
_2 rank(const T&);
template <class... T>
int make_layout(const T&...);
template <class... T>
int make_tensor(const T&...);

// View: a matrix with kRows, kCols.
template <int kMode, class View>
constexpr auto size(const View&) {
  return std::integral_constant<int, kMode == 0 ? View::kRows : View::kCols>{};
}

template <class Registers>
constexpr auto size(const Registers&) {
  return std::integral_constant<int, Registers::kSize>{};
}

}  // namespace cute
