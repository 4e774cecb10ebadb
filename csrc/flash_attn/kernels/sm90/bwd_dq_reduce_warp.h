// Reduction of dQ tiles from shared into global memory by two warps of the producer warpgroup: the warpgroups that
// compute dQ wait neither for memory nor, in deterministic mode, for the dQ semaphore. kConvertsDq: of the n_blocks
// that add to a tile the lowest one stores it, so that nobody clears it, and the last one to add converts it, while the
// L2 cache holds it.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "core/bwd_schedule.h"
#include "kernels/common/dq_semaphore.h"
#include "kernels/common/dq_tile.h"
#include "kernels/common/mask.h"
#include "kernels/common/row_store.h"
#include "kernels/sm90/bwd_storage.h"
#include "kernels/tma/bulk_reduce.h"
#include "kernels/tma/swizzle.h"

namespace flash {
namespace sm90 {

using namespace tma;

// Each of the two warps takes every second tile, also where there is only one buffer.
template <class Config>
struct DqReduceWarp {
  using Element = typename Config::Element;

  const Flash_bwd_params& params;
  BwdStorage<Config>& storage;
  const int stage;
  PipelineState<2> state;

  __device__ __forceinline__ void run(const BwdWorkTile& tile) {
    const QBlockOrder order = q_block_order<Config>(params, tile);
    if constexpr (Config::kConvertsDq) {
      DqReduceTile& own = storage.dq_reduce_tile[stage];
      if (threadIdx.x % 32 == 0) own = {tile, order};
      __syncwarp();
      for (QStep at = order.start(); at.m_block >= own.order.rows.begin; own.order.advance(at)) visit(own.tile, at);
      __syncwarp();
    } else {
      const int count = order.count();
      QStep at = order.start();
      for (int i = 0; i < count; ++i) {
        visit(tile, at);
        order.advance(at);
      }
    }
  }

  __device__ __forceinline__ void visit(const BwdWorkTile& tile, const QStep& at) {
    if (state.stage == stage) reduce(tile, at);
    state.advance();
  }

  __device__ __forceinline__ void reduce(const BwdWorkTile& tile, const QStep& at) const {
    const int64_t dq_tile = dq_tile_index(params, tile, at, Config::kBlockM);
    const bool is_elected = threadIdx.x % 32 == 0, is_deterministic = params.dq_semaphore_ptr != nullptr;
    if constexpr (Config::kConvertsDq) {
      if (params.dq_count_ptr != nullptr) {
        if (reduce_counted(tile, at, dq_tile, is_elected, is_deterministic)) convert_tile(tile, at, dq_tile);
        __syncwarp();
        return;
      }
    }
    int* const semaphore = params.dq_semaphore_ptr + dq_tile;
    if (is_elected && is_deterministic) {
      const MaskOf<Config> visibility = mask_of<Config>(params, tile);
      dq_semaphore_acquire<Config>(params, visibility, at.m_block, tile.n_block, dq_tile, dq_semaphore_peek(semaphore));
      fence_before_reductions();
    }
    __syncwarp();
    storage.dq_full[stage].wait(state.phase);
    if (is_elected) {
      fence_buffer();  // generic-proxy stores of the tile before the bulk reduction; here it stalls no computing warp
      reduce_bulk(params.dq_accum_ptr + dq_tile * Config::kDqTile, storage.dq_tile(stage), Config::kDqTile);
      cute::tma_store_wait<0>();  // the bulk reduction has read the buffer
      storage.dq_empty[stage].arrive();
      if (is_deterministic) {
        wait_for_reductions();
        dq_semaphore_release(semaphore);
      }
    }
    __syncwarp();
  }

  // Adds or stores the step's tile; returns whether it was the last contribution. In ascending order of n_blocks in
  // deterministic mode, else only behind the first one.
  __device__ __forceinline__ bool reduce_counted(const BwdWorkTile& tile, const QStep& at, int64_t dq_tile,
                                                 bool is_elected, bool is_deterministic) const {
    int* const counter = params.dq_count_ptr + dq_tile;
    const int row_begin = at.m_block * Config::kBlockM;
    const BlockRange n_blocks = block_range(mask_of<Config>(params, tile), row_begin,
                                            min(row_begin + Config::kBlockM, tile.seqlen_q), Config::kBlockN);
    const int position = tile.n_block - n_blocks.begin;
    int others = 0;  // that have added
    if (is_elected && position > 0) {
      others = dq_count_wait(counter, is_deterministic ? position : 1);
      fence_before_reductions();
    }
    __syncwarp();
    storage.dq_full[stage].wait(state.phase);
    bool is_complete = false;
    if (is_elected) {
      fence_buffer();  // as in reduce()
      float* const sums = params.dq_accum_ptr + dq_tile * Config::kDqTile;
      if (position > 0) {
        reduce_bulk(sums, storage.dq_tile(stage), Config::kDqTile);
      } else {
        store_bulk(sums, storage.dq_tile(stage), Config::kDqTile);
      }
      cute::tma_store_wait<0>();  // the buffer has been read
      storage.dq_empty[stage].arrive();
      wait_for_reductions();
      const int rest = n_blocks.count() - 1;
      is_complete = others == rest || dq_count_add(counter) == rest;  // nobody waits for the last one's count
      if (is_complete) fence_acquire();
    }
    is_complete = __shfl_sync(0xffffffffu, is_complete, 0);
    __syncwarp();  // the elected lane's acquire is for all
    return is_complete;
  }

  // The complete sums as rows of Elements: 16 rows at a time, of them 32 columns at a time. A lane has the registers
  // for few loads, whose latency would take a tile as long as several steps, so the next rows come to the L1 cache
  // meanwhile.
  __device__ __forceinline__ void convert_tile(const BwdWorkTile& tile, const QStep& at, int64_t dq_tile) const {
    constexpr int kUnitCols = 32, kUnit = 16 * kUnitCols;
    static_assert(Config::kWarpDq == 16 * Config::kHeadDim);
    const int lane = threadIdx.x % 32, row = at.m_block * Config::kBlockM;
    const float* sums = params.dq_accum_ptr + dq_tile * Config::kDqTile + lane * 4;
    Element* rows =
        static_cast<Element*>(params.dq_ptr) +
        matrix_offset(params.dq_strides, params.is_varlen(), tile.batch, tile.q_begin + row + lane / 4, at.head) +
        lane % 4 * kVectorCols;
    int rows_left = tile.seqlen_q - row - lane / 4;
    const int to_line = lane * 28;  // from this lane's vector to a line of its own
    uint2 words = touch_lines<Config::kWarpDq>(sums + to_line);
    await_lines(words, sums);
#pragma unroll 1
    for (int warp = 0; warp < Config::kDqWarps; ++warp) {
      const bool is_last = warp + 1 == Config::kDqWarps;
      words = touch_lines<Config::kWarpDq>(sums + to_line + (is_last ? 0 : Config::kWarpDq));
#pragma unroll 1
      for (int col = 0; col < Config::kHeadDim; col += kUnitCols) {
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 sum = load_through_l1(sums + i * 128);
          upper[i] = pack_pair(sum.x * params.scale_softmax, sum.y * params.scale_softmax, Element{});
          lower[i] = pack_pair(sum.z * params.scale_softmax, sum.w * params.scale_softmax, Element{});
        }
        transpose_quad(upper, lane % 4);
        transpose_quad(lower, lane % 4);
        if (col + lane % 4 * kVectorCols < params.d) {
          if (rows_left > 0) *reinterpret_cast<uint4*>(rows) = make_uint4(upper[0], upper[1], upper[2], upper[3]);
          if (rows_left > 8) {
            *reinterpret_cast<uint4*>(rows + 8 * params.dq_strides.row) =
                make_uint4(lower[0], lower[1], lower[2], lower[3]);
          }
        }
        sums += kUnit;
        rows += kUnitCols;
      }
      await_lines(words, sums);
      rows += 16 * params.dq_strides.row - Config::kHeadDim;
      rows_left -= 16;
    }
  }
};

}  // namespace sm90
}  // namespace flash
