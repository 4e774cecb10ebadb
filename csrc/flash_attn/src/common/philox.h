// The dropout mask as a pure function of (seed, offset, batch, head, row, column), the same for every tile shape,
// kernel family, direction and device. docs/semantics.md states it normatively; flash_attn/dropout.py is its twin.
// Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flash {

struct DropoutStream {
  uint32_t key;      // of the per-element Philox2x32
  uint32_t row_xor;  // mixed into its two counter words
  uint32_t col_xor;
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
  return {counter[0], counter[1], counter[2]};
}

struct Word2 {
  uint32_t word[2];
};

// Philox2x32-7: seven rounds is the least number that the paper found to pass its statistical batteries.
FLASH_HOST_DEVICE Word2 philox2x32_7(uint32_t counter0, uint32_t counter1, uint32_t key) {
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < 7; ++round) {
    uint32_t high, low;
    multiply_wide(0xD256D193u, counter0, high, low);
    counter0 = high ^ key ^ counter1;
    counter1 = low;
    key += 0x9E3779B9u;
  }
  return {{counter0, counter1}};
}

// Rows {r, r + 8} and columns {c, c + 8} of a 16 x 16 square share one draw: a thread owns all four of them in the
// accumulator of every tensor core generation, transposed or not.
FLASH_HOST_DEVICE constexpr uint32_t dropout_group(int index) {
  return (static_cast<uint32_t>(index) / 16) * 8 + static_cast<uint32_t>(index) % 8;
}

// The 32-bit uniform of one element of a group: row_half selects the word, col_half its rotation by 16 bits.
FLASH_HOST_DEVICE constexpr uint32_t dropout_uniform(const Word2& draw, int row_half, int col_half) {
  const uint32_t word = draw.word[row_half];
  return col_half ? (word << 16) | (word >> 16) : word;
}

FLASH_HOST_DEVICE bool dropout_keeps(const DropoutStream& stream, int row, int col, uint32_t threshold) {
  const Word2 draw = philox2x32_7(dropout_group(row) ^ stream.row_xor, dropout_group(col) ^ stream.col_xor, stream.key);
  return dropout_uniform(draw, (row / 8) % 2, (col / 8) % 2) >= threshold;
}

}  // namespace flash
