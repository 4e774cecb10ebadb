// dK and dV of head dims above 256: a thread block has 64 keys of a K/V head and half of the columns of dK and dV, and
// visits every m_block that sees these keys, for all query heads of the group. Scores are transposed (keys x queries),
// so that they are left operands from registers:
//
//   [C0]  S │ P │ dV += P^T dO │ S' │ …
//   [C1]  dP │ dS │ dK += dS^T Q │ dP' │ …
//
// Clocks of a step, of an SM: tensor cores 3072 (S, dP 2048); shared memory 3456 (S, dP 1792, dK, dV 512, P 128, Q and
// dO written 1024). The chunks of the half of Q and dO whose gradients are wanted come last and stay until these are
// added; the others pass through a short ring.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/visible_range.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/pdl.h"
#include "kernels/common/row_store.h"
#include "kernels/common/shared_storage.h"
#include "kernels/common/warp_index.h"
#include "kernels/sm90/bwd_row_values.h"
#include "kernels/sm90/bwd_steps.h"
#include "kernels/sm90/bwd_tile_loader.h"
#include "kernels/sm90/wide_bwd/products.h"
#include "kernels/tma/pipeline_state.h"
#include "plan/sm90_smem.h"

namespace flash {
namespace sm90 {

// The stream of one consumer's scores: Q, or dO. `other`: chunks that these scores alone read. `own`: chunks of the
// wanted half, which the other consumer reads too.
template <class Config>
struct WideStream {
  using Element = typename Config::Element;
  alignas(1024) Element own[Config::kHalfChunks][Config::kChunkElements];
  alignas(1024) Element other[Config::kOtherSlots][Config::kChunkElements];
  alignas(1024) Element resident[Config::kLoadedChunks][Config::kChunkElements];  // K, or V
};

struct WideStreamBarriers {
  static constexpr int kChunks = 4, kSlots = plan::kSm90WideOtherSlots;
  tma::Barrier own_full[kChunks], own_empty[kChunks], other_full[kSlots], other_empty[kSlots];
  tma::Barrier resident_full, held, landed;  // landed: of chunks with rows to clear before they are full

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kChunks; ++i) own_full[i].init(1), own_empty[i].init(8);
    for (int i = 0; i < kSlots; ++i) other_full[i].init(1), other_empty[i].init(4);
    resident_full.init(1), held.init(4), landed.init(1);
  }
};

template <class Config>
struct WideDkvStorage {
  WideStream<Config> streams[2];  // Q and K, dO and V
  alignas(16) float p[64 * 64];
  alignas(16) float lse_log2[Config::kStatisticsStages][Config::kBlockM];
  alignas(16) float softmax_d[Config::kStatisticsStages][Config::kBlockM];
  WideStreamBarriers barriers[2];
  tma::Barrier p_full, p_empty;
  tma::Barrier statistics_full[Config::kStatisticsStages], statistics_empty[Config::kStatisticsStages];

  __device__ __forceinline__ void init_barriers() {
    for (WideStreamBarriers& stream : barriers) stream.init();
    p_full.init(128), p_empty.init(128);
    for (int i = 0; i < Config::kStatisticsStages; ++i) statistics_full[i].init(32), statistics_empty[i].init(8);
    tma::Barrier::fence_init();
  }
};

// The column chunk that comes at position `chunk`: the wanted half comes last.
template <class Config>
__device__ __forceinline__ int column_chunk(int chunk, int half) {
  return (chunk + (half + 1) * Config::kHalfChunks) % Config::kChunks;
}

// A warp for each stream: 0 Q and K, 1 dO and V.
template <class Config>
struct WideDkvLoader : BwdTileLoader<Config> {
  const BwdTwoPassLaunch& launch;
  WideStream<Config>& stream;
  WideStreamBarriers& barriers;
  const int index, half;

  __device__ __forceinline__ WideDkvLoader(const BwdTwoPassLaunch& launch_, WideDkvStorage<Config>& storage, int index_,
                                           int half_)
      : BwdTileLoader<Config>(storage.barriers[index_].landed),
        launch(launch_),
        stream(storage.streams[index_]),
        barriers(storage.barriers[index_]),
        index(index_),
        half(half_) {}

  __device__ __forceinline__ void load_resident(const BwdWorkTile& tile, int first_key) {
    const tma::TmaRows rows(launch.params.is_varlen(), tile.batch, tile.k_begin, tile.seqlen_k);
    const CUtensorMap& map = index == 0 ? launch.k_map : launch.v_map;
    const int key = tile.n_block * Config::kBlockN;
    const bool clears = first_key > key;
    tma::Barrier& full = clears ? barriers.landed : barriers.resident_full;
    constexpr int kBytes = Config::kChunkElements * static_cast<int>(sizeof(typename Config::Element));
    if (this->is_elected) {
      full.arrive_and_expect(Config::kChunks * kBytes);
      for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
        tma::load_tile<1, Config::kAtomCols, 64>(map, full, place(chunk), rows, key, tile.head_k,
                                                 cute::TMA::CacheHintSm90::EVICT_FIRST,
                                                 column_chunk<Config>(chunk, half) * Config::kAtomCols);
      }
    }
    if (!clears) return;
    full.wait(this->pre_clear_phase);
    this->pre_clear_phase ^= 1;
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      tma::clear_rows<64, 1, Config::kAtomCols>(place(chunk), min(first_key - key, 64));
    }
    if (this->is_elected) barriers.resident_full.arrive();
  }

  // Where a resident chunk lands. Chunks that are held in registers land in the ring.
  __device__ __forceinline__ typename Config::Element* place(int chunk) const {
    return chunk < Config::kHeldChunks ? stream.other[chunk] : stream.resident[chunk - Config::kHeldChunks];
  }

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    const MaskOf<Config> visibility = mask_of<Config>(launch.params, tile);
    const int first_row = first_visible_row(visibility);
    const tma::TmaRows rows(launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
    const CUtensorMap& map = index == 0 ? launch.q_map : launch.do_map;
    const BwdSteps<Config> order = bwd_steps<Config>(launch.params, launch.mask, tile);
    const int count = order.count();
    if (count == 0) return;
    load_resident(tile, first_visible_key(visibility));
    BwdStep<Config> at = order.start();
    tma::PipelineState<Config::kOtherSlots> state;
    barriers.held.wait(0);
    for (int i = 0; i < count; ++i) {
      const int row = at.m_block * Config::kBlockM;
      const auto load = [&](tma::Barrier& full, typename Config::Element* to, int chunk) {
        this->template load<64, Config::kAtomCols>(map, full, to, rows, row, first_row, at.head,
                                                   cute::TMA::CacheHintSm90::EVICT_LAST,
                                                   column_chunk<Config>(chunk, half) * Config::kAtomCols);
      };
#pragma unroll 1
      for (int chunk = 0; chunk < Config::kHalfChunks; ++chunk) {
        barriers.other_empty[state.stage].wait(state.phase ^ 1);
        load(barriers.other_full[state.stage], stream.other[state.stage], chunk);
        state.advance();
      }
#pragma unroll 1
      for (int chunk = 0; chunk < Config::kHalfChunks; ++chunk) {
        barriers.own_empty[chunk].wait((i & 1) ^ 1);
        load(barriers.own_full[chunk], stream.own[chunk], Config::kHalfChunks + chunk);
      }
      order.advance(at);
    }
  }
};

// LSE and softmax_d of the rows of each step, by one warp, as load_statistics().
template <class Config>
__device__ __forceinline__ void load_wide_statistics(const BwdTwoPassLaunch& launch, WideDkvStorage<Config>& storage,
                                                     const BwdWorkTile& tile) {
  const Flash_bwd_params& params = launch.params;
  const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
  const int first_row = first_visible_row(mask_of<Config>(params, tile)), lane = threadIdx.x % 32;
  const int count = order.count();
  BwdStep<Config> at = order.start();
  tma::PipelineState<Config::kStatisticsStages> state;
  for (int i = 0; i < count; ++i) {
    const float* const lse = params.softmax_lse_ptr + lse_offset(params, tile.batch, at.head, tile.q_begin);
    const float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, at.head, tile.q_begin);
    float lse_log2[2], softmax_d[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = at.m_block * Config::kBlockM + 32 * j + lane;
      const bool valid = row >= first_row && row < tile.seqlen_q;
      lse_log2[j] = valid ? lse_or_inf(lse[row]) * ScoreMod::kLog2e : INFINITY;
      softmax_d[j] = valid ? delta[row] : 0.0f;
    }
    storage.statistics_empty[state.stage].wait(state.phase ^ 1);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      storage.lse_log2[state.stage][32 * j + lane] = lse_log2[j];
      storage.softmax_d[state.stage][32 * j + lane] = softmax_d[j];
    }
    storage.statistics_full[state.stage].arrive();
    state.advance();
    order.advance(at);
  }
}

// kIndex 0: S, P and dV. 1: dP, dS and dK.
template <class Config, int kIndex>
struct WideDkvConsumer {
  using Element = typename Config::Element;
  using Coords = TransposedCoords<AccumulatorCoords<4>>;  // rows: queries of the m_block; columns: keys
  static constexpr int kOther = 1 - kIndex;

  const BwdTwoPassLaunch& launch;
  const Flash_bwd_params& params;
  WideDkvStorage<Config>& storage;
  const int half;
  const Coords coords;
  const bool arrives = threadIdx.x % 32 == 0;  // for its warp
  tma::PipelineState<Config::kOtherSlots> slot;
  tma::PipelineState<Config::kStatisticsStages> statistics;
  WideBwdProducts<Config> products;

  __device__ __forceinline__ WideDkvConsumer(const BwdTwoPassLaunch& launch_, WideDkvStorage<Config>& storage_,
                                             int half_)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        half(half_),
        coords{AccumulatorCoords<4>(threadIdx.x % 128)} {}

  __device__ __forceinline__ void arrive(tma::Barrier& barrier) const {
    if (arrives) barrier.arrive();
  }

  __device__ __forceinline__ void hold() {
    WideStreamBarriers& barriers = storage.barriers[kIndex];
    barriers.resident_full.wait(0);
#pragma unroll
    for (int chunk = 0; chunk < Config::kHeldChunks; ++chunk)
      products.hold(chunk, storage.streams[kIndex].other[chunk]);
    tma::fence_buffer();  // the ring's first chunks land here next
    __syncwarp();
    arrive(barriers.held);
  }

  // S or dP; releases the chunks that nobody else reads. step: parity of the step.
  template <int kChunk>
  __device__ __forceinline__ void compute_chunks(uint32_t step, int previous) {
    if constexpr (kChunk < Config::kChunks) {
      constexpr bool kIsOther = kChunk < Config::kHalfChunks;
      WideStream<Config>& stream = storage.streams[kIndex];
      WideStreamBarriers& barriers = storage.barriers[kIndex];
      const int stage = slot.stage;
      if constexpr (kIsOther) {
        barriers.other_full[stage].wait(slot.phase);
        products.template start_scores<kChunk, Config::kOtherSlots>(stream.resident[0], stream.other[0], stage);
        slot.advance();
      } else {
        constexpr int kOwn = kChunk - Config::kHalfChunks;
        barriers.own_full[kOwn].wait(step);
        products.template start_scores<kChunk, Config::kHalfChunks>(stream.resident[0], stream.own[0], kOwn);
      }
      if constexpr (kChunk > 0 && kChunk <= Config::kHalfChunks) {
        products.template wait<1>();
        arrive(barriers.other_empty[previous]);
      }
      compute_chunks<kChunk + 1>(step, stage);
    }
  }

  __device__ __forceinline__ void release_own(int stream) const {
#pragma unroll
    for (int chunk = 0; chunk < Config::kHalfChunks; ++chunk) arrive(storage.barriers[stream].own_empty[chunk]);
  }

  // The gradient of a step, from the stream of the other consumer.
  __device__ __forceinline__ void add_gradient(uint32_t step) {
    products.pack_operand();
#pragma unroll
    for (int chunk = 0; chunk < Config::kHalfChunks; ++chunk) storage.barriers[kOther].own_full[chunk].wait(step);
    products.start_half(storage.streams[kOther].own[0]);
    products.wait_for_gradient();
    release_own(kOther);
  }

  __device__ __forceinline__ void make_p(const BwdWorkTile& tile, const BwdStep<Config>& at, uint32_t step) {
    const TileCoords tile_coords{tile.batch, at.head, at.m_block * Config::kBlockM, tile.n_block * Config::kBlockN};
    auto scores = transposed_row_col_view(products.acc_s);
    const SmemRowValues<Coords> lse_log2{storage.lse_log2[statistics.stage], coords};
    mask_scores<Config::kBlockM, Config::kBlockN>(scores, coords, mask_of<Config>(params, tile), tile_coords);
    exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
    storage.p_empty.wait(step ^ 1);
    products.write_scores(storage.p);
    storage.p_full.arrive();
  }

  __device__ __forceinline__ void make_ds(uint32_t step) {
    auto dp = transposed_row_col_view(products.acc_s);
    subtract_softmax_d(dp, SmemRowValues<Coords>{storage.softmax_d[statistics.stage], coords});
    storage.p_full.wait(step);
    products.multiply_scores(storage.p);
    storage.p_empty.arrive();
  }

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    const BwdSteps<Config> order = bwd_steps<Config>(params, launch.mask, tile);
    const int count = order.count();
    BwdStep<Config> at = order.start();
    products.clear_gradient();
    if (count > 0) hold();
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const uint32_t step = i & 1;
      compute_chunks<0>(step, 0);
      products.wait_for_scores();
      release_own(kIndex);
      storage.statistics_full[statistics.stage].wait(statistics.phase);
      if constexpr (kIndex == 0) {
        make_p(tile, at, step);
      } else {
        make_ds(step);
      }
      __syncwarp();
      arrive(storage.statistics_empty[statistics.stage]);
      statistics.advance();
      add_gradient(step);
      order.advance(at);
    }
    if constexpr (kIndex == 0) {
      store(tile, params.dropout.keep_scale, params.dv_ptr, params.dv_strides, params.d_v);
    } else {
      store(tile, params.scale_softmax, params.dk_ptr, params.dk_strides, params.d);
    }
  }

  __device__ __forceinline__ void store(const BwdWorkTile& tile, float scale, void* data, const MatrixStrides& strides,
                                        int cols) {
#pragma unroll
    for (int i = 0; i < cute::size(products.gradient); ++i) products.gradient(i) *= scale;
    const int key = tile.n_block * Config::kBlockN, first_col = half * Config::kHalf;
    const int64_t offset = matrix_offset(strides, params.is_varlen(), tile.batch, tile.k_begin + key, tile.head_k);
    store_accumulator(products.gradient, threadIdx.x % 128, static_cast<Element*>(data) + offset + first_col,
                      strides.row, tile.seqlen_k - key, cols - first_col);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_bwd_wide_dkv_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {
  auto& storage = shared_storage<WideDkvStorage<Config>, plan::sm90_wide_dkv_smem_bytes(Config::kDtype)>();
  if (threadIdx.x == 0) storage.init_barriers();
  wait_for_previous_kernel();
  const int half = blockIdx.x % Config::kConsumers;
  const BwdWorkTile tile =
      bwd_work_tile_at(launch.params, Config::kBlockN, blockIdx.x / Config::kConsumers, launch.grid);
  __syncthreads();
  if (tile.empty(Config::kBlockN)) return;
  const int warp = warp_index(), group = warp / 4;
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if (warp < 2) WideDkvLoader<Config>(launch, storage, warp, half).run(tile);
    if (warp == 2) load_wide_statistics<Config>(launch, storage, tile);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if (group == 1) {
      WideDkvConsumer<Config, 0>(launch, storage, half).run(tile);
    } else {
      WideDkvConsumer<Config, 1>(launch, storage, half).run(tile);
    }
  }
}

}  // namespace sm90
}  // namespace flash
