// The dropout mask as a pure function of (seed, offset, batch, head, row, column), the same for every tile shape,
// kernel family, direction and device. docs/semantics.md states it normatively; flash_attn/dropout.py is its twin.
// Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash {

struct DropoutStream {
  uint32_t row_key[2];
  uint32_t col_key[2];
};

FLASH_HOST_DEVICE void multiply_wide(uint32_t a, uint32_t b, uint32_t& high, uint32_t& low) {
  const uint64_t product = static_cast<uint64_t>(a) * b;
  high = static_cast<uint32_t>(product >> 32);
  low = static_cast<uint32_t>(product);
}

// One stream per (seed, offset, batch, head), drawn from Philox4x32-10.
FLASH_HOST_DEVICE DropoutStream dropout_stream(uint64_t seed, uint64_t offset, uint32_t batch, uint32_t head) {
  uint32_t counter[4] = {batch, head, static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    uint32_t high0, low0, high1, low1;
    multiply_wide(0xD2511F53u, counter[0], high0, low0);
    multiply_wide(0xCD9E8D57u, counter[2], high1, low1);
    counter[0] = high1 ^ counter[1] ^ key[0];
    counter[2] = high0 ^ counter[3] ^ key[1];
    counter[1] = low1;
    counter[3] = low0;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return {{counter[0], counter[1]}, {counter[2], counter[3]}};
}

// A permutation of the 32-bit words that looks random: the finalizer of MurmurHash3 (Appleby 2011).
FLASH_HOST_DEVICE uint32_t murmur3_finalizer(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
  word = (word ^ (word >> 13)) * 0xC2B2AE35u;
  return word ^ (word >> 16);
}

// The words of a row, multiplier and addend, in one: its multiplier is the lower half.
FLASH_HOST_DEVICE uint64_t dropout_row(const DropoutStream& stream, int row) {
  const uint32_t addend = murmur3_finalizer(static_cast<uint32_t>(row) ^ stream.row_key[0]) + stream.row_key[1];
  return (static_cast<uint64_t>(addend) << 32) | murmur3_finalizer(addend);
}

// The word of a pair of columns: no two of a head are equal.
FLASH_HOST_DEVICE uint32_t dropout_column_pair(const DropoutStream& stream, int pair) {
  return murmur3_finalizer(murmur3_finalizer(static_cast<uint32_t>(pair) ^ stream.col_key[0]) + stream.col_key[1]);
}

// Two uniforms of 15 bits: of a row and a pair of columns, the even one's in the lower half. `which`: for one of them.
FLASH_HOST_DEVICE uint32_t dropout_uniforms(uint64_t row, uint32_t column_pair, uint32_t which = 0x7FFF7FFFu) {
#if defined(__CUDA_ARCH__)
  // One instruction. Of mad.wide and of the C++ ptxas makes two or three.
  uint32_t low, high;
  asm("mad.lo.cc.u32 %0, %2, %3, %4;\n\tmadc.hi.u32 %1, %2, %3, %5;"
      : "=&r"(low), "=r"(high)
      : "r"(column_pair), "r"(static_cast<uint32_t>(row)), "r"(static_cast<uint32_t>(row)),
        "r"(static_cast<uint32_t>(row >> 32)));
#else
  const uint64_t sum = static_cast<uint64_t>(column_pair) * static_cast<uint32_t>(row) + row;
  const uint32_t low = static_cast<uint32_t>(sum), high = static_cast<uint32_t>(sum >> 32);
#endif
  return (high ^ low) & which;
}

// Uniforms of the row below this are dropped: 2^15 times the probability, rounded up or down by random bits of the row,
// so that it is exact on the average.
FLASH_HOST_DEVICE uint32_t dropout_limit(uint64_t row, uint32_t threshold) {
  return static_cast<uint32_t>((static_cast<uint64_t>(threshold) + (static_cast<uint32_t>(row) >> 15)) >> 17);
}

FLASH_HOST_DEVICE bool dropout_keeps(const DropoutStream& stream, int row, int col, uint32_t threshold) {
  const uint64_t row_words = dropout_row(stream, row);
  const int shift = col % 2 * 16;
  const uint32_t uniform = dropout_uniforms(row_words, dropout_column_pair(stream, col / 2), 0x7FFFu << shift);
  return uniform >= dropout_limit(row_words, threshold) << shift;
}

}  // namespace flash
