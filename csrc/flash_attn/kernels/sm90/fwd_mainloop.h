// The computing side of the wgmma forward: one warpgroup, 64 rows. S of a block of keys is computed while the product
// of P and V of the block before is still under way, so that the tensor cores work through the softmax.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

#include "core/block_range.h"
#include "kernels/common/convert.h"
#include "kernels/common/dropout.h"
#include "kernels/common/mask.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"
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
  using MmaQk = typename Config::MmaQk;
  using MmaPv = typename Config::MmaPv;
  using Flag = typename Config::Flag;
  static constexpr int kRows = 2;                                  // accumulator rows per thread
  static constexpr int kSlices = Config::kBlockN / 16;             // of keys, one for each wgmma of P V
  static constexpr uint32_t kPingPongBarrier = kBeginBarrier + 1;  // and those behind it
  // The first block is masked only where that may change anything.
  static constexpr bool kMaskFirstOnDemand = Config::kMaskBoundsInRegs && !Config::kNoMask;
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
  KvState k_state, v_state;

  AccS acc_s;
  AccO acc_o;
  FragmentP tOrP;
  Softmax<kRows, Flag, Config::kSums> softmax;
  RowBits dropout;                                                              // of the row block
  uint32_t col_bits[Config::kPackedDropout ? 4 * Storage::kColBitVectors : 1];  // of the key block
  uint32_t keep_mask[Config::kPackedDropout ? 4 * kSlices : 1];                 // what it keeps of the pairs of tOrP
  float slope_log2;                                                             // of its head, for ALiBi
  ShortSoftcapSeries short_series;                                              // for softcap

  __device__ __forceinline__ FwdMainloop(const Flash_fwd_params& params_, Storage& storage_, int group_)
      : params(params_), storage(storage_), group(group_), coords(threadIdx.x % 128) {}

  // ptxas would read a constant again in every step, and wait for it; what comes from shared memory stays in registers.
  __device__ __forceinline__ void load_short_series() {
    const volatile ShortSoftcapSeries& series = storage.short_series;
    for (int i = 0; i < 2; ++i) short_series.coefficient[i] = series.coefficient[i];
  }

  __device__ __forceinline__ int row_begin(const Work& work) const { return work.tile.row_begin + 64 * group; }

  // In every step but the first of a tile, also where the warpgroup lets its block pass: as often as all the others.
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

  // S of the block of keys at k_state: started, not waited for.
  __device__ __forceinline__ void start_qk(int q_stage) {
    using namespace cute;
    MmaQk mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    auto k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    auto tSrQ = thread.partition_fragment_A(q)(_, _, _, q_stage * Config::kWarpGroups + group);  // (MMA, 1, MMA_D)
    auto tSrK = thread.partition_fragment_B(k)(_, _, _, k_state.stage);                          // (MMA, 1, MMA_D)
    start_gemm(mma, tSrQ, tSrK, acc_s, true);
  }

  // O += P V, or O = P V, of the block at v_state: started, not waited for. kMakesKeepMasks: with the draws of the next
  // block.
  template <bool kMakesKeepMasks = false>
  __device__ __forceinline__ void start_pv(bool clears) {
    using namespace cute;
    storage.v_full[v_state.stage].wait(v_state.phase);
    MmaPv mma;
    const auto thread = mma.get_slice(threadIdx.x % 128);
    auto vt = make_tensor(make_smem_ptr(storage.v[0]), typename Config::SmemLayoutVt{});
    auto tOrV = thread.partition_fragment_B(vt)(_, _, _, v_state.stage);  // (MMA, 1, MMA_N)
    start_gemm(mma, tOrP, tOrV, acc_o, clears, [&](int slice) {
      if constexpr (kMakesKeepMasks) make_keep_mask_here(slice);
    });
  }

  // This warp has read the buffer; or this lane, which racecheck wants where lanes read what a warp then overwrites.
  template <bool kEveryLane = false>
  __device__ __forceinline__ static void release(Barrier* empty, KvState& state) {
    if (kEveryLane || threadIdx.x % 32 == 0) empty[state.stage].arrive();
    state.advance();
  }

  // Raw scores to what the softmax takes: softcap, ALiBi, mask.
  template <bool kMasked, class Scores>
  __device__ __forceinline__ void modify_scores(Scores& scores, const Work& work, int key) const {
    const Visibility visibility = work.visibility(params.window);
    const int first_row = row_begin(work);
    if constexpr (Config::kHasScoreMod) {
      ScoreMod::apply_by_warp<Config::kModifiers>(params, slope_log2, scores, coords, visibility.diagonal(first_row),
                                                  key);
    }
    if constexpr (kMasked) {
      const int row_end = min(first_row + 64, work.tile.seqlen_q), key_end = key + Config::kBlockN;
      if constexpr (Config::kMaskBoundsInRegs) {
        apply_mask(scores, coords, work.steps.bounds, row_end - first_row, work.tile.seqlen_k, key, key_end);
      } else {
        apply_mask(scores, coords, visibility, first_row, row_end, key, key_end);
      }
    }
  }

  // How far the tile's first row is beyond the first key of a block, along the diagonal.
  __device__ __forceinline__ int diagonal_distance(const Work& work, int key) const {
    return work.visibility(params.window).diagonal(row_begin(work)) - key;
  }
  // Whether the diagonals of all rows lie at or behind the block's last key; and whether at or before its first.
  __device__ __forceinline__ static bool is_before_diagonal(int distance) { return distance >= Config::kBlockN - 1; }
  __device__ __forceinline__ static bool is_behind_diagonal(int distance) { return distance + 63 <= 0; }

  template <bool kMasked>
  static constexpr bool kSpeculativeExp = Config::kSpeculativeExp && (!kMasked || Config::kSpeculativeOnMasked);

  // Whether a block may be exponentiated ahead of its references. ALiBi: where its bias is linear.
  __device__ __forceinline__ bool may_speculate(const Work& work, int key) const {
    bool may = softmax.may_speculate(params.rescale_threshold_log2);
    if constexpr (Config::kModifiers == Modifiers::kAlibi) {
      const int distance = diagonal_distance(work, key);
      may &= is_before_diagonal(distance) || is_behind_diagonal(distance);
    }
    return may;
  }

  template <class Scores>
  __device__ __forceinline__ bool exp2_speculative(Scores& scores, const Work& work, int key) {
    if constexpr (Config::kModifiers == Modifiers::kAlibi) {
      const int distance = diagonal_distance(work, key);
      return softmax.exp2_speculative_alibi(scores, coords, params.scale_softmax * ScoreMod::kLog2e,
                                            is_before_diagonal(distance) ? slope_log2 : -slope_log2, distance);
    } else {
      return softmax.exp2_speculative(scores, params.softmax_scale_log2);
    }
  }

  // S of this warp's rows and the block of keys at k_state once more, by mma.sync: without the other warps.
  __device__ __forceinline__ void multiply_qk_again(int q_stage) {
    using namespace cute;
    using Mma = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, SM80_16x8x16_F32F16F16F32_TN,
                                   SM80_16x8x16_F32BF16BF16F32_TN>;
    const auto all_q = make_tensor(make_smem_ptr(storage.q[0][0]), typename Config::SmemLayoutQ{});
    const auto all_k = make_tensor(make_smem_ptr(storage.k[0]), typename Config::SmemLayoutK{});
    const auto q = all_q(_, _, q_stage * Config::kWarpGroups + group);
    const auto k = all_k(_, _, k_state.stage);
    // Rows that are 8 apart are swizzled alike and stand at a fixed distance.
    const auto pair = [](const auto& work, int row, int col, int eights) {
      return *reinterpret_cast<const uint32_t*>(raw_pointer_cast(&work(row, col)) + eights * 8 * Config::kAtomCols);
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
    __syncwarp();  // all lanes have read
  }

  // Reads the words of the columns of the key block at k_state.
  __device__ __forceinline__ void read_col_bits() {
    if constexpr (Config::kPackedDropout) {
#pragma unroll
      for (int i = 0; i < Storage::kColBitVectors; ++i) {
        const uint4 bits = storage.col_bits[k_state.stage][threadIdx.x % 4][i];
        col_bits[4 * i] = bits.x;
        col_bits[4 * i + 1] = bits.y;
        col_bits[4 * i + 2] = bits.z;
        col_bits[4 * i + 3] = bits.w;
      }
    }
  }

  // Gives the buffers of the key block at k_state back.
  __device__ __forceinline__ void release_key() { release<Config::kPackedDropout>(storage.k_empty, k_state); }

  // What decides which probabilities of a slice are dropped. It depends on places only.
  __device__ __forceinline__ void make_keep_mask(int slice) {
#pragma unroll
    for (int i = 4 * slice; i < 4 * slice + 4; ++i) {
      keep_mask[i] = dropout.make_keep_mask(i % 2, {col_bits[i / 2], col_bits[Storage::kFineBits + slice]});
    }
  }

  // ptxas would draw where P is dropped, behind the exponentials, unless a store depends on it that never happens.
  __device__ __forceinline__ void make_keep_mask_here(int slice) {
    make_keep_mask(slice);
    asm volatile(
        "{\n\t"
        ".reg .pred never;\n\t"
        "setp.lt.s32 never, %0, 0;\n\t"
        "@never st.shared.v4.b32 [%1], {%2, %3, %4, %5};\n\t"
        "}" ::"r"(params.seqlen_q),
        "r"(0), "r"(keep_mask[4 * slice]), "r"(keep_mask[4 * slice + 1]), "r"(keep_mask[4 * slice + 2]),
        "r"(keep_mask[4 * slice + 3])
        : "memory");
  }

  __device__ __forceinline__ void make_all_keep_masks() {
    if constexpr (Config::kPackedDropout) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) make_keep_mask(slice);
    }
  }

  // Masks an edge and exponentiates it ahead of its references. Returns whether that was right; if not, it is masked.
  template <class Scores>
  __device__ __forceinline__ bool mask_and_speculate(Scores& scores, const Work& work, int key, int q_stage) {
    bool speculative = may_speculate(work, key);
#pragma unroll 1
    while (true) {
      modify_scores<true>(scores, work, key);
      if (!speculative) return false;
      if (exp2_speculative(scores, work, key)) return true;
      multiply_qk_again(q_stage);
      speculative = false;
    }
  }

  // Exponentials of S of a block. Returns whether the output is still to be multiplied by `correction`: references
  // rose.
  template <bool kMasked>
  __device__ __forceinline__ Flag exponentiate(const Work& work, int key, int q_stage, float (&correction)[kRows]) {
    auto scores = row_col_view(acc_s);
    if constexpr (kMasked && kSpeculativeExp<kMasked>) {
      if (mask_and_speculate(scores, work, key, q_stage)) return false;
    } else {
      if constexpr (kSpeculativeExp<kMasked>) {
        if (may_speculate(work, key)) {
          if (exp2_speculative(scores, work, key)) return false;
          multiply_qk_again(q_stage);
        }
      }
      if (!kMasked && Config::kModifiers == Modifiers::kSoftcap &&
          softmax.template exp2_softcap_poly<Config::kCheckBoundByNorm>(scores, params.softcap_series, short_series,
                                                                        params.rescale_threshold_log2)) {
        return false;
      }
      modify_scores<kMasked>(scores, work, key);
    }
    return update_softmax(scores, correction);
  }

  // The same of an unmasked block, with the wait for P V between the exponentials and the look at their sums. All warps
  // wait there, those that may not go ahead too: wgmma.wait_group is one instruction of the whole warpgroup.
  __device__ __forceinline__ Flag exp2_around_pv(const Work& work, int key, int q_stage, float (&correction)[kRows]) {
    auto scores = row_col_view(acc_s);
    float offset[kRows], sums[kRows];
    for (int mi = 0; mi < kRows; ++mi) offset[mi] = softmax.row_max[mi] * params.softmax_scale_log2;
    Flag raised = false;
    const bool speculative = may_speculate(work, key);
    if (!speculative) {
      raised = softmax.update_row_max(scores, params.softmax_scale_log2, correction, params.rescale_threshold_log2);
      softmax.set_offsets(scores, params.softmax_scale_log2, offset);
    }
    softmax.exp2_with_sums(scores, params.softmax_scale_log2, [&](int mi, int) { return offset[mi]; }, sums);
    cute::warpgroup_wait<0>();
    if (speculative && !softmax.speculation_holds(sums)) {
      multiply_qk_again(q_stage);
      return update_softmax(scores, correction);
    }
    softmax.add(sums);
    return raised;
  }

  template <class Scores>
  __device__ __forceinline__ Flag update_softmax(Scores& scores, float (&correction)[kRows]) {
    const Flag raised =
        softmax.update_row_max(scores, params.softmax_scale_log2, correction, params.rescale_threshold_log2);
    softmax.exponentiate(scores, params.softmax_scale_log2);
    return raised;
  }

  __device__ __forceinline__ void rescale_output(const float (&correction)[kRows]) {
    auto out = row_col_view(acc_o);
    softmax.rescale(out, correction);
  }

  __device__ __forceinline__ void set_probabilities(const Work& work, int key) {
    using namespace cute;
    auto scores = row_col_view(acc_s);
    if (Config::kHasScoreMod && Config::kModifiers == Modifiers::kAny && params.has_dropout) {
      const DropoutMask mask(params.dropout, work.tile.batch, work.tile.head);
      apply_dropout(mask, scores, coords, row_begin(work), key);
    }
    auto pairs = recast<uint32_t>(tOrP);
#pragma unroll
    for (int i = 0; i < size(pairs); ++i) {
      const uint32_t pair = pack_pair(acc_s(2 * i), acc_s(2 * i + 1), Element{});
      if constexpr (Config::kPackedDropout) {
        pairs(i) = pair & keep_mask[i];
      } else {
        pairs(i) = pair;
      }
    }
  }

  // ptxas moves exponentials behind the wait for P V, where nothing hides them, unless a branch before it depends on
  // them. This one waits for what arrived long ago: sums of probabilities are never negative.
  __device__ __forceinline__ void finish_exp_before_pv_wait() const {
    const bool never = softmax.row_sum[0][0] + softmax.row_sum[1][0] < 0.0f;
    storage.v_full[v_state.stage].wait(v_state.phase ^ never);
  }

  // P of the first block, from its S.
  __device__ __forceinline__ void first_step(const Work& work) {
    softmax = decltype(softmax)();
    read_col_bits();
    release_key();
    const int n_block = kMaskFirstOnDemand ? work.steps.first_to_mask : work.order.block(0),
              key = n_block * Config::kBlockN;
    if constexpr (Config::kPackedDropout) {
      const DropoutMask mask(params.dropout, work.tile.batch, work.tile.head);
      dropout = RowBits(mask, row_begin(work) + coords.row(0));
    }
    if constexpr (Config::kHasScoreMod) {
      slope_log2 = ScoreMod::head_slope_log2(params, work.tile.batch, work.tile.head);
    }
    auto scores = row_col_view(acc_s);
    if (!kMaskFirstOnDemand || n_block != WarpgroupTripCount::kNoBlock) modify_scores<true>(scores, work, key);
    if constexpr (Config::kHasScoreMod) {
      // As later: with set_row_max() ptxas orders the loop of the softcap so that it takes 2.5 % longer.
      float correction[kRows];
      softmax.update_row_max(scores, params.softmax_scale_log2, correction, params.rescale_threshold_log2);
    } else {
      softmax.set_row_max(scores, params.softmax_scale_log2);
    }
    softmax.exponentiate(scores, params.softmax_scale_log2);
    make_all_keep_masks();
    set_probabilities(work, key);
  }

  // S and P of block i, which is `n_block`, and P V of the block before, which is the first if it clears the output.
  template <bool kMasked>
  __device__ __forceinline__ void step(const Work& work, int i, int n_block, int q_stage, bool clears) {
    wait_for_k();
    if constexpr (Config::kRandomBitsInPv) read_col_bits();
    wait_for_order_barrier();
    start_qk(q_stage);
    start_pv<Config::kRandomBitsInPv>(clears);
    arrive_at_order_barrier();
    const int key = (Config::kMaskBoundsInRegs ? n_block : work.order.block(i)) * Config::kBlockN;
    wait_for<1>(acc_s);
    if constexpr (!Config::kRandomBitsInPv) read_col_bits();
    if constexpr (!kSpeculativeExp<kMasked>) release_key();
    float correction[kRows];
    Flag raised;
    if constexpr (Config::kCheckSumsAfterPv && !kMasked) {
      raised = exp2_around_pv(work, key, q_stage, correction);
    } else {
      raised = exponentiate<kMasked>(work, key, q_stage, correction);
    }
    if constexpr (kSpeculativeExp<kMasked>) release_key();
    if constexpr (Config::kExpBeforePvWait) finish_exp_before_pv_wait();
    cute::warpgroup_fence_operand(acc_s);
    wait_for<0>(acc_o);
    cute::warpgroup_fence_operand(tOrP);
    release(storage.v_empty, v_state);
    if constexpr (!Config::kRandomBitsInPv) make_all_keep_masks();  // in the pauses between the exponentials
    if (raised) rescale_output(correction);
    set_probabilities(work, key);
  }

  // Q of a tile and its first block of keys have landed.
  __device__ __forceinline__ void wait_for_tile(int q_stage, uint32_t q_phase) const {
    storage.q_full[q_stage][group].wait(q_phase);
    wait_for_k();
  }

  __device__ __forceinline__ void wait_for_scores() { wait_for<0>(acc_s); }

  // Lets blocks pass: they have to land before their buffers can be given back.
  __device__ __forceinline__ void skip_k(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      wait_for_k();
      wait_for_order_barrier();
      arrive_at_order_barrier();
      release<Config::kPackedDropout>(storage.k_empty, k_state);
    }
  }
  __device__ __forceinline__ void skip_v(int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      storage.v_full[v_state.stage].wait(v_state.phase);
      release(storage.v_empty, v_state);
    }
  }

  __device__ __forceinline__ void run_unmasked(const Work& work, int q_stage) {
    const int end = work.masked_begin();
    bool clears = true;
    // Counted down, so that its end is not computed again in every step.
    for (int left = end - 1; left > 0; --left) {
      step<false>(work, end - left, work.order.block(end - left), q_stage, clears);
      clears = false;
    }
  }

  // All blocks of keys of the walk after first_step(), but for P V of the last that the warpgroup computes and for V of
  // the blocks that it lets pass after that one. Returns their number.
  __device__ __forceinline__ int run(const Work& work, int q_stage) {
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

  // P V of the last block: started, not waited for.
  __device__ __forceinline__ void start_last_pv(const Work& work) { start_pv(work.second() >= work.count()); }

  // O is complete, and so is S of the next tile if it was started before P V.
  __device__ __forceinline__ void finish() {
    wait_for<Config::kIssueNextQkEarly>(acc_o);
    cute::warpgroup_fence_operand(tOrP);
    if constexpr (Config::kTile.overlaps) cute::warpgroup_fence_operand(acc_s);
    release(storage.v_empty, v_state);
  }
};

}  // namespace sm90
}  // namespace flash
