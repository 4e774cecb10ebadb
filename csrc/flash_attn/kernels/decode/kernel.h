// The decode kernel of the mma.sync family: every CTA computes its range of the linearised n_blocks.
#pragma once

#include "kernels/common/dropout.h"
#include "kernels/decode/epilogue.h"
#include "kernels/decode/query.h"

namespace flash {
namespace decode {

// End of the n_blocks that are accumulated in registers before they are combined: the whole work part, or in
// batch-invariant mode one fixed 512-key split of it.
template <class Config>
__device__ __forceinline__ int split_end(const Flash_kvcache_params& params, const WorkPart& part, int begin) {
  if (Config::kPlain || params.split_blocks == kUnbounded) return part.block_end();
  const int64_t next_split = (static_cast<int64_t>(begin) / params.split_blocks + 1) * params.split_blocks;
  return static_cast<int>(min(next_split, static_cast<int64_t>(part.block_end())));
}

// Where the result of n_blocks [begin, end) of a work part goes.
struct PartialLocation {
  PartialKind kind;
  int64_t slot;
};

template <class Config>
__device__ __forceinline__ PartialLocation partial_location(const Flash_kvcache_params& params,
                                                            const KvRing<Config>& ring, const WorkPart& part, int begin,
                                                            int end) {
  if (!Config::kPlain && params.split_points.rule == SplitRule::kFixedSplits) {
    const int split = begin / params.split_blocks;
    if (part.empty() || (part.end_block - 1) / params.split_blocks == part.first_block / params.split_blocks) {
      return {PartialKind::kOutput, 0};
    }
    const int64_t work_item = static_cast<int64_t>(part.request.index) * params.row_tiles + part.row_tile;
    return {PartialKind::kPartial, (work_item * params.head_tiles + part.head_tile) * params.max_splits + split};
  }
  if (Config::kMayCluster && params.in_clusters &&
      kv_is_cluster_half(part.span, part.count(), ring.work.cta_blocks, blockIdx.x)) {
    return {PartialKind::kHalf, 0};
  }
  if (!part.whole()) return {PartialKind::kPartial, kv_slot(blockIdx.x, part.span)};
  if (Config::kPlain) return {PartialKind::kOutput, 0};
  return {end < part.block_end() ? PartialKind::kAccumulate : PartialKind::kOutput, blockIdx.x};
}

// Whether rows that the request needs outside of this tile's n_blocks lie in invalid pages: every tile of a request has
// to come to the same verdict. The tile's first part checks the rows before it, the last one those after it. All
// threads together.
__device__ __forceinline__ bool has_invalid_page_beside(const Flash_kvcache_params& params, const WorkPart& part) {
  if (params.paged.block_table == nullptr || params.is_varlen() || !part.request.is_valid()) return false;
  const KvRows needed = kv_required_rows(params, part.request);
  const KvPages pages(params, part.request.index);
  bool invalid = false;
  if (part.span.from == 0) {
    const int first = min(part.request.first_row + part.first_block * params.block_n, needed.end);
    invalid |= pages.has_invalid_page(needed.begin, first, threadIdx.x, blockDim.x);
  }
  if (part.span.to == part.count()) {
    const int last = max(part.request.first_row + part.end_block * params.block_n, needed.begin);
    invalid |= pages.has_invalid_page(last, needed.end, threadIdx.x, blockDim.x);
  }
  return __syncthreads_or(invalid);
}

// The m_blocks of this CTA range, each with the split of its keys in the range. One loop over all n_blocks: with an
// inner loop over those of a split, the code of ring.advance() would exist twice (10 to 40 % more time). Returns true
// if the other CTA of the cluster has the rest of the last m_block.
template <class Config>
__device__ __forceinline__ bool compute_attn_1rowblock_splitkv(const Flash_kvcache_params& params,
                                                               KvMainloop<Config>& mainloop, KvRing<Config>& ring,
                                                               typename Config::Element* q_rows, RowStats* stats) {
  const WorkPart& part = mainloop.part;
  int block = 0, begin = 0, end = 0;  // of the current split
  bool accumulates = false;           // the previous split left a sum in the workspace
  bool has_cluster_half = false;
  while (ring.advance()) {
    if (block == end) {
      if (Config::kPlain || block == part.block_end()) {  // a new work part, not another fixed split of it
        mainloop.enter_tile(ring.next_part());
        if (!ring.loads_query()) KvQuery<Config>{params, part, q_rows}.load();
        mainloop.has_invalid_page |= has_invalid_page_beside(params, part);
        block = part.block_begin();
      }
      begin = block;
      end = split_end<Config>(params, part, begin);
      mainloop.begin_split();
    }
    do {
      ring.wait();
      if (ring.loads_query() && block == begin) {
        __syncthreads();  // every thread copied some of it
        if constexpr (Config::kEightBit) KvQuery<Config>{params, part, q_rows}.narrow();
      }
      mainloop.step(block);
      ring.release();
    } while (++block < end && ring.advance_full());
    if (block < end) continue;
    const PartialLocation location = partial_location<Config>(params, ring, part, begin, end);
    KvEpilogue<Config>{params, part, ring, stats}.finish(mainloop, location.kind, location.slot, accumulates);
    accumulates = location.kind == PartialKind::kAccumulate;
    has_cluster_half = location.kind == PartialKind::kHalf;
  }
  return has_cluster_half;
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    flash_fwd_split_kernel(const __grid_constant__ Flash_kvcache_params params) {
  using Element = typename Config::Element;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (Config::kSwapAb) return;  // no plan names it there
#endif
  extern __shared__ __align__(128) char smem[];
  Element* const q_rows = reinterpret_cast<Element*>(smem);
  RowStats* const stats = reinterpret_cast<RowStats*>(smem + Config::kStatsAt);

  // The append kernel writes only new rows: the ring waits for it before it reads these.
  if (params.seqlen_new == 0) wait_for_previous_kernel();
  KvRing<Config> ring(params, find_cta_work(params, blockIdx.x, reinterpret_cast<int64_t*>(smem + Config::kScratchAt)),
                      smem);
  KvMainloop<Config> mainloop(params, ring, q_rows);
  const bool has_cluster_half = compute_attn_1rowblock_splitkv(params, mainloop, ring, q_rows, stats);
  ring.finish();
  if (Config::kMayCluster && params.in_clusters) {
    ClusterPair::sync();  // all clusters: under a stale schedule only one of the two CTAs may have a half
    if (has_cluster_half) KvEpilogue<Config>{params, mainloop.part, ring, stats}.combine_halves();
    ClusterPair::sync();  // DSMEM must outlive the other CTA's reads
  }
  if (params.dropout.rng_state != nullptr) store_rng_state(params.dropout);  // of a forward
}

}  // namespace decode
}  // namespace flash
