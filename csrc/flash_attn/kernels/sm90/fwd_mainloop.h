// Mainloop of the wgmma forward: one consumer warpgroup, 64 rows. S of a KV block is issued before P V of the previous
// one, so that the tensor cores work through the softmax. step() is the schedule; the softmax is in fwd_softmax_step.h,
// dropout's random bits are in fwd_dropout.h.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

#include "core/block_range.h"
#include "kernels/common/convert.h"
#include "kernels/common/origin.h"
#include "kernels/common/score_bias.h"
#include "kernels/sm90/box_steps.h"
#include "kernels/sm90/fwd_dropout.h"
#include "kernels/sm90/fwd_softmax_step.h"
#include "kernels/sm90/fwd_storage.h"
#include "kernels/sm90/gemm.h"

namespace flash {
namespace sm90 {

template <class Config>
struct FwdMainloop {
  using Element = typename Config::Element;
  using Storage = FwdStorage<Config>;
  using Work = FwdWork<Config>;
  using KvState = PipelineState<Config::kKvStages>;
  using BiasState = PipelineState<Config::kBiased ? Config::kTile.bias_stages : 1>;
  using MmaQk = typename Config::MmaQk;
  using MmaPv = typename Config::MmaPv;
  using Flag = typename Config::Flag;
  static constexpr int kRows = 2;                                  // accumulator rows per thread
  static constexpr uint32_t kPingPongBarrier = kBeginBarrier + 1;  // the first of one for each warpgroup
  // Mask the first block only if the mask changes anything.
  static constexpr bool kMaskFirstOnDemand = Config::kMaskBoundsInRegs && !Config::kNoMask;
  using AccS = decltype(cute::partition_fragment_C(
      MmaQk{}, cute::Shape<cute::_64, cute::Int<Config::kBlockN>>{}));  // ((2, 2, N / 8), 1, 1)
  using AccO = decltype(cute::partition_fragment_C(
      MmaPv{}, cute::Shape<cute::_64, cute::Int<Config::kHeadDimV>>{}));  // ((2, 2, D / 8), 1, 1)
  using LayoutP = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1,
                                           cute::Int<Config::kBlockN / 16>>>;  // P as the A operand: the same registers
  using FragmentP = decltype(cute::make_tensor<Element>(LayoutP{}));

  const Flash_fwd_params& params;
  const MaskParams& mask;  // of kListed
  Storage& storage;
  const int group;                    // index of the warpgroup in its consumer group
  const AccumulatorCoords<4> coords;  // within the warpgroup's 64 rows
  KvState k_state, v_state;

  AccS acc_s;
  AccO acc_o;
  FragmentP tOrP;
  Softmax<kRows, Flag, Config::kSums> softmax;
  FwdDropout<Config> dropout;
  float slope_log2;                 // ALiBi slope of the tile's head
  int alibi_row;                    // position of the warpgroup's first row on the axis of the keys, for ALiBi
  ShortSoftcapSeries short_series;  // of the softcap
  BlockEntry entry;                 // kListed: of the block that is masked
  SeenLines<Config::kListed ? Config::kBlockN / kMaskWordKeys : 2> seen;  // kListed: of its scores, if it hides some
  bool clears_next = true;                                                // kListed: the next P V is the tile's first
  // kBiased
  static constexpr int kWholeBoxes = Config::kBlockN / (kBiasBoxBytes / 2);  // of 16-bit elements, of a block
  static constexpr bool kReadsBoxesEarly = kWholeBoxes == 1;
  // With a single stage the next boxes are loaded during the softmax: that is worth a fence.
  static constexpr bool kReleasesBoxesEarly = kReadsBoxesEarly && Config::kTile.bias_stages == 1;
  BiasState bias_state;
  uint32_t bias_words[kWholeBoxes * kBoxWords];
  const int box_lane;      // box_lane_offset()
  const float scale_log2;  // of raw scores

  __device__ __forceinline__ FwdMainloop(const FwdLaunch& launch, Storage& storage_, int group_)
      : params(launch.params),
        mask(launch.mask),
        storage(storage_),
        group(group_),
        coords(threadIdx.x % 128),
        box_lane(Config::kBiased ? box_lane_offset(box_row(), launch.mask.bias.row_stride != 0) : 0),
        scale_log2(Config::kBiased ? launch.params.scale_softmax * ScoreMod::kLog2e : 0.0f) {}

  // Passes through shared memory into registers: ptxas would reload a constant in every step, and wait for it.
  __device__ __forceinline__ void load_short_series() {
    const volatile ShortSoftcapSeries& series = storage.short_series;
    for (int i = 0; i < 2; ++i) short_series.coefficient[i] = series.coefficient[i];
  }

  __device__ __forceinline__ int row_begin(const Work& work) const { return work.tile.row_begin + 64 * group; }

  // Ping-pong barrier: once per KV block except a tile's first, skipped blocks included, because all warpgroups must
  // arrive equally often.
  __device__ __forceinline__ void wait_for_order_barrier() const {
    if constexpr (Config::kPingPong) cutlass::arch::NamedBarrier::sync(256, kPingPongBarrier + group);
  }
  __device__ __forceinline__ void arrive_at_order_barrier() const {
    if constexpr (Config::kPingPong) {
      cutlass::arch::NamedBarrier::arrive(256, kPingPongBarrier + (is_last_group() ? 0 : group + 1));
    }
  }
  __device__ __forceinline__ bool is_last_group() const { return group == Config::kWarpGroups - 1; }

  __device__ __forceinline__ void wait_for_k() const { storage.k_full[k_state.stage].wait(k_state.phase); }

  // Q of a tile and its first K have landed.
  __device__ __forceinline__ void wait_for_tile(int q_stage, uint32_t q_phase) const {
    storage.q_full[q_stage][group].wait(q_phase);
    wait_for_k();
  }

  // Issues S = Q K^T of the block at k_state; does not wait.
  __device__ __forceinline__ void issue_qk(int q_stage) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    auto tSrQ = thread.partition_fragment_A(q)(_, _, _, q_stage * Config::kWarpGroups + group);  // (MMA, 1, MMA_D)
    auto tSrK = thread.partition_fragment_B(k)(_, _, _, k_state.stage);                          // (MMA, 1, MMA_D)
    start_gemm(mma, tSrQ, tSrK, acc_s, true);
  }

  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s); }

  // Issues O += P V (O = P V if `clears`) of the block at v_state; does not wait. kMakesKeepMasks: makes the next
  // block's keep masks between the wgmmas.
  template <bool kMakesKeepMasks = false>
  __device__ __forceinline__ void issue_pv(bool clears) {
    using namespace cute;
    storage.v_full[v_state.stage].wait(v_state.phase);
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt = make_tensor(make_smem_ptr(storage.v[0]), typename Config::SmemLayoutVt{});
    auto tOrV = thread.partition_fragment_B(vt)(_, _, _, v_state.stage);  // (MMA, 1, MMA_N)
    start_gemm(mma, tOrP, tOrV, acc_o, clears, [&](int slice) {
      if constexpr (kMakesKeepMasks) dropout.make_keep_mask_here(slice, params.seqlen_q);
    });
  }

  // This warp has read the stage. kEveryLane: each lane arrives, for racecheck, if lanes read what one warp overwrites.
  template <bool kEveryLane = false, class State>
  __device__ __forceinline__ static void release(Barrier* empty, State& state) {
    if constexpr (Config::kCluster > 1) {
      if (threadIdx.x % 32 < Config::kCluster) empty[state.stage].arrive_at(threadIdx.x % 32);
    } else {
      if (kEveryLane || threadIdx.x % 32 == 0) empty[state.stage].arrive();
    }
    state.advance();
  }
  __device__ __forceinline__ void release_k() { release<Config::kPackedDropout>(storage.k_empty, k_state); }
  __device__ __forceinline__ void release_v() { release(storage.v_empty, v_state); }

  // Recomputes S of this warp's 16 rows and the block at k_state by mma.sync, without the other warps.
  __device__ __forceinline__ void recompute_s(int q_stage) {
    using namespace cute;
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                   SM80_16x8x16_F32BF16BF16F32_TN>;
    const auto all_q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    const auto all_k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    const auto q = all_q(_, _, q_stage * Config::kWarpGroups + group);
    const auto k = all_k(_, _, k_state.stage);
    // Rows 8 apart have the same swizzle and a fixed distance: with more than one base address each it spills.
    const auto pair = [](const auto& smem, int row, int col, int eights) {
      return *reinterpret_cast<const uint32_t*>(raw_pointer_cast(&smem(row, col)) + eights * 8 * Config::kAtomCols);
    };
    const int row = coords.row(0), key = threadIdx.x % 32 / 4;
    clear(acc_s);
#pragma unroll 1
    for (int col = coords.col(0); col < Config::kHeadDim; col += 16) {
#pragma unroll
      for (int i = 0; i < Config::kBlockN / 8; ++i) {
        float* const s = &acc_s(4 * i);
        Mma::fma(s[0], s[1], s[2], s[3], pair(q, row, col, 0), pair(q, row, col, 1), pair(q, row, col + 8, 0),
                 pair(q, row, col + 8, 1), pair(k, key, col, i), pair(k, key, col + 8, i), s[0], s[1], s[2], s[3]);
      }
    }
    __syncwarp();  // all lanes have read before K is released
  }

  // Keeps exp2 before the wait for P V; ptxas would sink it. `row_sum < 0` is never true, but ptxas cannot know that,
  // so this (already complete) wait depends on every exp2.
  __device__ __forceinline__ void finish_exp_before_pv_wait() const {
    const bool never = softmax.row_sum[0][0] + softmax.row_sum[1][0] < 0.0f;
    storage.v_full[v_state.stage].wait(v_state.phase ^ never);
  }

  __device__ __forceinline__ void rescale_o(const float (&correction)[kRows]) {
    auto out = row_col_view(acc_o);
    softmax.rescale(out, correction);
  }

  // tOrP = P in 16 bits, with dropout.
  template <bool kMasked>
  __device__ __forceinline__ void pack_p(const Work& work, int key) {
    using namespace cute;
    auto scores = row_col_view(acc_s);
    constexpr bool kMayDrop = Config::kListed ? kMasked : Config::kHasScoreMod && Config::kModifiers == Modifiers::kAny;
    if (kMayDrop && params.has_dropout) {
      const DropoutMask mask(params, work.tile.batch, work.tile.head);
      if constexpr (Config::kListed) {
        apply_dropout_rolled(mask, scores, coords, row_begin(work), key);
      } else {
        apply_dropout(mask, scores, coords, row_begin(work), key);
      }
    }
    auto pairs = recast<uint32_t>(tOrP);
#pragma unroll
    for (int i = 0; i < size(pairs); ++i) {
      const uint32_t pair = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
      if constexpr (Config::kPackedDropout) {
        pairs(i) = pair & dropout.keep_mask[i];
      } else {
        pairs(i) = pair;
      }
    }
  }

  // kListed. Shuffled, so that ptxas sees uniform branches.
  __device__ __forceinline__ BlockEntry entry_at(const Work& work, int i) const {
    BlockEntry entry = work.order.at(i);
    if (Config::kBiased && work.order.entries == nullptr) {
      entry.set(group, class_by_window(mask_of<Config>(params, work.tile), row_begin(work), i * Config::kBlockN,
                                       Config::kBlockN));
    }
    return {__shfl_sync(0xffffffffu, entry.bits, 0)};
  }
  __device__ __forceinline__ bool hides_some() const { return entry.strip(group) != BlockClass::kWhole; }
  __device__ __forceinline__ void find_seen(const Work& work, int key) {
    const WorkTile& tile = work.tile;
    const int row = row_begin(work) + threadIdx.x % 128 / 32 * 16;  // of this warp
    seen = seen_by_rows<Config::kBlockN>(factors_of(params, mask.factors, tile, tile.head),
                                         mask_of<Config>(params, tile), row, key);
  }

  // kBiased: the biases of a tile's sequence and head, and where its scores of a block lie.
  __device__ __forceinline__ ScoreBias bias_of(const WorkTile& tile) const {
    return mask.bias.of(tile.batch, tile.head, tile.q_begin);
  }
  __device__ __forceinline__ BiasTile bias_tile(const Work& work, int key, int diagonal) const {
    return {row_begin(work), key, work.tile.seqlen_q, work.tile.seqlen_k, diagonal};
  }
  template <class Scores>
  __device__ __forceinline__ void add_biases_to(Scores& scores, const Work& work, int key, int diagonal) {
    if (mask.bias.loads_boxes) {
      mask.bias.is_float ? add_boxes<true>(*this, scores) : add_boxes<false>(*this, scores);
    } else {
      add_data<Element>(scores, coords, bias_of(work.tile), bias_tile(work, key, diagonal));
    }
    if (mask.bias.table != nullptr) add_table(scores, coords, bias_of(work.tile), bias_tile(work, key, diagonal));
  }
  // This warpgroup's slot of a stage of boxes, the box once it has landed, and the first of the warp's rows in it.
  __device__ __forceinline__ int box_slot(const BiasState& at) const { return at.stage * Config::kWarpGroups + group; }
  __device__ __forceinline__ const char* wait_for_box(const BiasState& at) const {
    storage.bias_full[box_slot(at)].wait(at.phase);
    return storage.bias[box_slot(at)];
  }
  __device__ __forceinline__ static int box_row() { return threadIdx.x % 128 / 32 * 16; }
  __device__ __forceinline__ void release_box() {
    if (threadIdx.x % 32 == 0) storage.bias_empty[box_slot(bias_state)].arrive();
    bias_state.advance();
  }

  // Those of a whole block.
  __device__ __forceinline__ void release_boxes() {
#pragma unroll
    for (int i = 0; i < kWholeBoxes; ++i) release_box();
  }
  // P of a tile's first block, whose S is complete.
  __device__ __forceinline__ void first_step(const Work& work) {
    softmax = decltype(softmax)();
    dropout.read_col_bits(storage, k_state.stage);
    release_k();
    int n_block;  // kNoBlock where it is known that it needs no mask
    if constexpr (Config::kListed) {
      entry = entry_at(work, 0);
      n_block = entry.block();
    } else {
      n_block = kMaskFirstOnDemand ? work.steps.first_to_mask : work.order.block(0);
    }
    const int key = n_block * Config::kBlockN;
    if constexpr (Config::kListed) {
      if (hides_some()) find_seen(work, key);
    }
    dropout.begin_tile(params, work.tile, row_begin(work) + coords.row(0));
    if constexpr (Config::kHasScoreMod) {
      slope_log2 = ScoreMod::head_slope_log2(params, work.tile.batch, work.tile.head);
      alibi_row = alibi_diagonal(params, work.tile.batch, mask_of<Config>(params, work.tile), row_begin(work));
    }
    auto scores = row_col_view(acc_s);
    if (!kMaskFirstOnDemand || n_block != Work::TripCount::kNoBlock) modify_scores<true>(*this, scores, work, key);
    if constexpr (Config::kHasScoreMod) {
      // Not set_row_max(): with it ptxas orders the softcap loop so that it takes 2.5 % longer.
      float correction[kRows];
      softmax.update_row_max(scores, params.softmax_scale_log2, correction, params.rescale_threshold_log2);
    } else {
      softmax.set_row_max(scores, params.softmax_scale_log2);
    }
    softmax.exponentiate(scores, params.softmax_scale_log2);
    dropout.make_all_keep_masks();
    pack_p<true>(work, key);
  }

  // One KV block: S and P of step i (`n_block`), and O += P V of the previous block, which is the tile's first if
  // `clears`.
  template <bool kMasked>
  __device__ __forceinline__ void step(const Work& work, int i, int n_block, int q_stage, bool clears) {
    using SoftmaxStep = FwdSoftmaxStep<Config, kMasked>;
    // 1. Wait for K; in ping-pong, for the other warpgroup to have issued its GEMMs.
    wait_for_k();
    if constexpr (Config::kRandomBitsInPv) dropout.read_col_bits(storage, k_state.stage);
    wait_for_order_barrier();
    // 2. Issue S = Q K^T.
    issue_qk(q_stage);
    // 3. Issue O += P V of the previous block.
    issue_pv<Config::kRandomBitsInPv>(clears);
    arrive_at_order_barrier();
    // 4. S is complete, with kExpAfterPvWait P V too. Softmax; K is released as soon as S needs no recomputation.
    int key;
    if constexpr (Config::kListed) {
      key = n_block * Config::kBlockN;
    } else {
      key = (Config::kMaskBoundsInRegs ? n_block : work.order.block(i)) * Config::kBlockN;
    }
    if constexpr (Config::kListed && kMasked) {
      if (hides_some()) find_seen(work, key);  // its loads take as long as S
    }
    if constexpr (Config::kBiased && !kMasked && kReadsBoxesEarly) read_boxes(*this);
    wait_for<Config::kExpAfterPvWait && !kMasked ? 0 : 1>(acc_s);
    if constexpr (!Config::kRandomBitsInPv) dropout.read_col_bits(storage, k_state.stage);
    if constexpr (!SoftmaxStep::kMayRecomputeS) release_k();
    float correction[kRows];
    const Flag rescale = SoftmaxStep::run(*this, work, key, q_stage, correction);
    if constexpr (SoftmaxStep::kMayRecomputeS) release_k();
    if constexpr (Config::kBiased && !kMasked && !kReleasesBoxesEarly) release_boxes();
    if constexpr (Config::kExpBeforePvWait) finish_exp_before_pv_wait();
    // 5. Wait for P V, release V.
    cute::warpgroup_fence_operand(acc_s);
    wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(tOrP);
    release_v();
    // 6. Rescale O if row_max was updated.
    if constexpr (!Config::kRandomBitsInPv) dropout.make_all_keep_masks();  // ptxas spreads it among the exponentials
    if (rescale) rescale_o(correction);
    // 7. Pack P for the next step's P V.
    pack_p<kMasked>(work, key);
  }

  // Skipped blocks have to land before their stages can be released.
  __device__ __forceinline__ void skip_k(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_for_k();
      wait_for_order_barrier();
      arrive_at_order_barrier();
      release_k();
    }
  }
  __device__ __forceinline__ void skip_v(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      storage.v_full[v_state.stage].wait(v_state.phase);
      release_v();
    }
  }

  __device__ __forceinline__ void run_unmasked(const Work& work, int q_stage) {
    const int end = work.masked_begin();
    bool clears = true;
    // Counted down, so that the end is not recomputed in every step.
    for (int left = end - 1; left > 0; --left) {
      step<false>(work, end - left, work.order.block(end - left), q_stage, clears);
      clears = false;
    }
  }

  // All KV blocks after first_step(): unmasked, skipped on the left, masked, skipped on the right. Leaves to the caller
  // P V of the last computed block (issue_last_pv()) and V of the blocks skipped after it, whose number it returns.
  __device__ __forceinline__ int run(const Work& work, int q_stage) {
    if constexpr (Config::kListed) {
      return run_listed(work, q_stage);
    } else {
      run_unmasked(work, q_stage);
      int num_skipped = work.steps.skipped.left;
      skip_k(num_skipped);
      int i = work.masked_begin() + num_skipped;
      int n_block = Config::kNoMask ? work.order.block(i) : work.steps.first_masked_block;
      for (; i < work.count(); ++i) {
        step<true>(work, i, n_block, q_stage, i == work.second());
        skip_v(num_skipped);
        num_skipped = 0;
        n_block = work.order.range.next_masked(n_block);
      }
      skip_k(work.steps.skipped.right);
      return num_skipped + work.steps.skipped.right;
    }
  }

  // Steps without mask, dropout and score modifiers (kListed), or with boxes alone (kBiased). In masked steps all of
  // these are run-time options.
  __device__ __forceinline__ int unmasked_end(const Work& work) const {
    if constexpr (Config::kBiased) return adds_boxes_alone(params, mask.bias) ? work.order.whole : 0;
    return params.has_score_mod || params.has_dropout ? 0 : work.order.whole;
  }

  // The same by list: blocks that are whole for all warpgroups, then partial ones.
  __device__ __forceinline__ int run_listed(const Work& work, int q_stage) {
    const int count = work.order.count();
    clears_next = true;
    int i = 1;
    for (const int end = unmasked_end(work); i < end; ++i) {
      step<false>(work, i, 0, q_stage, clears_next);  // of any keys
      clears_next = false;
    }
    int num_skipped = 0;
    for (; i < count; ++i) {
      entry = entry_at(work, i);
      if (num_skipped < Config::kMostListedSkips && entry.strip(group) == BlockClass::kHidden) {
        skip_k(1);
        if constexpr (Config::kBiased) skip_boxes(*this);
        ++num_skipped;
        continue;
      }
      step<true>(work, i, entry.block(), q_stage, clears_next);
      clears_next = false;
      skip_v(num_skipped);
      num_skipped = 0;
    }
    return num_skipped;
  }

  // Issues P V of the last block; does not wait.
  __device__ __forceinline__ void issue_last_pv(const Work& work) {
    if constexpr (Config::kListed) {
      issue_pv(clears_next);
    } else {
      issue_pv(work.second() >= work.count());
    }
  }

  // O is complete. With `overlaps`, S of the next tile was issued before the last P V, so it is complete too; with
  // kIssueNextQkEarly it was issued after it and is still in flight.
  __device__ __forceinline__ void wait_for_o() {
    wait_for<Config::kIssueNextQkEarly>(acc_o);
    cute::warpgroup_fence_operand(tOrP);
    if constexpr (Config::kTile.overlaps) cute::warpgroup_fence_operand(acc_s);
    release_v();
  }
};

}  // namespace sm90
}  // namespace flash
