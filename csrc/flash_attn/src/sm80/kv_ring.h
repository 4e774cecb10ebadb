// The stream of K and V into shared memory. Every group of warps has a ring of stages that runs ahead of the
// arithmetic, also from one tile into the next, and meets no other group.
#pragma once

#include "common/kv_walk.h"
#include "common/pdl.h"
#include "sm80/kv_config.h"
#include "sm80/warp_ops.h"

namespace flash {

// The barriers of a thread block beside __syncthreads().
enum NamedBarrier : int { kFirstGroupBarrier = 1 };  // + group, for Config::kGroupThreads threads

template <class Config>
__device__ __forceinline__ void sync_group() {
  if constexpr (Config::kRowWarps == 1) {
    __syncwarp();
  } else {
    sync_named(kFirstGroupBarrier + threadIdx.x / Config::kGroupThreads, Config::kGroupThreads);
  }
}

template <class Config>
struct KvRing {
  using Element = typename Config::Element;
  using Swizzle = typename Config::Swizzle;
  static constexpr int kLanesPerRow = Config::kLanesPerRow;

  const Flash_kvcache_params& params;
  Element* const stages;            // of this group
  KvWalk walk;                      // at the tile of the next step to load
  int block;                        // of the next step to load
  int fill = 0;                     // the stage that takes the next step
  int use = 0;                      // the stage of the step under way
  const Element* k_head = nullptr;  // row 0 of the sequence's K/V head, or of its page 0
  const Element* v_head = nullptr;
  int page = 0;  // where the row of this lane (lane % kStep) of the next step lies
  int page_row = 0;
  uint32_t missing_bits = 0;  // bit i: the step loaded i steps ago has keys in pages outside of the pool
  bool may_read_new = false;  // the kernel that appends has finished

  // first: the tile with which the thread block begins.
  __device__ __forceinline__ KvRing(const Flash_kvcache_params& params_, const KvWalk& first, Element* stages_)
      : params(params_), stages(stages_ + group() * params_.stages * Config::kStageElements), walk(first) {
    enter_tile();
    for (int i = 0; i + 1 < params.stages; ++i) issue();
  }

  __device__ __forceinline__ static int group() { return threadIdx.x / Config::kGroupThreads; }
  __device__ __forceinline__ static int row_warp() { return threadIdx.x / 32 % Config::kRowWarps; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ bool is_paged() const { return params.paged.block_table != nullptr; }

  __device__ __forceinline__ const Element* k_stage() const { return stages + use * Config::kStageElements; }
  __device__ __forceinline__ const Element* v_stage() const { return k_stage() + Config::kStep * Config::kHeadDim; }

  // Between two steps, 16 rows of fp32 results fit into the stage that the next issue() fills.
  __device__ __forceinline__ float* spare_stage(int of_group) const {
    Element* const first = stages + (of_group - group()) * params.stages * Config::kStageElements;
    return reinterpret_cast<float*>(first + fill * Config::kStageElements);
  }

  // Loads the next step, if there is one. The stage it fills must have been released.
  __device__ __forceinline__ void issue() {
    missing_bits <<= 1;
    if (!walk.done()) {
      load_step();
      if (++block >= walk.block_end()) {
        walk.next();
        enter_tile();
      } else {
        find_page();
      }
    }
    commit_copies();
    fill = fill + 1 == params.stages ? 0 : fill + 1;
  }

  // The oldest step in flight has landed, for all warps of the group.
  __device__ __forceinline__ void wait() {
    wait_for_copies_but(params.stages - 1);
    sync_group<Config>();
  }

  // Every warp of the group is done with the step.
  __device__ __forceinline__ void release() {
    sync_group<Config>();
    use = use + 1 == params.stages ? 0 : use + 1;
  }

  __device__ __forceinline__ bool step_misses_pages() const { return missing_bits >> (params.stages - 1) & 1; }

  __device__ __forceinline__ void finish() {
    if (params.seqlen_new > 0 && !may_read_new) wait_for_previous_kernel();
  }

 private:
  // Goes on to the next tile with keys and finds its first page.
  __device__ __forceinline__ void enter_tile() {
    while (!walk.done() && walk.block_begin() >= walk.block_end()) walk.next();
    if (walk.done()) return;
    block = walk.block_begin();
    const KvRequest& request = walk.request;
    const int64_t row = is_paged() ? 0 : request.first_row;
    const int64_t batch = is_paged() ? 0 : request.cache_row;
    k_head = static_cast<const Element*>(params.k_ptr) + batch * params.k_strides.batch + row * params.k_strides.row +
             walk.head * params.k_strides.head;
    v_head = static_cast<const Element*>(params.v_ptr) + batch * params.v_strides.batch + row * params.v_strides.row +
             walk.head * params.v_strides.head;
    find_page();
  }

  __device__ __forceinline__ int key_begin() const { return block * Config::kBlockN + group() * Config::kStep; }

  // Where the row of this lane lies; a table entry is asked for one step ahead, so that its latency is hidden.
  __device__ __forceinline__ void find_page() {
    const int key = key_begin() + lane() % Config::kStep;
    if (!is_paged()) {
      page_row = key;  // k_head is at key 0
      return;
    }
    const int row = walk.request.first_row + key;
    const int slot = params.paged.page_size.divide(row);
    page_row = row - slot * params.paged.page_size.divisor;
    page = key < walk.request.seqlen_k
               ? params.paged.block_table[walk.request.index * params.paged.block_table_stride + slot]
               : 0;
  }

  __device__ __forceinline__ void load_step() {
    const int keys = walk.request.refused ? 0 : walk.request.seqlen_k - key_begin();  // of this step on
    if (params.seqlen_new > 0 && !may_read_new && step_reads_new_rows()) {
      wait_for_previous_kernel();
      may_read_new = true;
    }
    int found = page;  // -1: nowhere
    if (is_paged()) {
      const bool in_pool = static_cast<unsigned>(page) < static_cast<unsigned>(params.paged.num_pages);
      const bool missing = lane() % Config::kStep < keys && !in_pool;
      missing_bits |= __any_sync(0xffffffffu, missing) ? 1 : 0;
      if (!in_pool) found = -1;
    }
    Element* const k_to = stages + fill * Config::kStageElements;
    Element* const v_to = k_to + Config::kStep * Config::kHeadDim;
    if (params.kv_bytes < 16) {
      copy_narrow(k_head, params.k_strides, found, keys, k_to);
      copy_narrow(v_head, params.v_strides, found, keys, v_to);
    } else if (!step_is_strided()) {
      copy_scattered(k_head, params.k_strides, found, keys, k_to);
      copy_scattered(v_head, params.v_strides, found, keys, v_to);
    } else {
      // If a row of the step has a key, the first one has.
      found = __shfl_sync(0xffffffffu, found, 0);
      const int64_t row = page_row - lane() % Config::kStep, at = max(found, 0);
      const Element* const k_from = k_head + at * params.k_strides.batch + row * params.k_strides.row;
      const Element* const v_from = v_head + at * params.v_strides.batch + row * params.v_strides.row;
      if (found >= 0 && keys >= Config::kStep && params.d == Config::kHeadDim) {
        copy_rows<false>(k_from, params.k_strides.row, keys, k_to);
        copy_rows<false>(v_from, params.v_strides.row, keys, v_to);
      } else {
        copy_rows<true>(k_from, params.k_strides.row, found >= 0 ? keys : 0, k_to);
        copy_rows<true>(v_from, params.v_strides.row, found >= 0 ? keys : 0, v_to);
      }
    }
  }

  // Narrow reads go through the L1 cache, which would keep the old contents of a line that old and new rows share.
  __device__ __forceinline__ bool step_reads_new_rows() const {
    return walk.request.first_row + key_begin() + Config::kStep > walk.request.cached || params.kv_bytes < 16;
  }

  // The rows of a step are neighbours, within one page. (Rows without a key may lie anywhere: they are not read.)
  __device__ __forceinline__ bool step_is_strided() const {
    return !is_paged() ||
           (params.paged.page_size.divisor % Config::kStep == 0 && walk.request.first_row % Config::kStep == 0);
  }

  // rows(row of the step, pass) -> Row. kBounded: rows that are not valid, and columns beyond the head dim, become
  // zeros.
  template <bool kBounded, class Rows>
  __device__ __forceinline__ void copy(const Rows& rows, Element* to) const {
    const int lane_row = lane() / kLanesPerRow, lane_chunk = lane() % kLanesPerRow;
    const int row0 = row_warp() * Config::kWarpRows + lane_row;
    const int place0 = lane_chunk ^ Swizzle::key(lane_row);
#pragma unroll
    for (int i = 0; i < Config::kRowPasses; ++i) {
      // lane_row and the first row of a pass have no bits of the key in common.
      const int place = place0 ^ Swizzle::key(i * Config::kRowsPerPass);
      const int row = row0 + i * Config::kRowsPerPass;
      const Row from = rows(row, i);
#pragma unroll
      for (int j = 0; j < Config::kColPasses; ++j) {
        const int col = (lane_chunk + j * kLanesPerRow) * 8;
        Element* const chunk = to + row * Config::kHeadDim + Swizzle::next(place, j * kLanesPerRow) * 8;
        if constexpr (kBounded) {
          copy16_async(chunk, from.data + col, from.valid && col < params.d);
        } else {
          copy16_async(chunk, from.data + col);
        }
      }
    }
  }

  struct Row {
    const Element* data;
    bool valid;
  };

  // `keys` rows of a strided matrix.
  template <bool kBounded>
  __device__ __forceinline__ void copy_rows(const Element* rows, int64_t stride, int keys, Element* to) const {
    const int row0 = row_warp() * Config::kWarpRows + lane() / kLanesPerRow;
    const Element* const first = rows + row0 * stride;
    const int64_t pass = Config::kRowsPerPass * stride;
    copy<kBounded>([&](int row, int i) { return Row{first + i * pass, row < keys}; }, to);
  }

  // Lane `row` knows where a row lies: `found` is its page.
  __device__ __forceinline__ Row scattered_row(const Element* head, const MatrixStrides& strides, int found, int keys,
                                               int row) const {
    const int at = __shfl_sync(0xffffffffu, found, row);
    const int at_row = __shfl_sync(0xffffffffu, page_row, row);
    const int64_t offset = at < 0 ? 0 : at * strides.batch + at_row * strides.row;
    return {head + offset, at >= 0 && row < keys};
  }

  __device__ __forceinline__ void copy_scattered(const Element* head, const MatrixStrides& strides, int found, int keys,
                                                 Element* to) const {
    copy<true>([&](int row, int) { return scattered_row(head, strides, found, keys, row); }, to);
  }

  // Rows that 16-byte accesses cannot read, in pieces of 4 or of 2 bytes. Small code rather than fast.
  __device__ __forceinline__ void copy_narrow(const Element* head, const MatrixStrides& strides, int found, int keys,
                                              Element* to) const {
    const int first_row = row_warp() * Config::kWarpRows;
#pragma unroll 1
    for (int row = first_row; row < first_row + Config::kWarpRows; ++row) {
      const Row from = scattered_row(head, strides, found, keys, row);
#pragma unroll 1
      for (int chunk = lane(); chunk < Swizzle::kChunks; chunk += 32) {
        copy_chunk(from.data + chunk * 8, from.valid ? params.d - chunk * 8 : 0,
                   to + row * Config::kHeadDim + (chunk ^ Swizzle::key(row)) * 8);
      }
    }
  }

  __device__ __forceinline__ void copy_chunk(const Element* from, int count, Element* to) const {
    if (params.kv_bytes == 4) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) copy4_async(to + i, from + i, i < count);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = i < count ? from[i] : Element(0.0f);
    }
  }
};

}  // namespace flash
