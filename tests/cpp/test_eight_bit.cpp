// The index maps and bit patterns of core/eight_bit.h: a warp's fragments of an 8-bit cache are followed byte by byte
// through ldmatrix, PRMT, the conversions and mma.sync, as the decode kernel calls them, to the element that they meet.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "check.h"
#include "core/eight_bit.h"
#include "kernels/decode/vector_swizzle.h"

namespace {

using namespace flash::eight_bit;

constexpr int kKeys = 32, kRows = 16;  // of a step, and of a row tile

// ---- instructions, as the PTX manual has them ----

// One 8 x 8 matrix of 16-bit elements, rows of 16 bytes: lane 4 g + t gets columns 2 t and 2 t + 1 of row g.
uint32_t ldmatrix(const uint8_t* const (&rows)[8], int lane) {
  uint32_t word;
  std::memcpy(&word, rows[lane / 4] + lane % 4 * 4, 4);
  return word;
}

// Transposed: rows 2 t and 2 t + 1 of column g.
uint32_t ldmatrix_trans(const uint8_t* const (&rows)[8], int lane) {
  uint16_t low, high;
  std::memcpy(&low, rows[lane % 4 * 2] + lane / 4 * 2, 2);
  std::memcpy(&high, rows[lane % 4 * 2 + 1] + lane / 4 * 2, 2);
  return low | static_cast<uint32_t>(high) << 16;
}

uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return result;
}

double half_value(uint32_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31) magnitude = mantissa ? NAN : INFINITY;
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Of values that fp16 holds, and beyond its range.
uint32_t half_bits(double value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), -14);
  const double mantissa = std::ldexp(magnitude, 10 - exponent);  // below 1024: not a normal number
  check::that(mantissa == std::nearbyint(mantissa), "fp16 holds the value", value);
  const uint32_t whole = static_cast<uint32_t>(mantissa);
  return sign | (whole < 1024 ? whole : static_cast<uint32_t>(exponent + 15) << 10 | (whole - 1024));
}

template <class Function>
uint32_t by_half(const Function& function, uint32_t a, uint32_t b, uint32_t c = 0) {
  uint32_t result = 0;
  for (int shift : {0, 16}) {
    const double value =
        function(half_value(a >> shift & 0xffff), half_value(b >> shift & 0xffff), half_value(c >> shift & 0xffff));
    result |= half_bits(value) << shift;
  }
  return result;
}

// ---- conversions of kernels/decode/eight_bit.h ----

double e4m3_value(uint32_t stored) {
  const int exponent = stored >> 3 & 15, mantissa = stored & 7;
  double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if ((stored & 0x7f) == 0x7f) magnitude = NAN;
  return stored & 0x80 ? -magnitude : magnitude;
}

struct E4m3 {
  static double value(uint8_t stored) { return e4m3_value(stored); }

  // By the instruction: the low, or the high half of the word.
  static uint32_t decode(uint32_t word, bool second) {
    const uint32_t pair = second ? word >> 16 : word;
    return half_bits(e4m3_value(pair & 0xff)) | half_bits(e4m3_value(pair >> 8 & 0xff)) << 16;
  }
  static void keys(uint32_t word, uint32_t& b0, uint32_t& b1) {
    b0 = decode(word, false);
    b1 = decode(word, true);
  }
  static void values(uint32_t word, uint32_t& even, uint32_t& odd) {
    word = prmt(word, word, kInterleaveKeys);
    even = decode(word, false);
    odd = decode(word, true);
  }
};

struct Int8 {
  static double value(uint8_t stored) { return static_cast<int8_t>(stored); }

  static uint32_t decode(uint32_t word, uint32_t selector) {
    const auto add = [](double a, double b, double) { return a + b; };
    return by_half(add, prmt(word, kInt8Exponent, selector), kInt8Bias);
  }
  static void keys(uint32_t word, uint32_t& b0, uint32_t& b1) {
    b0 = decode(word ^ kInt8Sign, kInt8First);
    b1 = decode(word ^ kInt8Sign, kInt8Second);
  }
  static void values(uint32_t word, uint32_t& even, uint32_t& odd) {
    even = decode(word ^ kInt8Sign, kInt8EvenCols);
    odd = decode(word ^ kInt8Sign, kInt8OddCols);
  }
};

// Without the instruction.
uint32_t decode_e4m3_by_bits(uint32_t word, bool second) {
  const auto multiply = [](double a, double b, double) { return a * b; };
  const auto fma = [](double a, double b, double c) { return a * b + c; };
  const uint32_t spread = prmt(word, 0, second ? kE4m3Second : kE4m3First);
  const uint32_t magnitude = spread >> 1 & kE4m3Magnitude;
  // Rounded where it is not exact; only whether it is infinite matters.
  uint32_t overflows = 0;
  for (int shift : {0, 16}) {
    const double sum = half_value(magnitude >> shift & 0xffff) * half_value(kHalf32768 >> shift & 0xffff) +
                       half_value(kHalf4096 >> shift & 0xffff);
    overflows |= (sum >= 65520 ? 0x7c00u : 0x3c00u) << shift;
  }
  return by_half(fma, overflows, 0, by_half(multiply, magnitude | (spread & kE4m3Sign), kHalf256));
}

void check_conversions() {
  for (uint32_t stored = 0; stored < 256; ++stored) {
    for (uint32_t other : {0x00u, 0x7eu, 0x7fu, 0x81u, 0xffu}) {
      const uint32_t words[] = {stored | other << 8, stored << 16 | other << 24, other | stored << 8,
                                other << 16 | stored << 24};
      for (int i = 0; i < 4; ++i) {
        const uint32_t got = decode_e4m3_by_bits(words[i], i % 2 == 1) >> (i < 2 ? 0 : 16) & 0xffff;
        const double expected = e4m3_value(stored), value = half_value(got);
        check::that(value == expected || (std::isnan(value) && std::isnan(expected)), "e4m3 by bits", stored, value);
      }
    }
  }
}

// Nearest e4m3 bits by search, ties to the even one.
uint32_t nearest_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fabs(static_cast<double>(value));
  uint32_t best = 0;
  for (uint32_t stored = 1; stored <= 0x7e; ++stored) {
    const double distance = std::fabs(e4m3_value(stored) - magnitude), least = std::fabs(e4m3_value(best) - magnitude);
    if (distance < least || (distance == least && stored % 2 == 0)) best = stored;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

void check_encoding() {
  const auto check_value = [](float value) {
    const float below_normal = std::fabs(value) + 16384.0f;
    uint32_t bits, sum;
    std::memcpy(&bits, &value, 4);
    std::memcpy(&sum, &below_normal, 4);
    check::that(e4m3_bits(bits, sum) == nearest_e4m3(value), "e4m3 bits", value, e4m3_bits(bits, sum));
  };
  for (uint32_t stored = 0; stored < 0x7e; ++stored) {
    const float low = static_cast<float>(e4m3_value(stored)), high = static_cast<float>(e4m3_value(stored + 1));
    const float middle = (low + high) / 2;
    for (float value : {low, middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      check_value(value);
      check_value(-value);
    }
  }
  for (float value : {448.0f, 449.0f, 464.0f, 1e30f, INFINITY, -INFINITY, NAN, 1e-30f, -1e-30f, 0.0f})
    check_value(value);
}

// ---- the step of the kernel ----

// acc (16 x 8) += a (16 x 16) b (16 x 8), all lanes' registers at once.
struct Warp {
  uint32_t a[32][4], b[32][2];

  double acc(int lane, int i) const {
    const int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
    double sum = 0;
    for (int k = 0; k < 16; ++k) {
      const int a_lane = row % 8 * 4 + k % 8 / 2, b_lane = col * 4 + k % 8 / 2, half = k % 2 * 16;
      sum +=
          half_value(a[a_lane][row / 8 + k / 8 * 2] >> half & 0xffff) * half_value(b[b_lane][k / 8] >> half & 0xffff);
    }
    return sum;
  }
};

// Small numbers that fp16 holds, different for different elements.
double element(int row, int col) { return (row * 37 + col * 11) % 29 - 14; }
uint8_t stored_value(int row, int col) {
  const int stored = (row * 73 + col * 149 + 7) % 256;
  return static_cast<uint8_t>((stored & 0x7f) == 0x7f ? 0x42 : stored);
}

// Q K^T over a 16-byte vector of columns: Q's pairs are where KvQuery::narrow() puts them.
template <class Format>
void check_keys(int vector) {
  const int first = vector * kVectorCols;
  uint8_t q[kRows][32];  // 16 columns of fp16
  for (int row = 0; row < kRows; ++row) {
    for (int pair = 0; pair < 8; ++pair) {
      for (int i = 0; i < 2; ++i) {
        const uint16_t bits = static_cast<uint16_t>(half_bits(element(row, first + 2 * pair + i)));
        std::memcpy(q[row] + q_pair_position(pair) * 4 + i * 2, &bits, 2);
      }
    }
  }
  uint8_t k[kKeys][kVectorCols];
  for (int key = 0; key < kKeys; ++key) {
    for (int col = 0; col < kVectorCols; ++col) k[key][col] = stored_value(key, first + col);
  }
  Warp warp;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {  // as lane / 16 and lane % 16 address them: rows 0 to 7, 8 to 15, by column half
      const uint8_t* rows[8];
      for (int row = 0; row < 8; ++row) rows[row] = q[row + i % 2 * 8] + i / 2 * 16;
      warp.a[lane][i] = ldmatrix(rows, lane);
    }
  }
  for (int ni = 0; ni < 4; ++ni) {
    const uint8_t* rows[8];
    for (int row = 0; row < 8; ++row) rows[row] = k[ni * 8 + row];  // matrix ni: lanes 8 ni to 8 ni + 7 pass its rows
    for (int lane = 0; lane < 32; ++lane) Format::keys(ldmatrix(rows, lane), warp.b[lane][0], warp.b[lane][1]);
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, key = ni * 8 + lane % 4 * 2 + i % 2;  // PackedCoords
        double expected = 0;
        for (int col = 0; col < kVectorCols; ++col) expected += element(row, first + col) * Format::value(k[key][col]);
        check::that(warp.acc(lane, i) == expected, "score", lane, i, warp.acc(lane, i), expected);
      }
    }
  }
}

// P V of 16 keys and two 16-byte vectors: operands as P comes from the accumulator, columns as the epilogue stores
// them.
template <class Format>
void check_values(int first_key, int head_dim) {
  std::vector<std::vector<uint8_t>> v(16, std::vector<uint8_t>(head_dim));
  for (int key = 0; key < 16; ++key) {
    for (int col = 0; col < head_dim; ++col) v[key][col] = stored_value(first_key + key, col);
  }
  Warp even, odd, swapped;
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i % 2 * 8, key = lane % 4 * 2 + i / 2 * 8;
      const uint32_t pair = half_bits(element(row, key)) | half_bits(element(row, key + 1)) << 16;
      even.a[lane][i] = odd.a[lane][i] = pair;
    }
    for (int i = 0; i < 2; ++i) swapped.b[lane][i] = even.a[lane][2 * i];
  }
  std::vector<int> met(head_dim, 0);
  for (int vector = 0; vector < head_dim / kVectorCols; ++vector) {
    for (int i = 0; i < 2; ++i) {  // keys 0 to 7, and 8 to 15
      const uint8_t* rows[8];
      for (int row = 0; row < 8; ++row) rows[row] = v[i * 8 + row].data() + vector * kVectorCols;
      for (int lane = 0; lane < 32; ++lane) {
        Format::values(ldmatrix_trans(rows, lane), even.b[lane][i], odd.b[lane][i]);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) swapped.a[lane][i] = i % 2 == 0 ? even.b[lane][i / 2] : odd.b[lane][i / 2];
    }
    for (int lane = 0; lane < 32; ++lane) {  // kSwapAb
      for (int i = 0; i < 4; ++i) {
        const int row = lane % 4 * 2 + i % 2, col = vector * kVectorCols + lane / 4 * 2 + i / 2;
        double expected = 0;
        for (int key = 0; key < 16; ++key) expected += element(row, key) * Format::value(v[key][col]);
        check::that(swapped.acc(lane, i) == expected, "output of O^T", lane, i, swapped.acc(lane, i), expected);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      for (int half = 0; half < 2; ++half) {
        const double stored[] = {even.acc(lane, 2 * half), odd.acc(lane, 2 * half), even.acc(lane, 2 * half + 1),
                                 odd.acc(lane, 2 * half + 1)};  // a float4 from column o_col(t) on
        for (int i = 0; i < 4; ++i) {
          const int row = lane / 4 + half * 8, col = vector * kVectorCols + o_col(lane % 4) + i;
          double expected = 0;
          for (int key = 0; key < 16; ++key) expected += element(row, key) * Format::value(v[key][col]);
          check::that(stored[i] == expected, "output", lane, half, i, stored[i], expected);
          ++met[col];
        }
      }
    }
  }
  for (int count : met) check::that(count == kRows, "every element once", count);
}

// The vectors of a step of kHeadDim columns: the ring writes each to a separate place, ldmatrix finds it, and eight
// lanes together, a phase of either, touch all banks once.
template <int kHeadDim>
void check_swizzle() {
  using Swizzle = flash::decode::VectorSwizzle<kHeadDim / 2>;
  constexpr int kVectors = kHeadDim / kVectorCols, kLanes = kVectors < 8 ? 4 : kVectors, kPassRows = 32 / kLanes;
  static_assert(kVectors == Swizzle::kVectors, "rows of bytes are rows of half as many 16-bit elements");
  std::vector<int> content(kKeys * kVectors, -1);
  for (int pass = 0; pass < kKeys / kPassRows; ++pass) {
    for (int first = 0; first < 32; first += 8) {
      std::set<int> banks;
      for (int lane = first; lane < first + 8; ++lane) {
        const int lane_row = lane / kLanes, row = pass * kPassRows + lane_row, vector = lane % kLanes;
        const int swizzled = vector ^ Swizzle::key(lane_row) ^ Swizzle::key(pass * kPassRows);  // KvRing::copy()
        const int place = row * kVectors + Swizzle::next(swizzled, 0);
        check::that(content[place] < 0, "a separate place", kHeadDim, row, vector);
        content[place] = row * kVectors + vector;
        banks.insert(place % 8);
      }
      check::that(banks.size() == 8, "banks of a copy", kHeadDim, pass, first);
    }
  }
  for (int first = 0; first < 32; first += 8) {
    for (int slice = 0; slice < kVectors; ++slice) {
      std::set<int> banks;
      for (int lane = first; lane < first + 8; ++lane) {
        const uint32_t first_vector = 16 * (lane * kVectors + Swizzle::key(lane));
        const int place = Swizzle::next_address(first_vector, slice) / 16;
        check::that(content[place] == lane * kVectors + slice, "a vector of K", kHeadDim, lane, slice);
        banks.insert(place % 8);
      }
      check::that(banks.size() == 8, "banks of K", kHeadDim, slice);
    }
    for (int vector = 0; vector < kVectors; vector += 2) {
      std::set<int> banks;
      for (int lane = first; lane < first + 8; ++lane) {
        const int row = lane % 16, swizzled = lane / 16 ^ Swizzle::key(row);
        const int place = Swizzle::next_address(16 * (row * kVectors + swizzled), vector) / 16;
        check::that(content[place] == row * kVectors + vector + lane / 16, "a vector of V", kHeadDim, lane, vector);
        banks.insert(place % 8);
      }
      check::that(banks.size() == 8, "banks of V", kHeadDim, vector);
    }
  }
}

template <class Format>
void check_format() {
  for (int vector = 0; vector < 16; ++vector) check_keys<Format>(vector);
  for (int head_dim : {64, 128, 256}) {
    check_values<Format>(0, head_dim);
    check_values<Format>(16, head_dim);
  }
}

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 8-bit values times the power that K takes are exact in fp16; the rest, for queries, is at most 1, up to 2^7.
void check_key_power() {
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t mantissa : {0u, 1u, 0x400000u, 0x7fffffu}) {
      const uint32_t descale = exponent << 23 | mantissa, power = key_power(descale);
      for (uint32_t stored = 0; stored < 256; ++stored) {
        for (double value : {e4m3_value(stored), static_cast<double>(static_cast<int8_t>(stored))}) {
          const double product = value * from_bits(power);
          check::that(std::isnan(value) || half_value(half_bits(product)) == product, "an 8-bit value", exponent,
                      stored);
        }
      }
      check::that(from_bits(power) * from_bits(reciprocal_power(power)) == 1, "a reciprocal", exponent);
      if (exponent == 0 || exponent == 255) continue;
      const double rest = static_cast<double>(from_bits(descale)) / from_bits(power), given = from_bits(descale);
      check::that((rest < 1) == (given < 128), "queries keep their range", exponent, mantissa);
      check::that(rest >= 0.5 || given < 0x1p-16, "queries keep their bits", exponent, mantissa);
    }
  }
}

}  // namespace

int main() {
  check_conversions();
  check_key_power();
  check_encoding();
  check_swizzle<64>();
  check_swizzle<128>();
  check_swizzle<256>();
  check_format<E4m3>();
  check_format<Int8>();
  return check::report();
}
