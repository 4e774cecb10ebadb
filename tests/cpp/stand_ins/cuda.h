// A tensor map of the emulator: the matrix that it describes.
#pragma once

#include <cstdint>

struct CUtensorMap {
  bf16* data;
  int64_t batch_stride, row_stride, head_stride;
  int rows, cols;
  int box_rows = 0;  // where boxes have fewer rows than the tile
};
