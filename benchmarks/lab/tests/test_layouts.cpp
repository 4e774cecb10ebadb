// Shared memory layouts of the laboratory's forward (benchmarks/lab/kernels/fwd_design.h): every element has its own
// place, 16-byte vectors stay whole, and ldmatrix meets as many banks as the layout promises.
#include <set>

#include "../kernels/fwd_design.h"
#include "check.h"

namespace {

using flash::lab::FwdDesign;
using flash::lab::Layout;
using flash::lab::tile_elements;
using flash::lab::tile_offset;

constexpr int kVector = 8;  // elements of 16 bytes

// Which of the eight groups of four banks a vector at this offset lies in.
int bank_group(int offset) { return offset / kVector % 8; }

void check_places(Layout layout, int rows, int cols) {
  std::set<int> places;
  for (int row = 0; row < rows; ++row) {
    for (int col = 0; col < cols; ++col) {
      const int offset = tile_offset(layout, rows, cols, row, col);
      check::that(offset >= 0 && offset < tile_elements(layout, rows, cols), "inside the tile", rows, cols, row, col);
      const int vector = tile_offset(layout, rows, cols, row, col - col % kVector);
      check::that(vector % kVector == 0 && offset == vector + col % kVector, "whole vectors", rows, cols, row, col);
      places.insert(offset);
    }
  }
  check::that(static_cast<int>(places.size()) == rows * cols, "places of their own", rows, cols);
}

// ldmatrix reads one vector of eight consecutive rows at a time; a copy writes eight vectors of a row.
void check_banks(Layout layout, int rows, int cols) {
  const std::size_t promised = layout == Layout::kNone ? 1 : 8;
  for (int row = 0; row < rows; row += 8) {
    for (int col = 0; col < cols; col += kVector) {
      std::set<int> groups;
      for (int i = 0; i < 8; ++i) groups.insert(bank_group(tile_offset(layout, rows, cols, row + i, col)));
      check::that(groups.size() == promised, "banks of eight rows", rows, cols, row, col);
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (int col = 0; col < cols; col += 8 * kVector) {
      std::set<int> groups;
      for (int i = 0; i < 8; ++i) groups.insert(bank_group(tile_offset(layout, rows, cols, row, col + i * kVector)));
      check::that(groups.size() == 8, "banks of a row", rows, cols, row, col);
    }
  }
}

}  // namespace

int main() {
  for (Layout layout : {Layout::kNone, Layout::kPadded, Layout::kSwizzled}) {
    for (int cols : {64, 128}) {
      for (int rows : {32, 64, 128}) {
        check_places(layout, rows, cols);
        check_banks(layout, rows, cols);
      }
    }
  }
  FwdDesign design{};
  design.head_dim = 64;
  design.block_m = design.block_n = 128;
  design.layout = Layout::kSwizzled;
  check::that(smem_bytes(design) == 2 * 64 * 384, "bytes");
  design.layout = Layout::kPadded;
  check::that(smem_bytes(design) == 2 * 72 * 384, "bytes with padding");
  return check::report();
}
