// The dQ kernel of the two-pass wgmma backward, scheduled like a forward: 128 rows of a query head stay in shared
// memory, 64 for each consumer, while the K and V blocks that they see are streamed. S = Q K^T and dP = dO V^T have
// queries as rows, so that dS is the left operand of dQ += dS K from registers and a thread needs LSE and softmax_d of
// two rows. dQ is complete in registers and stored once: no fp32 accumulator, no additions, the same bits in every run.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "core/visible_range.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/common/pdl.h"
#include "kernels/common/row_store.h"
#include "kernels/sm90/bwd_row_values.h"
#include "kernels/sm90/bwd_tile_loader.h"
#include "kernels/sm90/bwd_two_pass/products.h"
#include "kernels/sm90/bwd_two_pass/storage.h"
#include "kernels/sm90/bwd_work_queue.h"

namespace flash {
namespace sm90 {

// The n_blocks that a work tile's rows see, in descending order, or by list.
template <class Config>
__device__ __forceinline__ auto visited_n_blocks(const Flash_bwd_params& params, const MaskParams& mask,
                                                 const WorkTile& tile) {
  if constexpr (Config::kListed) {
    return block_list(mask.lists, list_index(params, mask, tile, Config::kDqBlockM));
  } else {
    return block_range(mask_of<Config>(params, tile), tile.row_begin, tile.row_end, Config::kDqBlockN);
  }
}

// visit(n_block, is_first).
template <class Visit>
__device__ __forceinline__ void for_each_visited(const BlockRange& n_blocks, const Visit& visit) {
  for (int n_block = n_blocks.end - 1; n_block >= n_blocks.begin; --n_block) {
    const bool is_first = n_block == n_blocks.end - 1;
    visit(n_block, is_first);
  }
}
template <class Visit>
__device__ __forceinline__ void for_each_visited(const BlockList& n_blocks, const Visit& visit) {
  for (int i = 0; i < n_blocks.count(); ++i) visit(n_blocks.at(i).block(), i == 0);
}

template <class Config, class Visit>
__device__ __forceinline__ void for_each_row_tile(const BwdTwoPassLaunch& launch, DqStorage<Config>& storage,
                                                  const Visit& visit) {
  for_each_index(storage, launch.num_tiles, [&](int index) {
    const WorkTile tile = work_tile_at(launch.params, Config::kDqBlockM, index);
    if (!tile.empty()) visit(tile);
  });
}

template <class Config>
struct DqLoader : BwdTileLoader<Config> {
  using BwdTileLoader<Config>::is_elected;
  using Hint = cute::TMA::CacheHintSm90;

  const BwdTwoPassLaunch& launch;
  DqStorage<Config>& storage;
  PipelineState<Config::kDqStages> k_state;
  PipelineState<Config::kDqVStages> v_state;
  uint32_t tile_phase = 0;

  __device__ __forceinline__ DqLoader(const BwdTwoPassLaunch& launch_, DqStorage<Config>& storage_)
      : BwdTileLoader<Config>(storage_.pre_clear_full), launch(launch_), storage(storage_) {}

  __device__ __forceinline__ void run_all() {
    announce_work_tiles(
        storage, launch.num_tiles, is_elected,
        [&](bool is_first, int index) { return fetch_index(launch.tile_count_semaphore, is_first, index); },
        [&](int index) {
          const WorkTile tile = work_tile_at(launch.params, Config::kDqBlockM, index);
          if (!tile.empty()) run(tile);
        });
  }

  __device__ __forceinline__ void run(const WorkTile& tile) {
    const auto n_blocks = visited_n_blocks<Config>(launch.params, launch.mask, tile);
    if (n_blocks.count() == 0) return;
    const bool is_varlen = launch.params.is_varlen();
    const TmaRows k_rows(is_varlen, tile.batch, tile.k_begin, tile.seqlen_k);
    const TmaRows q_rows(is_varlen, tile.batch, tile.q_begin, tile.seqlen_q);
    const int first_key = first_visible_key(mask_of<Config>(launch.params, tile));
    const int head_k = tile.head / launch.params.h_h_k_ratio;
    for_each_visited(n_blocks, [&](int n_block, bool is_first) {
      const auto masked_keys = masked_keys_of(tile, n_block * Config::kDqBlockN, first_key);
      load_k(k_rows, n_block * Config::kDqBlockN, masked_keys, head_k);
      if (is_first) {
        load_rows<Config::kHeadDim>(launch.q_map, storage.q_full, storage.q_empty, storage.q, q_rows, tile);
      }
      load_v(k_rows, n_block * Config::kDqBlockN, masked_keys, head_k);
      if (is_first) {
        load_rows<Config::kHeadDimV>(launch.do_map, storage.do_full, storage.do_empty, storage.dout, q_rows, tile);
      }
    });
    tile_phase ^= 1;
  }

  // As load() takes them: the keys before first_key, or with lists those that no query of the head sees.
  __device__ __forceinline__ auto masked_keys_of(const WorkTile& tile, int key, int first_key) const {
    if constexpr (Config::kListed) {
      const uint32_t* const seen = seen_keys_of(launch.params, launch.mask, tile, tile.head, tile.segment);
      return MarkedRows{unseen_of_lane<Config::kDqBlockN>(seen, key, tile.seqlen_k)};
    } else {
      return first_key;
    }
  }

  template <class Masked>
  __device__ __forceinline__ void load_k(const TmaRows& k_rows, int key, Masked masked_keys, int head_k) {
    const int stage = k_state.stage;
    storage.k_empty[stage].wait(k_state.phase ^ 1);
    this->template load<Config::kDqBlockN, Config::kHeadDim>(launch.k_map, storage.k_full[stage], storage.k[stage],
                                                             k_rows, key, masked_keys, head_k, Hint::EVICT_LAST);
    k_state.advance();
  }

  template <class Masked>
  __device__ __forceinline__ void load_v(const TmaRows& k_rows, int key, Masked masked_keys, int head_k) {
#pragma unroll
    for (int part = 0; part < Config::kVParts; ++part) {
      const int stage = v_state.stage;
      storage.v_empty[stage].wait(v_state.phase ^ 1);
      this->template load<Config::kDqBlockN, Config::kVPartCols>(launch.v_map, storage.v_full[stage], storage.v[stage],
                                                                 k_rows, key, masked_keys, head_k, Hint::EVICT_LAST,
                                                                 part * Config::kVPartCols);
      v_state.advance();
    }
  }

  // Q or dO of both consumers. Fully masked rows may hold anything: no other row's dQ depends on them.
  template <int kCols, int kSmemTile>
  __device__ __forceinline__ void load_rows(const CUtensorMap& map, Barrier (&full)[2], Barrier (&empty)[2],
                                            typename Config::Element (&tiles)[2][kSmemTile], const TmaRows& q_rows,
                                            const WorkTile& tile) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      empty[group].wait(tile_phase ^ 1);
      this->template load<Config::kBlockM, kCols>(map, full[group], tiles[group], q_rows,
                                                  tile.row_begin + group * Config::kBlockM, 0, tile.head,
                                                  Hint::EVICT_FIRST);
    }
  }
};

// The dropout warp: the random bits of the pairs of columns of each K block.
template <class Config>
__device__ __forceinline__ void store_column_bits(const BwdTwoPassLaunch& launch, DqStorage<Config>& storage,
                                                  const WorkTile& tile, PipelineState<Config::kDqStages>& state) {
  static_assert(Config::kDqBlockN == 64, "a pair of columns for each lane");
  const Flash_bwd_params& params = launch.params;
  const auto n_blocks = visited_n_blocks<Config>(params, launch.mask, tile);
  const int lane = threadIdx.x % 32;
  DropoutMask mask;
  if (params.has_dropout) mask = DropoutMask(params, tile.batch, tile.head);
  for_each_visited(n_blocks, [&](int n_block, bool) {
    storage.k_empty[state.stage].wait(state.phase ^ 1);
    if (params.has_dropout) {
      storage.dropout_col_bits[state.stage][lane] = mask.column_pair(n_block * Config::kDqBlockN + 2 * lane);
    }
    storage.k_full[state.stage].arrive();
    state.advance();
  });
}

// A thread's two rows.
struct DqRows {
  float lse_log2[2];  // +inf where the row is fully masked or beyond the sequence
  float softmax_d[2];

  template <class Config, class Coords>
  __device__ __forceinline__ static DqRows load(const BwdTwoPassLaunch& launch, const WorkTile& tile, int row_begin,
                                                const Coords& coords) {
    const Flash_bwd_params& params = launch.params;
    const float* const lse = params.softmax_lse_ptr + lse_offset(params, tile.batch, tile.head, tile.q_begin);
    const float* const delta = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, tile.head, tile.q_begin);
    const int first_row = first_visible_row(mask_of<Config>(params, tile));
    DqRows rows;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const int row = row_begin + coords.row(mi);
      bool valid = row >= first_row && row < tile.seqlen_q;
      if constexpr (Config::kListed) {
        const uint32_t* const seen = seen_rows(params, launch.mask, tile.batch, tile.head, tile.q_begin, tile.segment);
        valid = valid && is_seen(seen, row);
      }
      // Bypasses L1: this kernel may have started before the preceding one was complete.
      rows.lse_log2[mi] = valid ? lse_or_inf(__ldcg(lse + row)) * ScoreMod::kLog2e : INFINITY;
      rows.softmax_d[mi] = valid ? __ldcg(delta + row) : 0.0f;
    }
    return rows;
  }
};

// A consumer: 64 rows of each work tile.
template <class Config>
struct DqConsumer {
  using Element = typename Config::Element;
  using Coords = AccumulatorCoords<4>;
  using Scores = AccScores<Config>;
  using Gradient = AccGradient<Config, Config::kHeadDim>;

  const BwdTwoPassLaunch& launch;
  const Flash_bwd_params& params;
  DqStorage<Config>& storage;
  const int group;
  const int thread;  // of the warpgroup
  const Coords coords;
  PipelineState<Config::kDqStages> k_state;
  PipelineState<Config::kDqVStages> v_state;
  uint32_t tile_phase = 0;
  BlockList list;    // kListed: of the work tile
  BlockEntry entry;  // kListed: of the block whose S is masked

  __device__ __forceinline__ DqConsumer(const BwdTwoPassLaunch& launch_, DqStorage<Config>& storage_, int group_)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        group(group_),
        thread(threadIdx.x % 128),
        coords(threadIdx.x % 128) {}

  __device__ __forceinline__ void run(const WorkTile& tile) {
    const int row_begin = tile.row_begin + group * Config::kBlockM;
    const DqRows rows = DqRows::load<Config>(launch, tile, row_begin, coords);
    const auto n_blocks = visited_n_blocks<Config>(params, launch.mask, tile);
    if constexpr (Config::kIsGeneral) {
      if (params.has_dropout) store_row_bits(tile, row_begin);
    }
    Gradient acc_dq;
    cute::clear(acc_dq);
    if (n_blocks.count() > 0) visit(tile, rows, row_begin, n_blocks, acc_dq);
    store(tile, rows, row_begin, acc_dq);
    __syncwarp();  // wgmma needs converged warps
  }

  __device__ __forceinline__ RandomBits* row_bits() const { return storage.dropout_row_bits + group * Config::kBlockM; }

  // The random bits of this warp's 16 rows.
  __device__ __forceinline__ void store_row_bits(const WorkTile& tile, int row_begin) const {
    const int row = thread / 32 * 16 + thread % 16;
    if (thread % 32 < 16) row_bits()[row] = DropoutMask(params, tile.batch, tile.head).row(row_begin + row);
    __syncwarp();
  }

  // Blocks are numbered from the last one of the list.
  __device__ __forceinline__ void visit(const WorkTile& tile, const DqRows& rows, int row_begin,
                                        const BlockList& n_blocks, Gradient& acc_dq) {
    list = n_blocks;
    storage.q_full[group].wait(tile_phase);
    storage.do_full[group].wait(tile_phase);
    accumulate(tile, rows, row_begin, 0, list.count(), acc_dq);
    tile_phase ^= 1;
  }

  // The n_block of a step of accumulate(). Shuffled, so that ptxas sees uniform branches.
  __device__ __forceinline__ int n_block_of(int step) {
    if constexpr (Config::kListed) {
      entry.bits = __shfl_sync(0xffffffffu, list.at(list.count() - 1 - step).bits, 0);
      return entry.block();
    } else {
      return step;
    }
  }

  // Skips the blocks of the work tile that this consumer's rows do not see.
  __device__ __forceinline__ void visit(const WorkTile& tile, const DqRows& rows, int row_begin,
                                        const BlockRange& n_blocks, Gradient& acc_dq) {
    const int row_end = min(row_begin + Config::kBlockM, tile.row_end);
    BlockRange own;
    if (row_begin < row_end) own = block_range(mask_of<Config>(params, tile), row_begin, row_end, Config::kDqBlockN);
    if (own.count() == 0) own.begin = own.end = n_blocks.begin;
    for (int n_block = n_blocks.end; n_block > own.end; --n_block) skip_block();
    storage.q_full[group].wait(tile_phase);
    storage.do_full[group].wait(tile_phase);
    if (own.count() > 0) {
      accumulate(tile, rows, row_begin, own.begin, own.end, acc_dq);
    } else {
      storage.q_empty[group].arrive();
      storage.do_empty[group].arrive();
    }
    for (int n_block = own.begin; n_block > n_blocks.begin; --n_block) skip_block();
    tile_phase ^= 1;
  }

  // Must still wait for the block: a second arrival in one phase is illegal.
  __device__ __forceinline__ void skip_block() {
    storage.k_full[k_state.stage].wait(k_state.phase);
    storage.k_empty[k_state.stage].arrive();
    k_state.advance();
#pragma unroll
    for (int part = 0; part < Config::kVParts; ++part) {
      storage.v_full[v_state.stage].wait(v_state.phase);
      storage.v_empty[v_state.stage].arrive();
      v_state.advance();
    }
  }

  __device__ __forceinline__ void accumulate(const WorkTile& tile, const DqRows& rows, int row_begin, int begin,
                                             int end, Gradient& acc_dq) {
    if constexpr (Config::kScoresFirst) {
      accumulate_scores_first(tile, rows, row_begin, begin, end, acc_dq);
    } else {
      accumulate_gradient_first(tile, rows, row_begin, begin, end, acc_dq);
    }
  }

  // dQ of this block and dP of the next one overlap P of the next one. No wgmma is in flight where branches of the loop
  // join: ptxas would serialise it (C7514).
  __device__ __forceinline__ void accumulate_scores_first(const WorkTile& tile, const DqRows& rows, int row_begin,
                                                          int begin, int end, Gradient& acc_dq) {
    Scores acc_s, acc_dp;
    const auto differentiate_block = [&](int n_block, const auto& after_p) {
      if (n_block == begin) storage.q_empty[group].arrive();
      start_dp(acc_dp);
      const TileCoords tile_coords{tile.batch, tile.head, row_begin, n_block_of(n_block) * Config::kDqBlockN};
      differentiate(tile, rows, tile_coords, acc_s, acc_dp, after_p);
      if (n_block == begin) storage.do_empty[group].arrive();
    };
    start_s(acc_s);
    wait_for<0>(acc_s);
    differentiate_block(end - 1, [] {});
    for (int n_block = end - 1; n_block >= begin; --n_block) {
      const auto ds = convert<Element>(acc_dp);
      const int stage = k_state.stage;
      k_state.advance();
      if (n_block > begin) {
        start_s(acc_s);
        start_gradient<Config, Config::kHeadDim>(thread, ds, storage.k[stage], acc_dq);
        wait_for<1>(acc_s);
        differentiate_block(n_block - 1, [&] {
          wait_for<Config::kVParts>(acc_dq);  // dP stays in flight
          storage.k_empty[stage].arrive();
        });
      } else {
        start_gradient<Config, Config::kHeadDim>(thread, ds, storage.k[stage], acc_dq);
        wait_for<0>(acc_dq);
        storage.k_empty[stage].arrive();
      }
    }
  }

  // S of the next block is issued after dQ of this one, and both are in flight. No wgmma is in flight where branches
  // join: ptxas would serialise it (C7514).
  __device__ __forceinline__ void accumulate_gradient_first(const WorkTile& tile, const DqRows& rows, int row_begin,
                                                            int begin, int end, Gradient& acc_dq) {
    Scores acc_s;
    start_s(acc_s);
    wait_for<0>(acc_s);
    for (int n_block = end - 1; n_block >= begin; --n_block) {
      const bool is_last = n_block == begin;
      if (is_last) storage.q_empty[group].arrive();
      Scores acc_dp;
      start_dp(acc_dp);
      const TileCoords tile_coords{tile.batch, tile.head, row_begin, n_block_of(n_block) * Config::kDqBlockN};
      differentiate(tile, rows, tile_coords, acc_s, acc_dp, [] {});
      if (is_last) storage.do_empty[group].arrive();
      const auto ds = convert<Element>(acc_dp);
      const int stage = k_state.stage;
      start_gradient<Config, Config::kHeadDim>(thread, ds, storage.k[stage], acc_dq);
      k_state.advance();
      if (!is_last) {
        start_s(acc_s);
        wait_for<1>(acc_dq);
        storage.k_empty[stage].arrive();
        wait_for<0>(acc_s);
      } else {
        wait_for<0>(acc_dq);
        storage.k_empty[stage].arrive();
      }
    }
  }

  __device__ __forceinline__ void start_s(Scores& acc_s) const {
    storage.k_full[k_state.stage].wait(k_state.phase);
    start_scores<Config, Config::kHeadDim>(thread, storage.q[group], storage.k[k_state.stage], acc_s, [](int) {});
  }

  // With two parts of V the product has two commit groups, so that the first part is released while the second is read.
  __device__ __forceinline__ void start_dp(Scores& acc_dp) const {
    storage.v_full[v_state.stage].wait(v_state.phase);
    start_scores<Config, Config::kHeadDimV>(thread, storage.dout[group], storage.v[v_state.stage], acc_dp, [&](int k) {
      if (Config::kVParts == 2 && k == Config::kVPartCols / 16 - 1) {
        cute::warpgroup_commit_batch();
        storage.v_full[1].wait(v_state.phase);
        cute::warpgroup_arrive();
      }
    });
  }

  // Waits for dP and releases V.
  __device__ __forceinline__ void finish_dp(Scores& acc_dp) {
    if constexpr (Config::kVParts == 2) {
      cute::warpgroup_wait<1>();
      storage.v_empty[v_state.stage].arrive();
      v_state.advance();
    }
    wait_for<0>(acc_dp);
    storage.v_empty[v_state.stage].arrive();
    v_state.advance();
  }

  // Keeps exp2 before the wait for dP; ptxas would sink it. No P is negative, but ptxas cannot know that, so this
  // (already complete) wait depends on every exp2.
  __device__ __forceinline__ void finish_exp_before_dp_wait(const Scores& acc_p) const {
    uint32_t signs = 0;
#pragma unroll
    for (int i = 0; i < cute::size(acc_p); ++i) signs |= __float_as_uint(acc_p(i));
    storage.v_full[v_state.stage].wait(v_state.phase ^ (signs >> 31));
  }

  // S and dP become P and dS. after_p() runs before the wait for dP, and after P unless P needs dP.
  template <class AfterP>
  __device__ __forceinline__ void differentiate(const WorkTile& tile, const DqRows& rows, const TileCoords& tile_coords,
                                                Scores& acc_s, Scores& acc_dp, const AfterP& after_p) {
    const auto visibility = mask_of_block(tile);
    const RowArray<2> lse_log2{rows.lse_log2}, softmax_d{rows.softmax_d};
    auto scores = row_col_view(acc_s);
    auto dp = row_col_view(acc_dp);
    if constexpr (!Config::kIsGeneral) {
      mask_scores<Config::kBlockM, Config::kDqBlockN>(scores, coords, visibility, tile_coords);
      exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
      finish_exp_before_dp_wait(acc_s);
      after_p();
      finish_dp(acc_dp);
      differentiate_scores(scores, dp, softmax_d);
    } else {
      after_p();
      finish_dp(acc_dp);
      const SmemRandomBits<Coords> bits{row_bits(), storage.dropout_col_bits[k_state.stage], coords};
      differentiate_general<Config::kBlockM, Config::kDqBlockN, true>(params, visibility, tile_coords, coords, bits,
                                                                      lse_log2, softmax_d, scores, dp);
    }
  }

  __device__ __forceinline__ auto mask_of_block(const WorkTile& tile) const {
    const MaskOf<Config> window = mask_of<Config>(params, tile);
    if constexpr (Config::kListed) {
      return FactorMask{window, factors_of(params, launch.mask.factors, tile, tile.head),
                        entry.strip(group) != BlockClass::kWhole};
    } else {
      return window;
    }
  }

  // Fully masked rows get 0, whatever Q and dO hold there.
  __device__ __forceinline__ void store(const WorkTile& tile, const DqRows& rows, int row_begin,
                                        Gradient& acc_dq) const {
    auto values = row_col_view(acc_dq);
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
      const bool is_masked = rows.lse_log2[mi] == INFINITY;
#pragma unroll
      for (int ni = 0; ni < cute::size<1>(values); ++ni) {
        values(mi, ni) = is_masked ? 0.0f : values(mi, ni) * params.scale_softmax;
      }
    }
    Element* const base =
        static_cast<Element*>(params.dq_ptr) +
        matrix_offset(params.dq_strides, params.is_varlen(), tile.batch, tile.q_begin + row_begin, tile.head);
    store_accumulator(acc_dq, thread, base, params.dq_strides.row, tile.row_end - row_begin, params.d);
  }
};

// Launched as a dependent of the dK and dV kernel, whose results it does not need: its thread blocks take the SMs that
// have run out of n_blocks. softmax_d is complete when the first of them starts (flash_bwd_dkv_kernel()).
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    flash_bwd_dq_kernel(const __grid_constant__ BwdTwoPassLaunch launch) {
  static_assert(
      sizeof(DqStorage<Config>) == plan::sm90_dq_smem_bytes(Config::kTile, Config::kIsGeneral, Config::kDtype),
      "plan and kernel agree on the shared memory");
  extern __shared__ __align__(1024) char smem[];
  DqStorage<Config>& storage = *reinterpret_cast<DqStorage<Config>*>(smem);
  if (threadIdx.x == 0) storage.init_barriers();
  __syncthreads();
  const int warp_group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);  // warp-uniform, so that branches on it are
  if (warp_group == 0) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    if (warp == 0) {
      DqLoader<Config>(launch, storage).run_all();
      wait_for_previous_kernel();  // so that the end of this kernel is the end of both
    }
    if (Config::kIsGeneral && warp == 1) {
      PipelineState<Config::kDqStages> state;
      for_each_row_tile(launch, storage,
                        [&](const WorkTile& tile) { store_column_bits<Config>(launch, storage, tile, state); });
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    DqConsumer<Config> consumer(launch, storage, warp_group - 1);
    for_each_row_tile(launch, storage, [&](const WorkTile& tile) { consumer.run(tile); });
  }
}

}  // namespace sm90
}  // namespace flash
