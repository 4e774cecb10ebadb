// Division by a fixed divisor, and the published known answers of the random generators of dropout.
#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"
#include "core/dropout_mask.h"
#include "core/fast_div.h"

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
    uint32_t batch, head, expected[4];
  };
  const Long longs[] = {
      {0, 0, 0, 0, {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}},
      {~uint64_t{0}, ~uint64_t{0}, ~0u, ~0u, {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}},
      {0x299f31d0a4093822u,
       0x0370734413198a2eu,
       0x243f6a88u,
       0x85a308d3u,
       {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}},
  };
  for (const Long& kat : longs) {
    const flash::DropoutStream stream = flash::dropout_stream(kat.seed, kat.offset, kat.batch, kat.head);
    const uint32_t keys[4] = {stream.row_key[0], stream.row_key[1], stream.col_key[0], stream.col_key[1]};
    for (int i = 0; i < 4; ++i) check::that(keys[i] == kat.expected[i], "Philox4x32-10", keys[i]);
  }
}

// Published values of MurmurHash3's finalizer.
void check_scrambler() {
  check::that(flash::murmur3_finalizer(0) == 0, "finalizer of 0");
  check::that(flash::murmur3_finalizer(1) == 0x514e28b7u, "finalizer of 1", flash::murmur3_finalizer(1));
}

// No two rows and no two pairs of columns of a head have the same random bits. Two pairs of columns with the same
// coarse bits have fine bits that differ by an odd number.
void check_random_bits() {
  const flash::DropoutStream stream = flash::dropout_stream(3, 5, 1, 2);
  std::vector<std::pair<uint32_t, uint32_t>> rows, pairs;
  for (int i = 0; i < 1 << 20; ++i) {
    const flash::RandomBits row = flash::dropout_row(stream, i), pair = flash::dropout_column_pair(stream, i);
    const flash::RandomBits other = flash::dropout_column_pair(stream, i ^ 4);
    rows.emplace_back(row.fine, row.coarse);
    pairs.emplace_back(pair.fine, pair.coarse);
    check::that(pair.coarse == other.coarse && (pair.fine - other.fine) % 2 == 1, "bits of pairs 4 apart", i);
  }
  for (auto* bits : {&rows, &pairs}) {
    std::sort(bits->begin(), bits->end());
    check::that(std::adjacent_find(bits->begin(), bits->end()) == bits->end(), "all bits differ");
  }
}

// Averaged over the random bits of rows, every threshold gives the rarer outcome its probability exactly, and never a
// limit beyond 16 bits.
void check_limits() {
  for (uint32_t threshold : {0u, 1u, 4294967u, 429496730u, 0x7fffffffu, 0x80000000u, 0x80000001u, 4290672328u, ~0u}) {
    uint64_t below = 0;
    uint32_t largest = 0;
    for (uint64_t bits = 0; bits < 1 << 17; ++bits) {
      const uint32_t limit = flash::dropout_limit({static_cast<uint32_t>(bits << 15), 0}, threshold);
      below += limit;
      largest = std::max(largest, limit);
    }
    const uint64_t dropped = flash::dropout_rare_is_kept(threshold) ? (uint64_t{1} << 32) - below : below;
    check::that(dropped == threshold, "mean limit", threshold, below);
    check::that(largest <= 1u << 14, "limit", threshold, largest);
  }
}

}  // namespace

int main() {
  check_divisions();
  check_philox();
  check_scrambler();
  check_random_bits();
  check_limits();
  return check::report();
}
