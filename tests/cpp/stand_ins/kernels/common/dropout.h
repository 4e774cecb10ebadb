// Kernels without dropout.
#pragma once

#include "core/dropout_mask.h"
#include "params/flash.h"

namespace flash {

template <int kRows, int kCols, class... T>
void for_each_random_bits(const T&...);

}  // namespace flash
