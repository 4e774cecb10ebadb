// The KV-cache kernel of the mma.sync family: every thread block works through its stretch of key blocks.
#pragma once

#include "common/kv_output.h"
#include "sm80/kv_epilogue.h"
#include "sm80/kv_query.h"

namespace flash {

// What becomes of a run [begin, end) of the walk's tile, and where.
struct RunPlace {
  RunEnd end;
  int64_t slot;
};

__device__ __forceinline__ RunPlace run_place(const Flash_kvcache_params& params, const KvWalk& walk, int begin,
                                              int end) {
  if (params.cuts.rule == CutRule::kChunks) {
    const int run = begin / params.run_blocks;
    if (walk.range.count() <= 0 || (walk.range.end - 1) / params.run_blocks == walk.range.begin / params.run_blocks) {
      return {RunEnd::kOutput, 0};
    }
    const int64_t tile = static_cast<int64_t>(walk.item) * params.h_k + walk.head;
    return {RunEnd::kPartial, tile * params.max_runs + run};
  }
  if (!walk.whole()) return {RunEnd::kPartial, kv_slot(walk.index, walk.segment)};
  return {end < walk.block_end() ? RunEnd::kCarry : RunEnd::kOutput, walk.index};
}

// Do rows that the request needs, but that none of its row tiles before or after this one loads here, lie outside of
// the pool? Every tile of a request has to come to the same verdict. All threads together.
__device__ __forceinline__ bool misses_pages_beside(const Flash_kvcache_params& params, const KvWalk& walk) {
  if (params.paged.block_table == nullptr || !walk.request.served()) return false;
  const KvRows needed = kv_needed_rows(params, walk.request);
  const KvPages pages(params, walk.request.index);
  bool missing = false;
  if (walk.segment.from == 0) {
    const int first = min(walk.request.first_row + walk.range.begin * params.block_n, needed.end);
    missing |= pages.misses(needed.begin, first, threadIdx.x, blockDim.x);
  }
  if (walk.segment.to == kv_count(walk.range)) {
    const int last = max(walk.request.first_row + walk.range.end * params.block_n, needed.begin);
    missing |= pages.misses(last, needed.end, threadIdx.x, blockDim.x);
  }
  return __syncthreads_or(missing);
}

template <class Config>
__device__ __forceinline__ void run_tile(const Flash_kvcache_params& params, const KvWalk& walk,
                                         KvMainloop<Config>& mainloop, const KvEpilogue<Config>& epilogue) {
  mainloop.enter_tile();
  mainloop.misses_pages |= misses_pages_beside(params, walk);
  int begin = walk.block_begin();
  bool carries = false;
  do {
    const int64_t next_run = params.run_blocks == kUnbounded
                                 ? int64_t{kUnbounded}
                                 : (static_cast<int64_t>(begin) / params.run_blocks + 1) * params.run_blocks;
    const int end = static_cast<int>(min(next_run, static_cast<int64_t>(walk.block_end())));
    mainloop.run(begin, end);
    const RunPlace place = run_place(params, walk, begin, end);
    epilogue.finish(mainloop, place.end, place.slot, carries);
    carries = place.end == RunEnd::kCarry;
    begin = end;
  } while (begin < walk.block_end());
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    flash_fwd_split_kernel(const __grid_constant__ Flash_kvcache_params params) {
  using Element = typename Config::Element;
  extern __shared__ __align__(128) char smem[];
  Element* const q_rows = reinterpret_cast<Element*>(smem);
  RowStats* const stats = reinterpret_cast<RowStats*>(smem + Config::kStatsAt);
  int64_t* const scratch = reinterpret_cast<int64_t*>(smem + Config::kScratchAt);
  Element* const stages = reinterpret_cast<Element*>(smem + Config::kStagesAt);

  allow_next_kernel();
  const int index = blockIdx.x;
  const KvStart start = find_kv_start(params, index, scratch);
  KvWalk walk(params, index, start);
  KvRing<Config> ring(params, walk, stages);
  KvMainloop<Config> mainloop(params, walk, ring, q_rows);
  const KvEpilogue<Config> epilogue{params, walk, ring, stats};
  for (; !walk.done(); walk.next()) {
    KvQuery<Config>{params, walk, q_rows}.load();
    run_tile(params, walk, mainloop, epilogue);
  }
  ring.finish();
}

}  // namespace flash
