// The key order of V^T against the fragments of wgmma as PTX defines them, and bit patterns against the values of e4m3.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "check.h"
#include "core/e4m3.h"
#include "core/transpose_lane.h"

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

uint32_t byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return word;
}

// Offset in rows of kRowBytes, as a TMA box with swizzle writes them: the index of a vector XOR that of its line.
int swizzled(int row, int byte, int row_bytes) {
  return row * row_bytes + (byte / 16 ^ row * row_bytes / 128 % (row_bytes / 16)) * 16 + byte % 16;
}

// A warp transposes 128 keys as the kernel does, ldmatrix.trans and stmatrix as PTX defines them.
template <int kHeadDim>
void check_transposition() {
  using Lane = flash::TransposeLane<kHeadDim>;
  constexpr int kKeys = e4m3::kVtKeys;
  const auto value = [](int key, int column) {
    return static_cast<uint8_t>(key * 37 + column * 101 + key * column / 7);
  };
  std::vector<uint8_t> v(kKeys * kHeadDim), vt(kKeys * kHeadDim, 0);
  for (int key = 0; key < kKeys; ++key) {
    for (int column = 0; column < kHeadDim; ++column) v[swizzled(key, column, kHeadDim)] = value(key, column);
  }
  for (int i = 0; i < kKeys / Lane::kKeys; ++i) {
    for (int j = 0; j < kHeadDim / Lane::kCols; ++j) {
      for (int lane = 0; lane < 32; ++lane) {
        uint32_t words[4] = {};
        for (int matrix = 0; matrix < 4; ++matrix) {
          for (int byte = 0; byte < 4; ++byte) {  // columns of 16 bits: both bytes of rows 2 t, then of rows 2 t + 1
            const uint32_t row = Lane(8 * matrix + 2 * (lane % 4) + byte / 2).source(i, j);
            words[matrix] |= uint32_t{v[row + 2 * (lane / 4) + byte % 2]} << 8 * byte;
          }
        }
        const uint32_t stored[4] = {
            byte_perm(words[0], words[1], Lane::kEven), byte_perm(words[0], words[1], Lane::kOdd),
            byte_perm(words[2], words[3], Lane::kEven), byte_perm(words[2], words[3], Lane::kOdd)};
        for (int matrix = 0; matrix < 4; ++matrix) {
          const uint32_t row = Lane(8 * matrix + lane / 4).target(i, j);
          for (int byte = 0; byte < 4; ++byte) {
            vt[row + 4 * (lane % 4) + byte] = static_cast<uint8_t>(stored[matrix] >> 8 * byte);
          }
        }
      }
    }
  }
  for (int column = 0; column < kHeadDim; ++column) {
    for (int position = 0; position < kKeys; ++position) {
      const int key = position / 16 * 16 + e4m3::key_at(position % 16);
      check::that(vt[swizzled(column, position, kKeys)] == value(key, column), "V^T", kHeadDim, column, position);
    }
  }
}

}  // namespace

int main() {
  check_transposition<64>();
  check_transposition<128>();
  check_key_order();
  check_bit_patterns();
  check_clamp();
  return check::report();
}
