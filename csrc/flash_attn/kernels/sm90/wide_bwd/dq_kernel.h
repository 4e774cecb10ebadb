// dQ of head dims above 256: a thread block has 64 rows of a query head and visits the blocks of keys that they see.
//
//   [C0]  S │ P │ wait for dS │ dQ += dS K, columns 0 to 255 │ S' │ …
//   [C1]  dP │ dS │ dQ += dS K, the others │ dP' │ …
//
// A chunk of K is loaded anew as soon as dQ has its product, V passes through a ring.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/visible_range.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/mask.h"
#include "kernels/common/pdl.h"
#include "kernels/common/row_store.h"
#include "kernels/common/shared_storage.h"
#include "kernels/common/warp_index.h"
#include "kernels/sm90/bwd_launch_params.h"
#include "kernels/sm90/bwd_tile_loader.h"
#include "kernels/sm90/bwd_two_pass/dq_rows.h"
#include "kernels/sm90/wide_bwd/products.h"
#include "kernels/tma/pipeline_state.h"
#include "plan/sm90_smem.h"

namespace flash {
namespace sm90 {

template <class Config>
struct WideDqStorage {
  using Element = typename Config::Element;

  alignas(1024) Element resident[2][Config::kLoadedChunks][Config::kChunkElements];  // Q, dO
  alignas(1024) Element k[Config::kChunks][Config::kChunkElements];
  alignas(1024) Element v[Config::kValueSlots][Config::kChunkElements];
  alignas(1024) Element ds[Config::kChunkElements];
  alignas(16) float p[64 * 64];
  tma::Barrier resident_full[2], held[2];
  tma::Barrier k_full[Config::kChunks], k_empty[Config::kChunks];  // empty: by the consumer with these columns of dQ
  tma::Barrier v_full[Config::kValueSlots], v_empty[Config::kValueSlots];
  tma::Barrier landed[2];  // of chunks of K, of V, with rows to clear before they are full
  tma::Barrier p_full, p_empty, ds_full, ds_empty;

  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < 2; ++i) resident_full[i].init(1), held[i].init(4);
    for (tma::Barrier& barrier : k_full) barrier.init(1);
    for (tma::Barrier& barrier : k_empty) barrier.init(4);
    for (tma::Barrier& barrier : v_full) barrier.init(1);
    for (tma::Barrier& barrier : v_empty) barrier.init(4);
    for (tma::Barrier& barrier : landed) barrier.init(1);
    p_full.init(128), p_empty.init(128), ds_full.init(4), ds_empty.init(8);
    tma::Barrier::fence_init();
  }

  // Where a resident chunk of Q (0) or dO (1) lands. Chunks that are held in registers land in the ring of V.
  __device__ __forceinline__ Element* place(int which, int chunk) {
    return chunk < Config::kHeldChunks ? v[which * Config::kHeldChunks + chunk]
                                       : resident[which][chunk - Config::kHeldChunks];
  }
};

// A warp for Q and K, and one for dO and V.
template <class Config>
struct WideDqLoader : BwdTileLoader<Config> {
  const BwdTwoPassLaunch& launch;
  WideDqStorage<Config>& storage;
  const int which;

  __device__ __forceinline__ WideDqLoader(const BwdTwoPassLaunch& launch_, WideDqStorage<Config>& storage_, int which_)
      : BwdTileLoader<Config>(storage_.landed[which_]), launch(launch_), storage(storage_), which(which_) {}

  // Q or dO. Fully masked rows may hold anything: no other row's dQ depends on them.
  __device__ __forceinline__ void load_resident(const WorkTile& tile) const {
    if (!this->is_elected) return;
    const tma::TmaRows rows(launch.params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
    constexpr int kBytes = Config::kChunkElements * static_cast<int>(sizeof(typename Config::Element));
    tma::Barrier& full = storage.resident_full[which];
    full.arrive_and_expect(Config::kChunks * kBytes);
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      tma::load_tile<1, Config::kAtomCols, 64>(which == 0 ? launch.q_map : launch.do_map, full,
                                               storage.place(which, chunk), rows, tile.row_begin, tile.head,
                                               cute::TMA::CacheHintSm90::EVICT_FIRST, chunk * Config::kAtomCols);
    }
  }

  __device__ __forceinline__ void run(const WorkTile& tile, const BlockRange& range) {
    const Flash_bwd_params& params = launch.params;
    const tma::TmaRows rows(params.is_varlen(), tile.batch, tile.k_begin, tile.seqlen_k);
    const int first_key = first_visible_key(mask_of<Config>(params, tile)), head_k = tile.head / params.h_h_k_ratio;
    const auto load = [&](const CUtensorMap& map, tma::Barrier& full, typename Config::Element* to, int n_block,
                          int chunk) {
      this->template load<64, Config::kAtomCols>(map, full, to, rows, n_block * Config::kBlockN, first_key, head_k,
                                                 cute::TMA::CacheHintSm90::EVICT_LAST, chunk * Config::kAtomCols);
    };
    load_resident(tile);
    if (which == 0) {
      uint32_t parity = 1;
      for (int n_block = range.begin; n_block < range.end; ++n_block) {
#pragma unroll 1
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
          storage.k_empty[chunk].wait(parity);
          load(launch.k_map, storage.k_full[chunk], storage.k[chunk], n_block, chunk);
        }
        parity ^= 1;
      }
    } else {
      tma::PipelineState<Config::kValueSlots> state;
      storage.held[0].wait(0);
      storage.held[1].wait(0);
      for (int n_block = range.begin; n_block < range.end; ++n_block) {
#pragma unroll 1
        for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
          storage.v_empty[state.stage].wait(state.phase ^ 1);
          load(launch.v_map, storage.v_full[state.stage], storage.v[state.stage], n_block, chunk);
          state.advance();
        }
      }
    }
  }
};

// kIndex 0: S and P. 1: dP and dS. Both: their half of the columns of dQ.
template <class Config, int kIndex>
struct WideDqConsumer {
  using Element = typename Config::Element;
  using Coords = AccumulatorCoords<4>;

  const BwdTwoPassLaunch& launch;
  const Flash_bwd_params& params;
  WideDqStorage<Config>& storage;
  const Coords coords;
  const bool arrives = threadIdx.x % 32 == 0;  // for its warp
  tma::PipelineState<Config::kValueSlots> slot;
  WideBwdProducts<Config> products;

  __device__ __forceinline__ WideDqConsumer(const BwdTwoPassLaunch& launch_, WideDqStorage<Config>& storage_)
      : launch(launch_), params(launch_.params), storage(storage_), coords(threadIdx.x % 128) {}

  __device__ __forceinline__ void arrive(tma::Barrier& barrier) const {
    if (arrives) barrier.arrive();
  }

  __device__ __forceinline__ void hold() {
    storage.resident_full[kIndex].wait(0);
#pragma unroll
    for (int chunk = 0; chunk < Config::kHeldChunks; ++chunk) products.hold(chunk, storage.place(kIndex, chunk));
    tma::fence_buffer();  // V lands here next
    __syncwarp();
    arrive(storage.held[kIndex]);
  }

  // S or dP. A chunk of V is released when the next one is issued.
  template <int kChunk>
  __device__ __forceinline__ void compute_chunks(uint32_t step, int previous) {
    if constexpr (kChunk < Config::kChunks) {
      const int stage = slot.stage;
      const Element* const resident = storage.resident[kIndex][0];
      if constexpr (kIndex == 0) {
        storage.k_full[kChunk].wait(step);
        products.template start_scores<kChunk, Config::kChunks>(resident, storage.k[0], kChunk);
      } else {
        storage.v_full[stage].wait(slot.phase);
        products.template start_scores<kChunk, Config::kValueSlots>(resident, storage.v[0], stage);
        slot.advance();
        if constexpr (kChunk > 0) {
          products.template wait<1>();
          arrive(storage.v_empty[previous]);
        }
      }
      compute_chunks<kChunk + 1>(step, stage);
    } else {
      products.wait_for_scores();
      if constexpr (kIndex == 1) arrive(storage.v_empty[previous]);
    }
  }

  __device__ __forceinline__ void make_p(const WorkTile& tile, const DqRows& rows, int n_block, uint32_t step) {
    const TileCoords tile_coords{tile.batch, tile.head, tile.row_begin, n_block * Config::kBlockN};
    auto scores = row_col_view(products.acc_s);
    mask_scores<Config::kBlockM, Config::kBlockN>(scores, coords, mask_of<Config>(params, tile), tile_coords);
    exponentiate_scores(scores, params.softmax_scale_log2, RowArray<2>{rows.lse_log2});
    storage.p_empty.wait(step ^ 1);
    products.write_scores(storage.p);
    storage.p_full.arrive();
  }

  __device__ __forceinline__ void make_ds(const DqRows& rows, uint32_t step) {
    auto dp = row_col_view(products.acc_s);
    subtract_softmax_d(dp, RowArray<2>{rows.softmax_d});
    storage.p_full.wait(step);
    products.multiply_scores(storage.p);
    storage.p_empty.arrive();
    products.pack_operand();
    storage.ds_empty.wait(step ^ 1);
    products.store_operand(storage.ds);
    tma::fence_buffer();
    __syncwarp();
    arrive(storage.ds_full);
  }

  // dQ += dS K, a chunk of columns at a time; releases K.
  template <int kChunk>
  __device__ __forceinline__ void add_chunks(uint32_t step) {
    constexpr int kFirst = kIndex * Config::kHalfChunks;
    if constexpr (kChunk < Config::kHalfChunks) {
      if constexpr (kIndex == 1) storage.k_full[kFirst + kChunk].wait(step);
      products.template start_chunk<kChunk>(storage.ds, storage.k[kFirst]);
      if constexpr (kChunk > 0) {
        products.template wait<1>();
        arrive(storage.k_empty[kFirst + kChunk - 1]);
      }
      add_chunks<kChunk + 1>(step);
    } else {
      products.wait_for_gradient();
      arrive(storage.k_empty[kFirst + kChunk - 1]);
      arrive(storage.ds_empty);
    }
  }

  __device__ __forceinline__ void run(const WorkTile& tile, const BlockRange& range) {
    const DqRows rows = DqRows::load<Config>(launch, tile, tile.row_begin, coords);
    products.clear_gradient();
    if (range.count() > 0) hold();
#pragma unroll 1
    for (int n_block = range.begin; n_block < range.end; ++n_block) {
      const uint32_t step = (n_block - range.begin) & 1;
      compute_chunks<0>(step, 0);
      if constexpr (kIndex == 0) {
        make_p(tile, rows, n_block, step);
      } else {
        make_ds(rows, step);
      }
      storage.ds_full.wait(step);
      add_chunks<0>(step);
    }
    store(tile, rows);
  }

  // Fully masked rows get 0, whatever Q and dO hold there.
  __device__ __forceinline__ void store(const WorkTile& tile, const DqRows& rows) {
    auto values = row_col_view(products.gradient);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const bool is_masked = rows.lse_log2[mi] == INFINITY;
#pragma unroll
      for (int ni = 0; ni < cute::size<1>(values); ++ni) {
        values(mi, ni) = is_masked ? 0.0f : values(mi, ni) * params.scale_softmax;
      }
    }
    constexpr int kFirstCol = kIndex * Config::kHalf;
    const int64_t offset =
        matrix_offset(params.dq_strides, params.is_varlen(), tile.batch, tile.q_begin + tile.row_begin, tile.head);
    store_accumulator(products.gradient, threadIdx.x % 128, static_cast<Element*>(params.dq_ptr) + offset + kFirstCol,
                      params.dq_strides.row, tile.row_end - tile.row_begin, params.d - kFirstCol);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_bwd_wide_dq_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {
  auto& storage = shared_storage<WideDqStorage<Config>, plan::sm90_wide_dq_smem_bytes(Config::kDtype)>();
  if (threadIdx.x == 0) storage.init_barriers();
  wait_for_previous_kernel();
  const WorkTile tile = work_tile_at(launch.params, Config::kBlockM, blockIdx.x);
  __syncthreads();
  if (tile.empty()) return;
  const BlockRange range =
      block_range(mask_of<Config>(launch.params, tile), tile.row_begin, tile.row_end, Config::kBlockN);
  const int warp = warp_index(), group = warp / 4;
  if (group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    if (warp < 2 && range.count() > 0) WideDqLoader<Config>(launch, storage, warp).run(tile, range);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    if (group == 1) {
      WideDqConsumer<Config, 0>(launch, storage).run(tile, range);
    } else {
      WideDqConsumer<Config, 1>(launch, storage).run(tile, range);
    }
  }
}

}  // namespace sm90
}  // namespace flash
