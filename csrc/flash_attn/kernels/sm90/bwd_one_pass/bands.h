// Before a one-pass wgmma backward, softmax_d_kernel() prepares the first band of heads (BwdBands). Its first thread
// blocks to start prepare the other bands here, before they take work tiles. Memory bounds this work: it occupies few
// multiprocessors while the others compute.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/visible_range.h"
#include "kernels/common/dot.h"
#include "kernels/common/dq_semaphore.h"
#include "kernels/common/pdl.h"
#include "kernels/common/seen_bits.h"
#include "kernels/common/sequence.h"
#include "kernels/sm90/bwd_one_pass/named_barriers.h"
#include "kernels/sm90/bwd_one_pass/storage.h"
#include "kernels/tma/bulk_reduce.h"
#include "kernels/tma/swizzle.h"
#include "kernels/tma/tile_copy.h"

namespace flash {
namespace sm90 {

using namespace tma;

// Acquires what was released with the increments, for this warp and for all that it signals afterwards, bulk copies
// too. All lanes poll: after a loop of one lane ptxas would take no branch for uniform.
__device__ __forceinline__ void wait_for_counter(const int* counter, int count) {
  while (__any_sync(0xffffffffu, dq_semaphore_peek(counter) < count)) {
  }
  fence_after_peek();
  fence_before_reductions();
}

// One of `preparing_shares` shares of the dQ tiles, which go round the shares' groups of 128 threads. Each group has a
// ring of dO and O.
template <class Config>
struct BandPreparation {
  using Element = typename Config::Element;
  static constexpr int kThreads = 128, kGroups = Config::kThreads / kThreads;
  static constexpr int kStages = plan::sm90_band_stages(Config::kTile);
  static constexpr int kVectors = Config::kHeadDim / kVectorCols;
  static constexpr int kRowsAtATime = kThreads / kVectors, kRows = Config::kBlockM / kRowsAtATime;  // of a thread
  static_assert(kRows <= kVectors);
  static_assert(kPreparingBarrier + kGroups + cutlass::arch::NamedBarrier::ReservedNamedBarrierCount <= 16);

  // In the place of BwdStorage, before it.
  struct Storage {
    alignas(1024) Element rows[kGroups][kStages][2][Config::kSmemQ];  // dO, O
    alignas(1024) float zeros[Config::kDqTile];
    Barrier full[kGroups][kStages];  // the group's first thread (1, plus the TMA bytes) -> the group
  };
  static_assert(sizeof(Storage) == plan::sm90_bands_smem_bytes(Config::kTile, Config::kDtype));

  const BwdLaunch& launch;
  const Flash_bwd_params& params;
  Storage& storage;
  const int thread, group;       // of the group; of the thread block
  const int first, stride, end;  // of the tiles

  __device__ __forceinline__ BandPreparation(const BwdLaunch& launch_, void* smem, int share)
      : launch(launch_),
        params(launch_.params),
        storage(*static_cast<Storage*>(smem)),
        thread(threadIdx.x % kThreads),
        group(__shfl_sync(0xffffffffu, threadIdx.x / kThreads, 0)),
        first(launch_.bands.first_dq_tile(1) + kGroups * share + group),
        stride(launch_.preparing_shares * kGroups),
        end(launch_.bands.end_dq_tile(launch_.bands.count - 1)) {}

  __device__ __forceinline__ void run() const {
    begin();
    int band = 1, tile = first;
    for (int stage = 0; stage < kStages; ++stage) load(tile + stage * stride, stage);
    PipelineState<kStages> state;
    while (true) {
      for (; band < launch.bands.count && tile >= launch.bands.end_dq_tile(band); ++band) count(band);
      if (tile >= end) break;
      storage.full[group][state.stage].wait(state.phase);
      if (launch.prepares_softmax_d) store_softmax_d(tile_at(tile), storage.rows[group][state.stage]);
      fence_buffer();
      cutlass::arch::NamedBarrier::sync(kThreads, kPreparingBarrier + group);
      load(tile + kStages * stride, state.stage);
      state.advance();
      tile += stride;
    }
    finish();
  }

  __device__ __forceinline__ void begin() const {
    for (int i = threadIdx.x; i < Config::kDqTile / 4; i += Config::kThreads) {
      reinterpret_cast<float4*>(storage.zeros)[i] = float4{};
    }
    if (thread == 0) {
      for (Barrier& full : storage.full[group]) full.init(1);
      Barrier::fence_init();
    }
    fence_buffer();
    __syncthreads();
  }

  // BwdStorage takes the place.
  __device__ __forceinline__ void finish() const {
    if (thread == 0) {
      cute::tma_store_wait<0>();
      for (Barrier& full : storage.full[group]) full.invalidate();
    }
    __syncthreads();
  }

  // Clears a tile's sums and loads its rows, if there are any; commits one bulk group, even an empty one: count()
  // relies on it. By the first warp.
  __device__ __forceinline__ void load(int index, int stage) const {
    if (thread >= 32) return;
    const bool exists = index < end;
    WorkTile tile;
    if (exists && launch.prepares_softmax_d) tile = tile_at(index);
    if (thread == 0) {
      if (exists) {
        cute::SM90_BULK_COPY_S2G::copy(storage.zeros, params.dq_accum_ptr + int64_t{index} * Config::kDqTile,
                                       sizeof(storage.zeros));
      }
      cute::tma_store_arrive();
      if (has_rows(tile)) {
        load_rows(tile, storage.full[group][stage], storage.rows[group][stage]);
      } else {
        storage.full[group][stage].arrive();
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_rows(const WorkTile& tile, Barrier& full,
                                            Element (&rows)[2][Config::kSmemQ]) const {
    constexpr int kAtoms = Config::kHeadDim / Config::kAtomCols;
    const TmaRows tma_rows(params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
    full.arrive_and_expect(sizeof(rows));
    load_tile<kAtoms, Config::kAtomCols, Config::kBlockM>(launch.do_map, full, rows[0], tma_rows, tile.row_begin,
                                                          tile.head, cute::TMA::CacheHintSm90::EVICT_NORMAL);
    load_tile<kAtoms, Config::kAtomCols, Config::kBlockM>(launch.o_map, full, rows[1], tma_rows, tile.row_begin,
                                                          tile.head, cute::TMA::CacheHintSm90::EVICT_FIRST);
  }

  __device__ __forceinline__ bool has_rows(const WorkTile& tile) const {
    return !tile.empty() && in_sequence(params, tile);
  }

  // After the group's barrier. All of its tiles of the band are done; the last kStages bulk groups are of later tiles.
  __device__ __forceinline__ void count(int band) const {
    if (thread == 0) {
      wait_for_reductions<kStages>();
      dq_semaphore_release(launch.tile_count_semaphore + band);
    }
    __syncwarp();
  }

  __device__ __forceinline__ WorkTile tile_at(int index) const {
    return launch.dq_tiles.at(params, Config::kBlockM, index);
  }

  // As softmax_d_kernel() has it.
  __device__ __forceinline__ void store_softmax_d(const WorkTile& tile,
                                                  const Element (&rows)[2][Config::kSmemQ]) const {
    if (!has_rows(tile)) return;
    const int lane = thread % kVectors, first = thread / kVectors;
    constexpr int kVectorsOfAtom = Config::kAtomCols / kVectorCols;
    const int atom = lane / kVectorsOfAtom * Config::kBlockM * Config::kAtomCols;
    uint4 dout[kRows], out[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = i * kRowsAtATime + first;
      const int offset = atom + swizzle_offset(Config::kAtomCols, row, lane % kVectorsOfAtom);
      dout[i] = *reinterpret_cast<const uint4*>(rows[0] + offset);
      out[i] = *reinterpret_cast<const uint4*>(rows[1] + offset);
    }
    float sums[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) sums[i] = dot<NativePairOf<Config::kDtype>>(dout[i], out[i]);
    const int in_tile = sum_over_lanes(sums, lane) * kRowsAtATime + first, row = tile.row_begin + in_tile;
    const Visibility visibility{tile.seqlen_q, tile.seqlen_k, params.window};
    const bool is_row = row < tile.row_end;
    bool has_keys = is_row && (Config::kListed || row >= first_visible_row(visibility));
    if constexpr (Config::kListed) {
      const uint32_t* const seen = seen_rows(params, launch.mask, tile.batch, tile.head, tile.q_begin, tile.segment);
      has_keys = has_keys && is_seen(seen, row);
    }
    float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, tile.head, tile.q_begin);
    if (is_row || !params.is_varlen()) delta[row] = has_keys ? sums[0] : 0.0f;
    // Padding, which a dense softmax_d has up to its number of rows.
    const int padding = tile.row_begin + Config::kBlockM + thread;
    if (!params.is_varlen() && tile.row_end == tile.seqlen_q && padding < params.d_rows) delta[padding] = 0.0f;
  }

  // A transposing reduction over kVectors lanes: leaves the total of one of kRows rows in sums[0] and returns its
  // index. Adds in the order of softmax_d_kernel(), a butterfly.
  __device__ __forceinline__ static int sum_over_lanes(float (&sums)[kRows], int lane) {
    int index = 0, distance = kVectors / 2;
#pragma unroll
    for (int count = kRows / 2; count > 0; count /= 2, distance /= 2) {
      const bool is_upper = lane & distance;
      if (is_upper) index += count;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float kept = is_upper ? sums[i + count] : sums[i], given = is_upper ? sums[i] : sums[i + count];
        sums[i] = kept + __shfl_xor_sync(0xffffffffu, given, distance);
      }
    }
#pragma unroll
    for (; distance > 0; distance /= 2) sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
    return index;
  }
};

// The load warp, before it announces a work tile. waited_for: the band of the last call.
template <class Config>
__device__ __forceinline__ void wait_until_prepared(const BwdLaunch& launch, int work_tile, int& waited_for) {
  const int band = launch.bands.band_of(work_tile);
  if (band == waited_for) return;
  waited_for = band;
  if (band > 0) {
    wait_for_counter(launch.tile_count_semaphore + band, launch.preparing_shares * BandPreparation<Config>::kGroups);
  }
}

// Takes shares until none is left: whoever waits for one knows that a thread block that has started took it.
template <class Config>
__device__ __forceinline__ void prepare_bands(const BwdLaunch& launch, void* smem) {
  int& taken = *static_cast<int*>(smem);
  wait_for_previous_kernel();  // it clears the counters
  while (true) {
    if (threadIdx.x == 0) taken = atomicAdd(launch.tile_count_semaphore + launch.bands.count, 1);
    __syncthreads();
    const int share = taken;
    fence_buffer();
    __syncthreads();
    if (share >= launch.preparing_shares) return;
    BandPreparation<Config>(launch, smem, share).run();
  }
}

}  // namespace sm90
}  // namespace flash
