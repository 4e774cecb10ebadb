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
#include "kernels/sm90/bwd_two_pass/dq_loader.h"
#include "kernels/sm90/bwd_two_pass/products.h"
#include "kernels/sm90/bwd_two_pass/storage.h"
#include "kernels/sm90/bwd_work_queue.h"

namespace flash {
namespace sm90 {

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
      return factor_mask<Element>(params, launch.mask, window, tile, tile.head,
                                  entry.strip(group) != BlockClass::kWhole);
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
