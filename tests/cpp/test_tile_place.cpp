// The places of 16-byte pieces in a swizzled tile against what the hardware does with addresses: of 128-byte rows,
// address bits 4 to 6 are XORed with bits 7 to 9; of 64-byte rows, bits 4 and 5 with bits 7 and 8.
#include <set>

#include "check.h"
#include "kernels/tma/swizzle.h"

namespace {

using flash::sm90::kPieceCols;
using flash::sm90::piece_place;

int hardware_place(int chunk_cols, int row, int col) {
  const int address = 2 * (row * chunk_cols + col);
  const int mask = chunk_cols == 64 ? 7 : 3;
  return (address ^ (address >> 7 & mask) << 4) / 2;
}

void check_chunk(int chunk_cols, int rows) {
  std::set<int> places;
  for (int row = 0; row < rows; ++row) {
    for (int piece = 0; piece < chunk_cols / kPieceCols; ++piece) {
      const int place = piece_place(chunk_cols, row, piece);
      for (int col = 0; col < kPieceCols; ++col) {
        check::that(place + col == hardware_place(chunk_cols, row, piece * kPieceCols + col), "place", chunk_cols, row,
                    piece, col);
      }
      places.insert(place);
    }
  }
  check::that(static_cast<int>(places.size()) == rows * chunk_cols / kPieceCols, "every piece has its own place");
  check::that(*places.begin() == 0 && *places.rbegin() == rows * chunk_cols - kPieceCols, "the places fill the chunk");
}

}  // namespace

int main() {
  for (int chunk_cols : {32, 64}) {
    for (int rows : {16, 64, 96, 128}) check_chunk(chunk_cols, rows);
  }
  return check::report();
}
