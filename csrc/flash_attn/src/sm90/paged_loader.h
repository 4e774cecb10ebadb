// K or V that lie in pages, on their way into the buffers of the wgmma forward: one warp for each of the two, by
// cp.async, because pages of any size and sequences that begin anywhere in one fit no TMA box.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/util.hpp>

#include "common/paged_kv.h"
#include "sm90/fwd_producer.h"
#include "sm90/tile_place.h"

namespace flash {
namespace sm90 {

// 16 bytes, or zeros. Takes an address of shared memory as it is, because 64-bit ones would not fit the registers of a
// loading warp.
__device__ __forceinline__ void copy_piece(uint32_t target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(exists ? 16 : 0)
               : "memory");
}

template <class Config>
struct PagedLoader {
  using Element = typename Config::Element;
  static constexpr int kPieces = Config::kChunkCols / kPieceCols;  // of a row of a chunk, a lane each
  static constexpr int kRowsPerPass = 32 / kPieces;
  static_assert(Config::kBlockN % 32 == 0, "rows are looked up 32 at a time");

  static constexpr int bytes(int elements) { return elements * static_cast<int>(sizeof(Element)); }

  const Flash_fwd_params& params;
  const MatrixStrides& strides;
  const Element* const pool;
  Barrier* const full;
  Barrier* const empty;
  const uint32_t buffers;
  RingIndex<Config::kKvStages> place;

  __device__ __forceinline__ PagedLoader(const Flash_fwd_params& params_, FwdStorage<Config>& storage, bool is_v)
      : params(params_),
        strides(is_v ? params_.v_strides : params_.k_strides),
        pool(static_cast<const Element*>(is_v ? params_.v_ptr : params_.k_ptr)),
        full(is_v ? storage.v_full : storage.k_full),
        empty(is_v ? storage.v_empty : storage.k_empty),
        buffers(cute::cast_smem_ptr_to_uint(is_v ? storage.v[0] : storage.k[0])) {}

  // Where a key of the sequence begins in the pool, in elements; -1: beyond the sequence, or no page holds it.
  __device__ __forceinline__ int64_t find(const RowBlock& block, int key) const {
    const int* const table = params.paged.block_table + block.batch * params.paged.block_table_stride;
    const PageRow at = page_row(params.paged, table, block.k_begin + key, key < block.seqlen_k);
    return at.valid ? at.page * strides.batch + at.row * strides.row : -1;
  }

  // 32 rows, each of which its lane has found. Rows that are nowhere become 0, so that NaN outside a sequence never
  // meets the tensor cores.
  __device__ __forceinline__ void copy_rows(const Element* head, int64_t found, uint32_t tile, int first_row) const {
    const int lane = threadIdx.x % 32, piece = lane % kPieces;
#pragma unroll
    for (int pass = 0; pass < 32; pass += kRowsPerPass) {
      const int64_t offset = __shfl_sync(0xffffffffu, found, pass + lane / kPieces);
      const Element* const source = head + (offset < 0 ? 0 : offset) + piece * kPieceCols;
      const int row = first_row + pass + lane / kPieces;
      const uint32_t target = tile + bytes(piece_place(Config::kChunkCols, row, piece));
#pragma unroll
      for (int col = 0; col < Config::kHeadDim; col += Config::kChunkCols) {
        copy_piece(target + bytes(col * Config::kBlockN), source + col,
                   offset >= 0 && col + piece * kPieceCols < params.d);
      }
    }
  }

  // A block of keys. The pages of 32 rows are looked up while the rows before them are copied.
  __device__ __forceinline__ void load(const RowBlock& block, const Element* head, int n_block) {
    const int key = n_block * Config::kBlockN + threadIdx.x % 32;
    int64_t found = find(block, key);
    empty[place.stage].wait(place.phase ^ 1);
    const uint32_t tile = buffers + place.stage * bytes(Config::kSmemKv);
#pragma unroll 1
    for (int row = 0; row < Config::kBlockN; row += 32) {
      const int64_t next = row + 32 < Config::kBlockN ? find(block, key + row + 32) : -1;
      copy_rows(head, found, tile, row);
      found = next;
    }
    // No lane can tell when another one's copies are complete: each waits for its own, shows them to the tensor cores,
    // and arrives. The next block has a buffer of its own, so there is time for that.
    cute::cp_async_wait<0>();
    fence_buffer();
    full[place.stage].arrive();
    place.advance();
  }

  __device__ __forceinline__ void run(TileQueue<Config> queue) {
    for (RowBlock block = queue.take(); !block.empty(); block = queue.take()) {
      const BlockRange range = key_blocks(params, block, Config::kBlockN);
      const Element* const head = pool + block.head / params.h_h_k_ratio * strides.head;
      for (int i = 0; i < range.count(); ++i) load(block, head, range.block_interior_first(i));
    }
  }
};

}  // namespace sm90
}  // namespace flash
