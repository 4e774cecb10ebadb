// Random bits of the wgmma forward's packed dropout (kPackedDropout). Column bits arrive with K (ColumnBitsWarp), row
// bits stay in registers during a tile; together they give the keep masks of packed pairs of P. A mask depends on (row,
// column) only, so a warp may make it whenever it has time.
#pragma once

#include "kernels/common/dropout.h"
#include "kernels/sm90/fwd_storage.h"

namespace flash {
namespace sm90 {

template <class Config>
struct FwdDropout {
  using Storage = FwdStorage<Config>;
  static constexpr bool kEnabled = Config::kPackedDropout;
  static constexpr int kSlices = Config::kBlockN / 16;

  RowBits row_bits;                                               // of the tile's rows
  uint32_t col_bits[kEnabled ? 4 * Storage::kColBitVectors : 1];  // of the block's columns
  uint32_t keep_mask[kEnabled ? 4 * kSlices : 1];                 // one per packed pair of P

  __device__ __forceinline__ void begin_tile(const Flash_fwd_params& params, const WorkTile& tile, int first_row) {
    if constexpr (kEnabled) {
      const DropoutMask mask(params, tile.batch, tile.head);
      row_bits = RowBits(mask, first_row);
    }
  }

  // Before the K stage is released.
  __device__ __forceinline__ void read_col_bits(const Storage& storage, int k_stage) {
    if constexpr (kEnabled) {
#pragma unroll
      for (int i = 0; i < Storage::kColBitVectors; ++i) {
        const uint4 bits = storage.col_bits[k_stage][threadIdx.x % 4][i];
        col_bits[4 * i] = bits.x;
        col_bits[4 * i + 1] = bits.y;
        col_bits[4 * i + 2] = bits.z;
        col_bits[4 * i + 3] = bits.w;
      }
    }
  }

  // `slice`: 16 columns, one wgmma of P V.
  __device__ __forceinline__ void make_keep_mask(int slice) {
#pragma unroll
    for (int i = 4 * slice; i < 4 * slice + 4; ++i) {
      keep_mask[i] = row_bits.make_keep_mask(i % 2, {col_bits[i / 2], col_bits[Storage::kFineBits + slice]});
    }
  }

  // Pins make_keep_mask() between the wgmmas of P V: ptxas would sink it below the exponentials, to where P is masked,
  // unless a store that never happens (seqlen_q < 0) depends on it.
  __device__ __forceinline__ void make_keep_mask_here(int slice, int seqlen_q) {
    make_keep_mask(slice);
    asm volatile(
        "{\n\t"
        ".reg .pred never;\n\t"
        "setp.lt.s32 never, %0, 0;\n\t"
        "@never st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n\t"
        "}" ::"r"(seqlen_q),
        "r"(0), "r"(keep_mask[4 * slice]), "r"(keep_mask[4 * slice + 1]), "r"(keep_mask[4 * slice + 2]),
        "r"(keep_mask[4 * slice + 3])
        : "memory");
  }

  __device__ __forceinline__ void make_all_keep_masks() {
    if constexpr (kEnabled) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) make_keep_mask(slice);
    }
  }
};

}  // namespace sm90
}  // namespace flash
