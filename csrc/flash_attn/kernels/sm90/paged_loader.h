// Paged K or V to shared memory, one warp each.
// If page size and block_n have a suitable common divisor: TMA boxes of that many rows, one box a lane. Otherwise, and
// at the ends of a sequence's visible keys: cp.async, because a sequence that begins or ends within a page fits no box.
#pragma once

#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/util.hpp>

#include "core/visible_range.h"
#include "kernels/common/paged_kv.h"
#include "kernels/sm90/fwd_producer.h"
#include "kernels/tma/swizzle.h"

namespace flash {
namespace sm90 {

using namespace tma;

// Copies 16 bytes, or zeros. Takes a 32-bit shared address: 64-bit ones do not fit a producer warp's registers.
__device__ __forceinline__ void copy_vector(uint32_t target, const void* source, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(exists ? 16 : 0)
               : "memory");
}

enum KvOperand { kK, kV };

template <class Config, KvOperand kOperand>
struct PagedLoader {
  using Element = typename Config::Element;
  static constexpr int kAtoms = kOperand == kV ? Config::kAtomsV : Config::kAtoms;
  static constexpr int kVectors = Config::kAtomCols / kVectorCols;  // of a row of an atom, a lane each
  static constexpr int kRowsPerIteration = 32 / kVectors;
  static constexpr int kGroups = Config::kBlockN / 32;  // row groups: a lane looks up one row of each
  static_assert(Config::kBlockN % 32 == 0, "rows are looked up 32 at a time");

  static constexpr int bytes(int elements) { return elements * static_cast<int>(sizeof(Element)); }

  const FwdLaunch& launch;
  const Flash_fwd_params& params;
  FwdStorage<Config>& storage;
  PipelineState<Config::kKvStages> state;

  __device__ __forceinline__ PagedLoader(const FwdLaunch& launch_, FwdStorage<Config>& storage_)
      : launch(launch_), params(launch_.params), storage(storage_) {}

  __device__ __forceinline__ const CUtensorMap& map() const { return kOperand == kV ? launch.v_map : launch.k_map; }
  __device__ __forceinline__ const MatrixStrides& strides() const {
    return kOperand == kV ? params.v_strides : params.k_strides;
  }
  __device__ __forceinline__ int head_dim() const { return kOperand == kV ? params.d_v : params.d; }
  __device__ __forceinline__ const Element* pool() const {
    return static_cast<const Element*>(kOperand == kV ? params.v_ptr : params.k_ptr);
  }
  __device__ __forceinline__ Barrier& landed() const {
    return (kOperand == kV ? storage.v_full : storage.k_full)[state.stage];
  }
  __device__ __forceinline__ Element* buffer() const {
    return kOperand == kV ? &storage.v[state.stage][0] : &storage.k[state.stage][0];
  }
  __device__ __forceinline__ void wait_for_buffer() const {
    (kOperand == kV ? storage.v_empty : storage.k_empty)[state.stage].wait(state.phase ^ 1);
  }

  __device__ __forceinline__ PageRow find(const WorkTile& tile, int key, bool exists = true) const {
    const int* const table = params.paged.block_table + tile.batch * params.paged.block_table_stride;
    return page_row(params.paged, table, tile.k_begin + key, exists);
  }

  // A block of visible keys by boxes of page_box_rows rows: no box crosses a page. An invalid page (-1) is outside the
  // tensor map and reads as zeros.
  __device__ __forceinline__ void load_boxes(const WorkTile& tile, int head, int key) {
    const int box_rows = launch.page_box_rows, boxes = Config::kBlockN / box_rows * kAtoms;
    const int lane = threadIdx.x % 32, box_bytes = bytes(box_rows * Config::kAtomCols);
    wait_for_buffer();
    landed().arrive_and_expect((boxes - lane + 31) / 32 * box_bytes);
#pragma unroll 1  // a lane has one box or a few; unrolling costs registers
    for (int box = lane; box < boxes; box += 32) {
      const int row = box / kAtoms * box_rows, col = box % kAtoms * Config::kAtomCols;
      const PageRow at = find(tile, key + row);
      cute::SM90_TMA_LOAD_5D::copy(&map(), &landed().state, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST),
                                   buffer() + col * Config::kBlockN + row * Config::kAtomCols, col, at.row, head,
                                   at.valid ? at.page : -1, 0);
    }
    state.advance();
  }

  // A block by single rows. Keys beyond the sequence, keys before `unmasked_begin_key` (their pages may have been
  // reused) and keys of invalid pages become 0, so that NaN there never reaches the tensor cores.
  __device__ __forceinline__ void load_rows(const WorkTile& tile, int head, int first_key, int unmasked_begin_key) {
    const int lane = threadIdx.x % 32, vector = lane % kVectors;
    int page[kGroups];  // page of one row of each group; -1: none
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int key = first_key + 32 * i + lane;
      const PageRow at = find(tile, key, key >= unmasked_begin_key && key < tile.seqlen_k);
      page[i] = at.valid ? at.page : -1;
    }
    wait_for_buffer();
    const uint32_t smem = cute::cast_smem_ptr_to_uint(buffer());
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int row_of_lane = tile.k_begin + first_key + 32 * i + lane;
      const int row_of_page = row_of_lane - params.paged.page_size.divide(row_of_lane) * params.paged.page_size.divisor;
      copy_rows(head, page[i] < 0 ? -1 : page[i] * strides().batch + row_of_page * strides().row, smem, 32 * i, vector);
    }
    // No lane sees another lane's copies complete: each waits for its own, fences them for the tensor cores, and
    // arrives. The next block uses another stage, so there is time for that.
    cute::cp_async_wait<0>();
    fence_buffer();
    landed().arrive();
    state.advance();
  }

  // 32 rows; `found`: element offset in the pool of the row that this lane looked up, or -1.
  __device__ __forceinline__ void copy_rows(int head, int64_t found, uint32_t smem, int first_row, int vector) const {
    const int lane_row = threadIdx.x % 32 / kVectors;
#pragma unroll 1
    for (int first = 0; first < 32; first += kRowsPerIteration) {
      const int64_t offset = __shfl_sync(0xffffffffu, found, first + lane_row);
      const Element* const source = pool() + head * strides().head + (offset < 0 ? 0 : offset) + vector * kVectorCols;
      const int row = first_row + first + lane_row;
      const uint32_t target = smem + bytes(swizzle_offset(Config::kAtomCols, row, vector));
#pragma unroll
      for (int col = 0; col < kAtoms * Config::kAtomCols; col += Config::kAtomCols) {
        copy_vector(target + bytes(col * Config::kBlockN), source + col,
                    offset >= 0 && col + vector * kVectorCols < head_dim());
      }
    }
  }

  __device__ __forceinline__ void run() {
    WorkPipeline<Config> pipeline(storage);
    for (FwdWork<Config> work = pipeline.wait_and_release(); work.exists(); work = pipeline.wait_and_release()) {
      const WorkTile& tile = work.tile;
      const int head = launch.group.divide(tile.head);
      const bool fits = launch.page_box_rows > 0 && tile.k_begin % launch.page_box_rows == 0;
      // The sequence's first visible key, not this tile's: load_rows() is slower than boxes.
      const int unmasked_begin_key = first_visible_key(mask_of<Config>(params, work.tile));
      for (int i = 0; i < work.order.count(); ++i) {
        const int key = block_to_load<Config>(work.order, i) * Config::kBlockN;
        if (fits && key >= unmasked_begin_key && key + Config::kBlockN <= tile.seqlen_k) {
          load_boxes(tile, head, key);
        } else {
          load_rows(tile, head, key, unmasked_begin_key);
        }
      }
    }
  }
};

}  // namespace sm90
}  // namespace flash
