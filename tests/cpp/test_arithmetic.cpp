// Division by a fixed divisor, and the published known answers of the random generators behind dropout.
#include "check.h"
#include "src/common/fast_div.h"
#include "src/common/philox.h"

namespace {

void check_division(int divisor, int value) {
  check::that(flash::FastDiv(divisor).divide(value) == value / divisor, "division", value, divisor);
}

void check_divisions() {
  for (int divisor = 1; divisor <= 300; ++divisor) {
    for (int value = 0; value <= 3000; ++value) check_division(divisor, value);
  }
  uint64_t state = 1;
  for (int i = 0; i < 1000000; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const int divisor = 1 + static_cast<int>((state >> 33) % 0x7fffffff) / (1 << (state % 31));
    state = state * 6364136223846793005u + 1442695040888963407u;
    const int value = static_cast<int>(state >> 33);
    check_division(divisor > 0 ? divisor : 1, value);
  }
  for (int divisor : {1, 2, 3, 1 << 30, (1 << 30) + 1, 0x7ffffffe, 0x7fffffff}) {
    for (int64_t multiple : {0, 1, 2, 3, 1000}) {
      for (int shift : {-1, 0, 1}) {
        const int64_t value = multiple * divisor + shift;
        if (value >= 0 && value <= 0x7fffffff) check_division(divisor, static_cast<int>(value));
      }
    }
    check_division(divisor, 0x7fffffff);
  }
}

// Known answers of the Random123 distribution (kat_vectors).
void check_philox() {
  struct Long {
    uint64_t seed, offset;
    uint32_t batch, head, expected[3];
  };
  const Long longs[] = {
      {0, 0, 0, 0, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu}},
      {~uint64_t{0}, ~uint64_t{0}, ~0u, ~0u, {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u}},
      {0x299f31d0a4093822u, 0x0370734413198a2eu, 0x243f6a88u, 0x85a308d3u, {0xd16cfe09u, 0x94fdccebu, 0x5001e420u}},
  };
  for (const Long& kat : longs) {
    const flash::DropoutStream stream = flash::dropout_stream(kat.seed, kat.offset, kat.batch, kat.head);
    check::that(stream.key == kat.expected[0] && stream.row_xor == kat.expected[1] && stream.col_xor == kat.expected[2],
                "Philox4x32-10", stream.key, stream.row_xor, stream.col_xor);
  }
  const uint32_t shorts[][5] = {
      {0u, 0u, 0u, 0x257a3673u, 0xcd26be2au},
      {~0u, ~0u, ~0u, 0xab302c4du, 0x3dc9d239u},
      {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0xbedbbe6bu, 0xe4c770b3u},
  };
  for (const auto& kat : shorts) {
    const flash::Word2 draw = flash::philox2x32_7(kat[0], kat[1], kat[2]);
    check::that(draw.word[0] == kat[3] && draw.word[1] == kat[4], "Philox2x32-7", draw.word[0], draw.word[1]);
  }
}

}  // namespace

int main() {
  check_divisions();
  check_philox();
  return check::report();
}
