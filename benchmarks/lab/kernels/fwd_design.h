// The design of the laboratory's mma.sync forward as data, as benchmarks/lab/sm80_designs.py states it, and the size
// of its shared memory. Plain C++17.
#pragma once

#include "params/dtype.h"

namespace flash {
namespace lab {

// kNone: contiguous rows; ldmatrix meets the same banks in every row.
// kPadded: 16 bytes more a row, so that eight rows meet all banks.
// kSwizzled: the 16-byte vectors of a 128-byte row are permuted by its index (kernels/sm80/operand_layouts.h).
enum class Layout { kNone, kPadded, kSwizzled };

// kTextbook: O is rescaled in every step. kFirstApart: in every step but the first. kLagging: only when the row max has
// grown by a factor of 2^8.
enum class SoftmaxRule { kTextbook, kFirstApart, kLagging };

struct FwdDesign {
  int head_dim;
  int block_m;        // query rows per CTA
  int block_n;        // keys per step
  int warps;          // each owns block_m / warps rows
  int blocks_per_sm;  // what the register budget is compiled for
  Dtype dtype;
  bool async_copies;                 // cp.async; else loads into registers and stores to shared memory
  bool eager_kv;                     // V is loaded after Q K^T, the next K after P V; else each when it is needed
  Layout layout;                     // of Q, K and V in shared memory
  bool q_in_registers;               // Q is read from shared memory once, not in every step
  int q_slices, k_slices, v_slices;  // of 16 columns or keys that are read together; 0: all before the first MMA
  bool double_buffered;              // the next slices are read before the MMAs of these
  SoftmaxRule softmax;
};

constexpr int kPadding = 8;    // elements, 16 bytes
constexpr int kAtomCols = 64;  // elements of a swizzled row, 128 bytes

constexpr int row_pitch(Layout layout, int cols) { return layout == Layout::kPadded ? cols + kPadding : cols; }

// Elements of a (rows, cols) tile.
constexpr int tile_elements(Layout layout, int rows, int cols) { return rows * row_pitch(layout, cols); }

// Q, K, V; O is staged in Q's buffer.
constexpr int smem_bytes(const FwdDesign& design) {
  const int rows = design.block_m + 2 * design.block_n;
  return dtype_bytes(design.dtype) * tile_elements(design.layout, rows, design.head_dim);
}

}  // namespace lab
}  // namespace flash
