// Swizzle offsets of 16-byte vectors against the address permutation of the hardware: with 128-byte rows, address bits
// 4 to 6 are XORed with bits 7 to 9; with 64-byte rows, bits 4 and 5 with bits 7 and 8.
#include <set>

#include "check.h"
#include "kernels/tma/swizzle.h"

namespace {

using flash::tma::kVectorCols;
using flash::tma::swizzle_offset;

int hardware_offset(int atom_cols, int row, int col) {
  const int address = 2 * (row * atom_cols + col);
  const int mask = atom_cols == 64 ? 7 : 3;
  return (address ^ (address >> 7 & mask) << 4) / 2;
}

void check_atom(int atom_cols, int rows) {
  std::set<int> offsets;
  for (int row = 0; row < rows; ++row) {
    for (int vector = 0; vector < atom_cols / kVectorCols; ++vector) {
      const int offset = swizzle_offset(atom_cols, row, vector);
      for (int col = 0; col < kVectorCols; ++col) {
        check::that(offset + col == hardware_offset(atom_cols, row, vector * kVectorCols + col), "offset", atom_cols,
                    row, vector, col);
      }
      offsets.insert(offset);
    }
  }
  check::that(static_cast<int>(offsets.size()) == rows * atom_cols / kVectorCols, "every vector has another offset");
  check::that(*offsets.begin() == 0 && *offsets.rbegin() == rows * atom_cols - kVectorCols,
              "the offsets fill the atom");
}

}  // namespace

int main() {
  for (int atom_cols : {32, 64}) {
    for (int rows : {16, 64, 96, 128}) check_atom(atom_cols, rows);
  }
  return check::report();
}
