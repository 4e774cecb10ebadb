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
  static_assert(kWarpKeys <= 32 && 32 % Config::kVectors == 0);

  const Flash_kvcache_params& params;
  KvWgmmaStorage<Config>& storage;
  WorkIterator<false> work;
  const int warp, lane = threadIdx.x % 32;
  int block = 0, block_end = 0;
  int64_t k_at = 0, v_at = 0;  // of the lane's key, in elements
  uint32_t exists = 0;         // a bit for each key of the warp

  __device__ __forceinline__ KvWgmmaProducer(const Flash_kvcache_params& params_, KvWgmmaStorage<Config>& storage_,
                                             int warp_)
      : params(params_), storage(storage_), work(params_, blockIdx.x, storage_.cta_work), warp(warp_) {}

  // To the next n_block of the thread block; false: there is none.
  __device__ __forceinline__ bool advance() {
    if (++block < block_end) return true;
    work.next();
    if (work.done()) return false;
    block = work.part.block_begin();
    block_end = work.part.block_end();
    return true;
  }

  // Rows before the first visible key, and those that do not exist, are not read.
  __device__ __forceinline__ void find_keys() {
    const WorkPart& part = work.part;
    const KvRequest& request = part.request;
    const int key = block * Config::kKeys + warp * kWarpKeys + lane % kWarpKeys;
    int first = 0;
    if (params.window.may_mask_left() && block == part.first_block) {
      first =
          first_visible_key(Visibility{kv_queries<true>(params, request.index).count, request.seqlen_k, params.window});
    }
    bool valid = request.is_valid() && !part.empty() && key >= first && key < request.seqlen_k;
    int64_t batch = request.cache_row, row = request.first_row + key;
    if (params.paged.block_table != nullptr) {
      const PageRow at = page_row(params.paged, KvPages(params, request.index).table, static_cast<int>(row), valid);
      valid = valid && at.valid;
      batch = at.page, row = at.row;
    }
    const int64_t head = part.head_tile;
    k_at = valid ? batch * params.k_strides.batch + row * params.k_strides.row + head * params.k_strides.head : 0;
    v_at = valid ? batch * params.v_strides.batch + row * params.v_strides.row + head * params.v_strides.head : 0;
    exists = __ballot_sync(0xffffffffu, valid);
  }

  // Keys that do not exist become 0: NaN there would pass a probability of 0.
  __device__ __forceinline__ void copy(const void* from, int64_t at, Element* to) const {
    const Element* const vectors = static_cast<const Element*>(from) + lane % Config::kVectors * tma::kVectorCols;
#pragma unroll
    for (int i = 0; i < kWarpKeys / kRowsAtATime; ++i) {
      const int key = i * kRowsAtATime + lane / Config::kVectors;
      const int64_t offset = __shfl_sync(0xffffffffu, at, key);
      sm80::copy16_async(to + Config::vector_offset(Config::kKeys, warp * kWarpKeys + key, lane % Config::kVectors),
                         vectors + offset, exists >> key & 1);
    }
  }

  // The copies' landing is announced by themselves: a proxy fence here would wait for all copies in flight, so the
  // consumer has it.
  __device__ __forceinline__ void run() {
    bool more = advance();
    if (more) find_keys();
#pragma unroll 1
    for (int step = 0; more; ++step) {
      const int stage = step % Config::kStages;
      storage.empty[stage].wait((step / Config::kStages & 1) ^ 1);
      copy(params.k_ptr, k_at, storage.k[stage]);
      copy(params.v_ptr, v_at, storage.v[stage]);
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
