// The computing side of the wgmma forward: one warpgroup, 64 rows. S of a block of keys is computed while the product
// of P and V of the block before is still under way, so that the tensor cores work through the softmax.
#pragma once

#include <cute/tensor.hpp>

#include "common/block_range.h"
#include "common/convert.h"
#include "common/dropout.h"
#include "common/mask.h"
#include "common/score_mod.h"
#include "common/softmax.h"
#include "sm90/fwd_storage.h"
#include "sm90/gemm.h"
#include "sm90/key_walk.h"

namespace flash {
namespace sm90 {

// A row block, and the key blocks that it visits: at least one.
template <class Config>
struct FwdTile {
  RowBlock block;
  KeyWalk walk;
  bool passes = false;  // no row of the warpgroup sees the last block of the walk: it lets it pass

  __device__ __forceinline__ FwdTile(const Flash_fwd_params& params, const RowBlock& block_, int group)
      : block(block_) {
    if (block.empty()) return;
    walk = key_walk<Config>(params, block);
    const int last_row = min(block.row_begin + 64 * (group + 1), block.seqlen_q) - 1;
    passes = walk.count() > 1 && visibility(params.window).key_end(last_row) <= (walk.range.end - 1) * Config::kBlockN;
  }

  // Blocks that the warpgroup computes: at least one.
  __device__ __forceinline__ int count() const { return walk.count() - passes; }

  __device__ __forceinline__ bool exists() const { return !block.empty(); }
  __device__ __forceinline__ Visibility visibility(const Window& window) const {
    return {block.seqlen_q, block.seqlen_k, window};
  }
};

template <class Config>
struct FwdMainloop {
  using Element = typename Config::Element;
  using Storage = FwdStorage<Config>;
  using Tile = FwdTile<Config>;
  using KvPlace = RingIndex<Config::kKvStages>;
  using MmaQk = typename Config::MmaQk;
  using MmaPv = typename Config::MmaPv;
  static constexpr int kRows = 2;  // accumulator rows per thread
  using AccS = decltype(cute::partition_fragment_C(
      MmaQk{}, cute::Shape<cute::_64, cute::Int<Config::kBlockN>>{}));  // ((2, 2, N / 8), 1, 1)
  using AccO = decltype(cute::partition_fragment_C(
      MmaPv{}, cute::Shape<cute::_64, cute::Int<Config::kHeadDimV>>{}));  // ((2, 2, D / 8), 1, 1)
  using LayoutP = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1,
                                           cute::Int<Config::kBlockN / 16>>>;  // P as the A operand: the same registers
  using FragmentP = decltype(cute::make_tensor<Element>(LayoutP{}));

  const Flash_fwd_params& params;
  Storage& storage;
  const int group;                    // of the consumer warpgroups
  const AccumulatorCoords<4> coords;  // within the warpgroup's 64 rows
  KvPlace k_place, v_place;

  AccS acc_s;
  AccO acc_o;
  FragmentP tOrP;
  Softmax<kRows> softmax;
  uint32_t draws_phase = 0;
  struct Drawing {
    DropoutStream stream;
    LaneRows rows;
  } drawing;         // of the row block, where draws are not made apart
  float slope_log2;  // of its head, for ALiBi

  __device__ __forceinline__ FwdMainloop(const Flash_fwd_params& params_, Storage& storage_, int group_)
      : params(params_), storage(storage_), group(group_), coords(threadIdx.x % 128) {}

  __device__ __forceinline__ int row_begin(const Tile& tile) const { return tile.block.row_begin + 64 * group; }

  __device__ __forceinline__ void wait_for_k() const { storage.k_full[k_place.stage].wait(k_place.phase); }

  // S of the block of keys at k_place: started, not waited for.
  __device__ __forceinline__ void start_qk(int q_stage) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    auto tSrQ = thread.partition_fragment_A(q)(_, _, _, q_stage * Config::kWarpGroups + group);  // (MMA, 1, MMA_D)
    auto tSrK = thread.partition_fragment_B(k)(_, _, _, k_place.stage);                          // (MMA, 1, MMA_D)
    start_gemm(mma, tSrQ, tSrK, acc_s, true);
  }

  // O += P V, or O = P V, of the block at v_place: started, not waited for.
  __device__ __forceinline__ void start_pv(bool clears) {
    using namespace cute;
    storage.v_full[v_place.stage].wait(v_place.phase);
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt = make_tensor(make_smem_ptr(storage.v[0]), typename Config::SmemLayoutVt{});
    auto tOrV = thread.partition_fragment_B(vt)(_, _, _, v_place.stage);  // (MMA, 1, MMA_N)
    start_gemm(mma, tOrP, tOrV, acc_o, clears);
  }

  // This warp has read the buffer.
  __device__ __forceinline__ static void release(Barrier* empty, KvPlace& place) {
    if (threadIdx.x % 32 == 0) empty[place.stage].arrive();
    place.advance();
  }

  // Raw scores to what the softmax takes: softcap, ALiBi, mask.
  template <bool kEdge, class Scores>
  __device__ __forceinline__ void modify_scores(Scores& scores, const Tile& tile, int key) const {
    const Visibility visibility = tile.visibility(params.window);
    const int first_row = row_begin(tile);
    if constexpr (Config::kHasScoreMod) {
      ScoreMod::apply_by_warp(params, slope_log2, scores, coords, visibility.diagonal(first_row), key);
    }
    if constexpr (kEdge) {
      apply_mask(scores, coords, visibility, first_row, min(first_row + 64, tile.block.seqlen_q), key,
                 key + Config::kBlockN);
    }
  }

  // The common case of a softcap in one go; or false, with nothing done. Above head dim 128 there are not the
  // registers: ptxas would move the rings' indices into vector registers.
  template <class Scores>
  __device__ __forceinline__ bool exponentiate_capped(Scores& scores) {
    if constexpr (Config::kHasScoreMod && Config::kHeadDim <= 128) {
      if (params.softcap > 0.0f && params.alibi_slopes_ptr == nullptr) {
        return softmax.exponentiate_capped(scores, params.softcap_series, params.softmax_slack_log2);
      }
    }
    return false;
  }

  // What decides which probabilities are dropped, in the place of P, which no product reads any more.
  __device__ __forceinline__ void draw(int key) {
    auto pairs = cute::recast<uint32_t>(tOrP);
    if constexpr (Config::kDrawsApart) {
      storage.draws_full[group].wait(draws_phase);
      draws_phase ^= 1;
#pragma unroll
      for (int i = 0; i < Storage::kDrawVectors; ++i) {
        const uint4 drawn = storage.draws[group].lanes[i][threadIdx.x / 32 % 4][threadIdx.x % 32];
        pairs(4 * i) = drawn.x;
        pairs(4 * i + 1) = drawn.y;
        pairs(4 * i + 2) = drawn.z;
        pairs(4 * i + 3) = drawn.w;
      }
      storage.draws_empty[group].arrive();
    } else if constexpr (Config::kDropsPacked) {
      const LaneColumns<Config::kBlockN / 2> columns(drawing.stream, key / 2);
#pragma unroll
      for (int i = 0; i < cute::size(pairs); ++i) pairs(i) = drawing.rows.draw(columns, i);
    }
  }

  __device__ __forceinline__ void set_probabilities(const Tile& tile, int key) {
    using namespace cute;
    auto scores = row_col_view(acc_s);
    if (Config::kHasScoreMod && params.has_dropout) {
      const DropoutMask mask(params.dropout, tile.block.batch, tile.block.head);
      apply_dropout(mask, scores, coords, row_begin(tile), key);
    }
    auto pairs = recast<uint32_t>(tOrP);
#pragma unroll
    for (int i = 0; i < size(pairs); ++i) {
      const uint32_t pair = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
      if constexpr (Config::kDropsPacked) {
        pairs(i) &= pair;
      } else {
        pairs(i) = pair;
      }
    }
  }

  // ptxas moves exponentials behind the wait for P V, where nothing hides them, unless a branch before it depends on
  // them. This one waits for what arrived long ago: sums of probabilities are never negative.
  __device__ __forceinline__ void finish_exponentials() const {
    const bool never = softmax.row_sum[0] + softmax.row_sum[1] < 0.0f;
    storage.v_full[v_place.stage].wait(v_place.phase ^ never);
  }

  // P of the first block, from its S.
  __device__ __forceinline__ void first_step(const Tile& tile) {
    softmax = Softmax<kRows>();
    release(storage.k_empty, k_place);
    const int key = tile.walk.block(0) * Config::kBlockN;
    if constexpr (Config::kDropsPacked && !Config::kDrawsApart) {
      const DropoutMask mask(params.dropout, tile.block.batch, tile.block.head);
      drawing = {mask.stream, LaneRows(mask, row_begin(tile) + coords.row(0))};
    }
    if constexpr (Config::kHasScoreMod) {
      slope_log2 = ScoreMod::head_slope_log2(params, tile.block.batch, tile.block.head);
    }
    auto scores = row_col_view(acc_s);
    modify_scores<true>(scores, tile, key);
    float correction[kRows];
    softmax.raise_reference(scores, params.softmax_scale_log2, correction, params.softmax_slack_log2);
    softmax.template exponentiate<true>(scores, params.softmax_scale_log2);
    draw(key);
    set_probabilities(tile, key);
  }

  // S and P of block i, and P V of block i - 1.
  template <bool kEdge>
  __device__ __forceinline__ void step(const Tile& tile, int i, int q_stage) {
    wait_for_k();
    start_qk(q_stage);
    start_pv(i == 1);
    const int key = tile.walk.block(i) * Config::kBlockN;
    wait_for<1>(acc_s);
    release(storage.k_empty, k_place);
    auto scores = row_col_view(acc_s);
    float correction[kRows];
    bool raised = false;
    if (kEdge || !exponentiate_capped(scores)) {
      modify_scores<kEdge>(scores, tile, key);
      raised = softmax.raise_reference(scores, params.softmax_scale_log2, correction, params.softmax_slack_log2);
      softmax.template exponentiate<kEdge>(scores, params.softmax_scale_log2);
    }
    if constexpr (Config::kFinishesExponentials) finish_exponentials();
    cute::warpgroup_fence_operand(acc_s);
    wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(tOrP);
    release(storage.v_empty, v_place);
    draw(key);
    if (raised) {
      auto out = row_col_view(acc_o);
      softmax.rescale(out, correction);
    }
    set_probabilities(tile, key);
  }

  // Q of a tile and its first block of keys have landed.
  __device__ __forceinline__ void wait_for_tile(int q_stage, uint32_t q_phase) const {
    storage.q_full[q_stage][group].wait(q_phase);
    wait_for_k();
  }

  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s); }

  // All blocks of keys that the warpgroup sees after first_step(), but for P V of the last.
  __device__ __forceinline__ void run(const Tile& tile, int q_stage) {
    const int count = tile.count();
    const int interior = min(tile.walk.interior(), count);
    // Counted down, so that its end is not computed again in every step.
    for (int left = interior - 1; left > 0; --left) step<false>(tile, interior - left, q_stage);
    for (int i = max(interior, 1); i < count; ++i) step<true>(tile, i, q_stage);
  }

  // Lets a block pass: it has to land before its buffer can be given back. More than one could not wait for finish(),
  // because V of the first would take the buffer of the V that the last product reads.
  __device__ __forceinline__ static void pass(const Barrier* full, Barrier* empty, KvPlace& place) {
    full[place.stage].wait(place.phase);
    release(empty, place);
  }
  __device__ __forceinline__ void pass_key(const Tile& tile) {
    if (tile.passes) pass(storage.k_full, storage.k_empty, k_place);
  }
  __device__ __forceinline__ void pass_value(const Tile& tile) {
    if (tile.passes) pass(storage.v_full, storage.v_empty, v_place);
  }

  // P V of the last block: started, not waited for.
  __device__ __forceinline__ void start_last(const Tile& tile) { start_pv(tile.count() == 1); }

  // O is complete, and so is S of the next tile if it was started before.
  __device__ __forceinline__ void finish() {
    wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(tOrP);
    if constexpr (Config::kTile.overlaps) cute::warpgroup_fence_operand(acc_s);
    release(storage.v_empty, v_place);
  }
};

}  // namespace sm90
}  // namespace flash
