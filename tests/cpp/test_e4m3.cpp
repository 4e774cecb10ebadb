// The key order of V^T against the fragments of wgmma as PTX defines them, and codes against the values of e4m3.
#include <cmath>
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
  const int largest = static_cast<int>(e4m3::kMaxCodes & 0xffff);
  check::that(value_of(largest) == 448.0 && e4m3::kMaxCodes >> 16 == e4m3::kMaxCodes % 65536u, "largest code");
  check::that(value_of(e4m3::kOnes % 256u) == 1.0, "ones");
  check::that(e4m3::kCodeMagic == 1.5f * 8388608.0f, "floats of whole numbers");
  double sums[2] = {};
  constexpr int kSteps = 1 << 16;
  for (int i = 0; i < kSteps; ++i) {
    const double fraction = (i + 0.5) / kSteps;
    sums[0] += 1 + fraction;
    sums[1] += std::exp2(fraction);
  }
  check::that(std::fabs(std::log2(sums[0] / sums[1]) - e4m3::kCodeMeanLog2) < 1e-6, "mean of codes");
}

}  // namespace

int main() {
  check_key_order();
  check_codes();
  return check::report();
}
