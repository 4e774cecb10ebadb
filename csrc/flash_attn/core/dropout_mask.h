// The dropout mask as a pure function of (seed, offset, batch, head, row, column), the same for every tile shape,
// kernel family, direction and device. docs/semantics.md states it normatively; flash_attn/dropout.py is its twin.
// Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

#include "core/host_device.h"

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

// One stream per (seed, offset, batch, head), from Philox4x32-10.
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

// A bijective hash of 32-bit words: the finalizer of MurmurHash3 (Appleby 2011).
FLASH_HOST_DEVICE uint32_t murmur3_finalizer(uint32_t word) {
  word = (word ^ (word >> 16)) * 0x85EBCA6Bu;
  word = (word ^ (word >> 13)) * 0xC2B2AE35u;
  return word ^ (word >> 16);
}

// Kernels make the mask bits of this many columns at a time: column origins must be multiples of it.
constexpr int kDropoutColumns = 16;

// Random bits of a row, or of a pair of columns. Within 16 columns, two pairs four apart share the coarse bits.
struct alignas(8) RandomBits {
  uint32_t fine;
  uint32_t coarse;
};

FLASH_HOST_DEVICE RandomBits dropout_row(const DropoutStream& stream, int row) {
  const uint32_t coarse = murmur3_finalizer(static_cast<uint32_t>(row) ^ stream.row_key[0]) + stream.row_key[1];
  return {murmur3_finalizer(coarse) | 1, coarse};
}

// Fine bits that share coarse bits differ by an odd number, so that their products with a row's bits are independent.
FLASH_HOST_DEVICE RandomBits dropout_column_pair(const DropoutStream& stream, int pair) {
  const uint32_t odd = static_cast<uint32_t>(pair) / 4 % 2, first = static_cast<uint32_t>(pair) - 4 * odd;
  const uint32_t coarse = murmur3_finalizer(murmur3_finalizer(first ^ stream.col_key[0]) + stream.col_key[1]);
  return {(murmur3_finalizer(coarse + odd) & ~1u) | odd, coarse | 1};
}

FLASH_HOST_DEVICE uint32_t swap_halves(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(word, 0, 0x1032);
#else
  return (word << 16) | (word >> 16);
#endif
}

// Two 15-bit uniforms for a row and a pair of columns; the even column's is in the lower half. The top bit of each half
// is unused. The low half of a product is less random, so the second product is added with its halves swapped.
FLASH_HOST_DEVICE uint32_t dropout_uniforms(const RandomBits& row, const RandomBits& column_pair) {
  return row.fine * column_pair.fine + swap_halves(row.coarse * column_pair.coarse);
}

// A uniform below its row's limit means the rarer outcome, which is "keep" if the drop probability exceeds one half.
// Limits are therefore at most 2^14 and can be compared as fp16 bit patterns: none is a NaN.
FLASH_HOST_DEVICE bool dropout_rare_is_kept(uint32_t threshold) { return threshold > 0x80000000u; }

// 2^15 times the probability of the rarer outcome, rounded stochastically by random bits of the row: exact on average.
FLASH_HOST_DEVICE uint32_t dropout_limit(const RandomBits& row, uint32_t threshold) {
  const uint32_t rarer = dropout_rare_is_kept(threshold) ? 0u - threshold : threshold;
  return (rarer + (row.fine >> 15)) >> 17;
}

// Whether column `col` is kept, given the uniforms of its pair.
FLASH_HOST_DEVICE bool dropout_keeps(uint32_t uniforms, int col, uint32_t limit, bool rare_is_kept) {
  const int shift = col % 2 * 16;
  return ((uniforms & (0x7FFFu << shift)) >= limit << shift) != rare_is_kept;
}

FLASH_HOST_DEVICE bool dropout_keeps(const DropoutStream& stream, int row, int col, uint32_t threshold) {
  const RandomBits row_bits = dropout_row(stream, row);
  return dropout_keeps(dropout_uniforms(row_bits, dropout_column_pair(stream, col / 2)), col,
                       dropout_limit(row_bits, threshold), dropout_rare_is_kept(threshold));
}

}  // namespace flash
