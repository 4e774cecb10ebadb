// Biases as data: numbers that are added to scores after scale, softcap and ALiBi. tests/cpp/test_score_bias.cpp checks
// this file.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace flash {

// The biases of a call, and by of() those of one sequence and head, whose pointers are then its own. Null: there is no
// such bias.
struct ScoreBias {
  const void* __restrict__ data = nullptr;    // attn_bias, fp32 or of Q's dtype
  const float* __restrict__ table = nullptr;  // rel_bias: (h, 2 * reach + 1), by the distance of key and query
  // Of data, in elements; 0 where it broadcasts.
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0, col_stride = 0;
  int reach = 0;
  int cols = 0;              // that data has: packed sequences may claim to have more keys
  bool is_float = false;     // data
  bool loads_pairs = false;  // two neighbouring columns, the first even, are one aligned load

  FLASH_HOST_DEVICE constexpr bool given() const { return data != nullptr || table != nullptr; }
  FLASH_HOST_DEVICE constexpr int table_cols() const { return 2 * reach + 1; }
  FLASH_HOST_DEVICE constexpr int64_t element_bytes() const { return is_float ? 4 : 2; }

  // Those of a sequence whose first row is given.
  FLASH_HOST_DEVICE ScoreBias of(int batch, int head, int first_row) const {
    ScoreBias own = *this;
    if (data != nullptr) {
      const int64_t first = batch * batch_stride + head * head_stride + first_row * row_stride;
      own.data = static_cast<const char*>(data) + first * element_bytes();
    }
    if (table != nullptr) own.table += static_cast<int64_t>(head) * table_cols();
    return own;
  }

  // Elements of data from its first one; rows and columns beyond the sequence are those of its last ones, so that
  // every address is valid.
  FLASH_HOST_DEVICE constexpr int64_t offset(int row, int col) const { return row * row_stride + col * col_stride; }
  FLASH_HOST_DEVICE constexpr int last_col(int seqlen_k) const { return (seqlen_k < cols ? seqlen_k : cols) - 1; }

  // Column of the table for a key so far behind its query's position; negative: before it.
  FLASH_HOST_DEVICE constexpr int table_col(int distance) const {
    return (distance < -reach ? -reach : distance > reach ? reach : distance) + reach;
  }
};

}  // namespace flash
