// The loads of the wgmma decode kernel.
#pragma once

#include "core/visible_range.h"
#include "kernels/common/paged_kv.h"
#include "kernels/common/pdl.h"
#include "kernels/decode/wgmma_config.h"
#include "kernels/decode/work_iterator.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace decode {

// Each warp copies a quarter of an n_block's keys. Its lanes look up the pages of the next n_block, one key each.
template <class Config>
struct KvWgmmaProducer {
  using Element = typename Config::Element;
  static constexpr int kWarpKeys = Config::kKeys / Config::kProducerWarps;
  static constexpr int kRowsAtATime = 32 / Config::kVectors;
  static constexpr int kRunKeys = 16;
  static_assert(kWarpKeys <= 32 && 32 % Config::kVectors == 0);
  static_assert(kWarpKeys % kRunKeys == 0 && kRunKeys % kRowsAtATime == 0, "a warp copies whole runs");

  const Flash_kvcache_params& params;
  KvWgmmaStorage<Config>& storage;
  WorkIterator<false> work;
  const int warp, lane = threadIdx.x % 32;
  int block = 0, block_end = 0;
  bool has_runs = true;            // every 16 keys from a multiple of 16 on are consecutive rows, of one page
  const Element *k_head, *v_head;  // row 0 of the sequence's K/V head, or of its page 0; this lane's columns
  int64_t k_at = 0, v_at = 0;      // of the lane's key, in elements
  uint32_t exists = 0;             // a bit for each key of the warp

  __device__ __forceinline__ KvWgmmaProducer(const Flash_kvcache_params& params_, KvWgmmaStorage<Config>& storage_,
                                             int warp_)
      : params(params_), storage(storage_), work(params_, blockIdx.x, storage_.cta_work), warp(warp_) {}

  __device__ __forceinline__ bool is_paged() const { return params.paged.block_table != nullptr; }

  // To the next n_block of the thread block; false: there is none.
  __device__ __forceinline__ bool advance() {
    if (++block < block_end) return true;
    work.next();
    if (work.done()) return false;
    enter_part();
    return true;
  }

  __device__ __forceinline__ const Element* head(const void* from, const MatrixStrides& strides) const {
    const int64_t batch = is_paged() ? 0 : work.part.request.cache_row, head_tile = work.part.head_tile;
    return static_cast<const Element*>(from) + batch * strides.batch + head_tile * strides.head +
           lane % Config::kVectors * tma::kVectorCols;
  }

  __device__ __forceinline__ void enter_part() {
    block = work.part.block_begin();
    block_end = work.part.block_end();
    k_head = head(params.k_ptr, params.k_strides);
    v_head = head(params.v_ptr, params.v_strides);
    has_runs =
        !is_paged() || (params.paged.page_size.divisor % kRunKeys == 0 && work.part.request.first_row % kRunKeys == 0);
  }

  // Keys before the first visible one, and those that do not exist, are not read, nor are pages without others.
  __device__ __forceinline__ void find_keys() {
    const WorkPart& part = work.part;
    const KvRequest& request = part.request;
    const int key = block * Config::kKeys + warp * kWarpKeys + lane % kWarpKeys;
    const int run = has_runs ? key & -kRunKeys : key, run_end = has_runs ? run + kRunKeys : key + 1;
    int first = 0;
    if (params.window.may_mask_left() && block == part.first_block) {
      first =
          first_visible_key(Visibility{kv_queries<true>(params, request.index).count, request.seqlen_k, params.window});
    }
    bool found = request.is_valid() && !part.empty() && run_end > first && run < request.seqlen_k;
    int64_t page = 0, row = request.first_row + key;
    if (is_paged()) {
      const PageRow at = page_row(params.paged, KvPages(params, request.index).table, static_cast<int>(row), found);
      found = found && at.valid;
      page = at.page, row = at.row;
    }
    k_at = found ? page * params.k_strides.batch + row * params.k_strides.row : 0;
    v_at = found ? page * params.v_strides.batch + row * params.v_strides.row : 0;
    exists = __ballot_sync(0xffffffffu, found && key >= first && key < request.seqlen_k);
  }

  // Keys that do not exist become 0: NaN there would pass a probability of 0.
  template <bool kHasRuns>
  __device__ __forceinline__ void copy(const Element* from, int64_t at, int64_t stride, Element* to) const {
    const Element* row = from;
#pragma unroll
    for (int i = 0; i < kWarpKeys / kRowsAtATime; ++i) {
      const int key = i * kRowsAtATime + lane / Config::kVectors;
      const bool is_next = kHasRuns && i * kRowsAtATime % kRunKeys != 0;
      row = is_next ? row + kRowsAtATime * stride : from + __shfl_sync(0xffffffffu, at, key);
      sm80::copy16_async(to + Config::vector_offset(Config::kKeys, warp * kWarpKeys + key, lane % Config::kVectors),
                         row, exists >> key & 1);
    }
  }

  template <bool kHasRuns>
  __device__ __forceinline__ void copy_block(int stage) const {
    copy<kHasRuns>(k_head, k_at, params.k_strides.row, storage.k[stage]);
    copy<kHasRuns>(v_head, v_at, params.v_strides.row, storage.v[stage]);
  }

  // The copies announce themselves where they land. A proxy fence here would wait for all of them: consumers have it.
  __device__ __forceinline__ void run() {
    bool more = advance();
    if (more) find_keys();
#pragma unroll 1
    for (int step = 0; more; ++step) {
      const int stage = step % Config::kStages;
      storage.empty[stage].wait((step / Config::kStages & 1) ^ 1);
      has_runs ? copy_block<true>(stage) : copy_block<false>(stage);
      storage.full[stage].arrive_after_copies();
      more = advance();
      if (more) find_keys();
    }
    allow_next_kernel();
    sm80::commit_copies();
    sm80::wait_for_copies_but(0);
  }
};

}  // namespace decode
}  // namespace flash
