// The key order of V^T against the fragments of wgmma as PTX defines them, and codes against the values of e4m3.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "check.h"
#include "core/e4m3.h"

namespace {

namespace e4m3 = flash::e4m3;

double value_of(int code) {
  const int exponent = code / 8, mantissa = code % 8;
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

void check_codes() {
  for (int exponent = -6; exponent <= 8; ++exponent) {
    const float code = e4m3::kCodesPerOctave * (static_cast<float>(exponent) + e4m3::kExponentBias);
    check::that(value_of(static_cast<int>(code)) == std::ldexp(1.0, exponent), "code of a power of two", exponent);
  }
  check::that(value_of(e4m3::kLargestCode) == 448.0 && e4m3::kNanCode == e4m3::kLargestCode + 1, "largest code");
  check::that(value_of(e4m3::kOnes % 256u) == 1.0, "ones");
  double sums[2] = {};
  constexpr int kSteps = 1 << 16;
  for (int i = 0; i < kSteps; ++i) {
    const double fraction = (i + 0.5) / kSteps;
    sums[0] += 1 + fraction;
    sums[1] += std::exp2(fraction);
  }
  check::that(std::fabs(std::log2(sums[0] / sums[1]) - e4m3::kCodeMeanLog2) < 1e-6, "mean of codes");
}

// What the kernel does with the low 16 bits of a float: wrapping addition, then both bounds.
int clamped_code(float code) {
  uint32_t bits;
  std::memcpy(&bits, &code, sizeof bits);
  const auto low = static_cast<int16_t>(static_cast<uint16_t>(bits + e4m3::kCodeShift));
  return std::max<int>(std::min<int>(low, e4m3::kNanCode), 0);
}

void check_clamp() {
  for (int code = -32768; code < 32768; ++code) {
    const int expected = std::min(std::max(code, 0), static_cast<int>(e4m3::kNanCode));
    check::that(clamped_code(e4m3::kCodeMagic + static_cast<float>(code)) == expected, "clamped code", code);
  }
  check::that(clamped_code(-INFINITY) == 0, "a masked score");
  uint32_t nan_bits = 0x7fffffffu;  // the NaN that instructions make
  float nan;
  std::memcpy(&nan, &nan_bits, sizeof nan);
  check::that(clamped_code(nan) == static_cast<int>(e4m3::kNanCode), "NaN");
}

}  // namespace

int main() {
  check_key_order();
  check_codes();
  check_clamp();
  return check::report();
}
