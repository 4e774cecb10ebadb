// Tile sizes and warp counts of the kernels of the KV cache, and sizes that follow from them. Plain C++17.
#pragma once

#include <cstdint>

#include "plan/tiles.h"

namespace flash {
namespace plan {

constexpr int kKvGroups = 4;  // at most

// Attention over a KV cache. A tile's rows are the (query token, query head) pairs of one K/V head, packed; warp groups
// split each n_block, each with its own K/V ring in shared memory.
struct KvTile {
  int head_dim;
  int row_tiles;          // 16-row MMA tiles of each warp
  int row_warps;          // warps of a warp group, along the rows
  int step;               // keys of one warp group and step
  int blocks_per_sm;      // occupancy that the register budget is compiled for
  int kv_bytes = 2;       // of an element of K and V
  bool has_plain = true;  // has a kernel of KvVariant::kPlain
  int groups = kKvGroups;
  int col_warps = 1;  // warps of a warp group that share rows: each has all of S and some columns of O

  constexpr int rows() const { return 16 * row_tiles * row_warps; }
};

constexpr int kKvSizes = 3;

// By the packed rows of a K/V head: up to 16, up to 32, more. `step` and `groups` are the same for all sizes of a head
// dim, so that a row's arithmetic does not depend on how many other rows there are.
constexpr KvTile kKvTiles[kKvSizes][kNumHeadDims] = {
    {{32, 1, 1, 32, 2},
     {64, 1, 1, 32, 2},
     {96, 1, 1, 16, 2},
     {128, 1, 1, 16, 2},
     {192, 1, 1, 16, 2},
     {256, 1, 1, 16, 1},
     {512, 1, 1, 16, 1, 2, true, 2, 2}},
    {{32, 2, 1, 32, 2},
     {64, 2, 1, 32, 2},
     {96, 2, 1, 16, 2},
     {128, 2, 1, 16, 2},
     {192, 1, 2, 16, 1},
     {256, 1, 2, 16, 1},
     {512, 1, 1, 16, 1, 2, true, 2, 2}},
    {{32, 2, 2, 32, 1},
     {64, 2, 2, 32, 1},
     {96, 2, 2, 16, 1},
     {128, 2, 2, 16, 1},
     {192, 1, 2, 16, 1},
     {256, 1, 2, 16, 1},
     {512, 1, 1, 16, 1, 2, true, 2, 2}},
};

// Of an 8-bit cache: up to 16 packed rows, or more. A step has the bytes of one over 16 bits, and twice its scores:
// larger tiles do not fit the registers.
constexpr int kKv8Sizes = 2;
constexpr int kNumKv8HeadDims = 3;
constexpr KvTile kKv8Tiles[kKv8Sizes][kNumKv8HeadDims] = {
    {{64, 1, 1, 32, 2, 1}, {128, 1, 1, 32, 2, 1}, {256, 1, 1, 32, 1, 1}},
    {{64, 2, 2, 32, 1, 1, false}, {128, 1, 2, 32, 1, 1, false}, {256, 1, 1, 32, 1, 1}},
};

constexpr int kMaxKv8HeadDim = kKv8Tiles[0][kNumKv8HeadDims - 1].head_dim;

constexpr KvTile kv8_tile(int head_dim, int size) {
  int index = 0;
  while (index + 1 < kNumKv8HeadDims && kKv8Tiles[size][index].head_dim < head_dim) ++index;
  return kKv8Tiles[size][index];
}

constexpr KvTile kv_tile(int head_dim, int size, Dtype kv_dtype = Dtype::kBf16) {
  return is_eight_bit(kv_dtype) ? kv8_tile(head_dim, size) : kKvTiles[size][head_dim_index(head_dim)];
}

// Sizes that hold no more rows than the one before have no kernel.
constexpr bool kv_size_exists(int head_dim, int size, Dtype kv_dtype = Dtype::kBf16) {
  if (size >= (is_eight_bit(kv_dtype) ? kKv8Sizes : kKvSizes)) return false;
  return size == 0 || kv_tile(head_dim, size, kv_dtype).rows() > kv_tile(head_dim, size - 1, kv_dtype).rows();
}

// The smallest tile that holds `rows`, the largest one if none does.
constexpr int kv_tile_size(int head_dim, int64_t rows, Dtype kv_dtype = Dtype::kBf16) {
  int size = 0;
  while (kv_size_exists(head_dim, size + 1, kv_dtype) && kv_tile(head_dim, size, kv_dtype).rows() < rows) ++size;
  return size;
}

// The kernels that may be launched as 2-CTA clusters: larger tiles are compute-bound.
constexpr bool kv_may_cluster(bool is_plain, int size) { return is_plain && size == 0; }

// Tiles that have a kernel for at most kKvSwapRows packed rows (KvVariant::kSwapAb).
constexpr int kKvSwapRows = 8;
constexpr bool kv_may_swap_ab(const KvTile& tile) { return tile.kv_bytes == 1 && tile.rows() == 16; }

// Tiles of the packed rows of one sequence and K/V head.
constexpr int64_t kv_row_tiles(int head_dim, int64_t rows, Dtype kv_dtype = Dtype::kBf16) {
  const int tile_rows = kv_tile(head_dim, kv_tile_size(head_dim, rows, kv_dtype), kv_dtype).rows();
  return (rows + tile_rows - 1) / tile_rows;
}

constexpr int kv_threads(const KvTile& tile) { return 32 * tile.groups * tile.row_warps * tile.col_warps; }
constexpr int kv_block_n(const KvTile& tile) { return tile.groups * tile.step; }  // a power of two

// Consecutive rows that the plain kernel expects in one page: steps, of 8 bits halves of them.
constexpr int kv_page_rows(const KvTile& tile) { return tile.kv_bytes == 1 ? tile.step / 2 : tile.step; }

// Row statistics of 16 rows (max and sum, fp32) of each warp group and of an accumulated sum, and scratch of the
// schedule.
constexpr int kKvStatBytes = (kKvGroups + 1) * 16 * 2 * 4;
constexpr int kKvScratchBytes = 128;
// Queue of work parts between the loads and the MMAs of a warp group: those of the steps in flight, and the next one.
constexpr int kMaxKvStages = 6;
constexpr int kKvParts = 8;
static_assert(kKvParts >= kMaxKvStages + 1, "every step may belong to another tile");
constexpr int kKvPartBytes = kKvGroups * kKvParts * 48;

constexpr int kKvQueryBytes = dtype_bytes(Dtype::kBf16);
static_assert(kKvQueryBytes == dtype_bytes(Dtype::kFp16), "both types have one plan");

// Of one key and K/V head in a stage: K and V, of 8 bits with a descale each.
constexpr int kv_key_bytes(const KvTile& tile) {
  return 2 * (tile.head_dim * tile.kv_bytes + (tile.kv_bytes == 1 ? 4 : 0));
}

// K and V of one step of all warp groups.
constexpr int kv_stage_bytes(const KvTile& tile) { return kv_block_n(tile) * kv_key_bytes(tile); }

constexpr int kv_smem_bytes(const KvTile& tile, int stages) {
  return tile.rows() * tile.head_dim * kKvQueryBytes + kKvStatBytes + kKvScratchBytes + kKvPartBytes +
         stages * kv_stage_bytes(tile);
}

}  // namespace plan
}  // namespace flash
