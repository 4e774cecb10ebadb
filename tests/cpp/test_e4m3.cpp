// The key order of V^T against the fragments of wgmma as PTX defines them, and bit patterns against the values of e4m3.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "check.h"
#include "core/e4m3.h"

namespace {

namespace e4m3 = flash::e4m3;

double value_of(int pattern) {
  const int exponent = pattern / 8, mantissa = pattern % 8;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

// Lane t of a quad holds columns 2 t, 2 t + 1 of each 8 of an accumulator, and bytes 4 t to 4 t + 3 of 16 columns of
// the A operand. The kernel puts the two pairs of 16 accumulator columns into these bytes, one after the other.
void check_key_order() {
  std::set<int> keys;
  for (int lane = 0; lane < 4; ++lane) {
    for (int j = 0; j < 4; ++j) {
      const int accumulator_col = j / 2 * 8 + 2 * lane + j % 2;
      check::that(e4m3::key_at(4 * lane + j) == accumulator_col, "key at a position", lane, j);
      keys.insert(e4m3::key_at(4 * lane + j));
    }
  }
  check::that(keys.size() == 16, "every key has a position");
}

void check_bit_patterns() {
  for (int exponent = -6; exponent <= 8; ++exponent) {
    const float pattern = e4m3::kPatternsPerOctave * (static_cast<float>(exponent) + e4m3::kExponentBias);
    check::that(value_of(static_cast<int>(pattern)) == std::ldexp(1.0, exponent), "pattern of a power of two",
                exponent);
  }
  check::that(value_of(e4m3::kLargestBits) == 448.0 && e4m3::kNanBits == e4m3::kLargestBits + 1, "largest pattern");
  check::that(value_of(e4m3::kOnes % 256u) == 1.0, "ones");
  double sums[2] = {};
  constexpr int kSteps = 1 << 16;
  for (int i = 0; i < kSteps; ++i) {
    const double fraction = (i + 0.5) / kSteps;
    sums[0] += 1 + fraction;
    sums[1] += std::exp2(fraction);
  }
  check::that(std::fabs(std::log2(sums[0] / sums[1]) - e4m3::kExpBitsMeanLog2) < 1e-6, "mean of bit patterns");
}

// What the kernel does with the low 16 bits of a float: wrapping addition, then both bounds.
int clamped_bits(float pattern) {
  uint32_t bits;
  std::memcpy(&bits, &pattern, sizeof bits);
  const auto low = static_cast<int16_t>(static_cast<uint16_t>(bits + e4m3::kBitsShift));
  return std::max<int>(std::min<int>(low, e4m3::kNanBits), 0);
}

void check_clamp() {
  for (int pattern = -32768; pattern < 32768; ++pattern) {
    const int expected = std::min(std::max(pattern, 0), static_cast<int>(e4m3::kNanBits));
    check::that(clamped_bits(e4m3::kBitsMagic + static_cast<float>(pattern)) == expected, "clamped pattern", pattern);
  }
  check::that(clamped_bits(-INFINITY) == 0, "a masked score");
  uint32_t nan_bits = 0x7fffffffu;  // the NaN that instructions make
  float nan;
  std::memcpy(&nan, &nan_bits, sizeof nan);
  check::that(clamped_bits(nan) == static_cast<int>(e4m3::kNanBits), "NaN");
}

}  // namespace

int main() {
  check_key_order();
  check_bit_patterns();
  check_clamp();
  return check::report();
}
