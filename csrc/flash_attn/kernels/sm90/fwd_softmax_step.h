// Softmax of one KV block in the wgmma forward, as strategies: FwdSoftmaxStep picks one by policy row and mask.
//
// run() turns S in acc_s into exp2(S - row_max) and adds to row_sum. It returns, warp-uniform, whether row_max was
// updated: O then has to be multiplied by `correction`. With kMayRecomputeS, K has to stay until run() returns.
#pragma once

#include <type_traits>

#include "kernels/common/accumulator.h"
#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/common/origin.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/softmax.h"
#include "kernels/sm90/fwd_storage.h"
#include "kernels/sm90/gemm.h"

namespace flash {
namespace sm90 {

// From raw scores to the softmax's: softcap, ALiBi, biases, mask.
template <bool kMasked, class Config, class Mainloop, class Scores>
__device__ __forceinline__ void modify_scores(Mainloop& m, Scores& scores, const FwdWork<Config>& work, int key) {
  const MaskOf<Config> visibility = mask_of<Config>(m.params, work.tile);
  const int first_row = m.row_begin(work);
  if constexpr (Config::kHasScoreMod) {
    ScoreMod::apply<Config::kModifiers>(m.params, m.slope_log2, scores, m.coords, m.alibi_row, key);
  }
  if constexpr (kMasked && Config::kListed) {
    if (m.params.has_score_mod) {  // the short form: in a kernel for all options code counts more than its time
      const int diagonal = alibi_diagonal(m.params, work.tile.batch, visibility, first_row);
      ScoreMod(m.params, work.tile.batch, work.tile.head).apply(scores, m.coords, diagonal, key);
      if constexpr (Config::kBiased) m.add_biases_to(scores, work, key, diagonal);
    }
    if (m.hides_some()) hide_unseen(scores, m.seen);
  } else if constexpr (kMasked) {
    const int row_end = min(first_row + 64, work.tile.seqlen_q), key_end = key + Config::kBlockN;
    if constexpr (Config::kMaskBoundsInRegs) {
      apply_bounds(scores, m.coords, work.steps.bounds, row_end - first_row, work.tile.seqlen_k, key, key_end);
    } else {
      apply_mask(scores, m.coords, visibility, first_row, row_end, key, key_end);
    }
  }
}

// Maxima first: may update row_max, always correct.
template <class Mainloop, class Scores>
__device__ __forceinline__ typename Mainloop::Flag update_softmax(Mainloop& m, Scores& scores,
                                                                  float (&correction)[Mainloop::kRows]) {
  const Flash_fwd_params& params = m.params;
  const typename Mainloop::Flag rescale =
      m.softmax.update_row_max(scores, params.softmax_scale_log2, correction, params.rescale_threshold_log2);
  m.softmax.exponentiate(scores, params.softmax_scale_log2);
  return rescale;
}

// Distance from a block's first key to the diagonal of the warpgroup's first row. ALiBi may be speculative where its
// bias is linear in the column: all keys before, or all after, the diagonals of all 64 rows.
template <class Mainloop>
__device__ __forceinline__ int diagonal_distance(const Mainloop& m, int key) {
  return m.alibi_row - key;
}
template <class Config>
__device__ __forceinline__ bool is_before_diagonal(int distance) {
  return distance >= Config::kBlockN - 1;
}
__device__ __forceinline__ bool is_behind_diagonal(int distance) { return distance + 63 <= 0; }

template <class Config, class Mainloop>
__device__ __forceinline__ bool may_speculate(const Mainloop& m, const FwdWork<Config>& work, int key) {
  bool may = m.softmax.may_speculate(m.params.rescale_threshold_log2);
  if constexpr (Config::kModifiers == Modifiers::kAlibi) {
    const int distance = diagonal_distance(m, key);
    may &= is_before_diagonal<Config>(distance) || is_behind_diagonal(distance);
  }
  return may;
}

// False: scores are P, other state is unchanged.
template <class Config, class Mainloop, class Scores>
__device__ __forceinline__ bool exp2_speculative(Mainloop& m, Scores& scores, const FwdWork<Config>& work, int key) {
  if constexpr (Config::kModifiers == Modifiers::kAlibi) {
    const int distance = diagonal_distance(m, key);
    return m.softmax.exp2_speculative_alibi(scores, m.coords, m.params.scale_softmax * ScoreMod::kLog2e,
                                            is_before_diagonal<Config>(distance) ? m.slope_log2 : -m.slope_log2,
                                            distance);
  } else {
    return m.softmax.exp2_speculative(scores, m.params.softmax_scale_log2);
  }
}

template <class Config, bool kMasked>
struct PlainSoftmax {
  static constexpr bool kMayRecomputeS = false;

  template <class Mainloop>
  __device__ __forceinline__ static typename Config::Flag run(Mainloop& m, const FwdWork<Config>& work, int key, int,
                                                              float (&correction)[Mainloop::kRows]) {
    auto scores = row_col_view(m.acc_s);
    modify_scores<kMasked>(m, scores, work, key);
    return update_softmax(m, scores, correction);
  }
};

// Softcap by its polynomial, fused into the exponentials, where the warp's scores allow it.
template <class Config>
struct SoftcapPolySoftmax {
  static constexpr bool kMayRecomputeS = false;

  template <class Mainloop>
  __device__ __forceinline__ static typename Config::Flag run(Mainloop& m, const FwdWork<Config>& work, int key,
                                                              int q_stage, float (&correction)[Mainloop::kRows]) {
    auto scores = row_col_view(m.acc_s);
    if (m.softmax.template exp2_softcap_poly<Config::kCheckBoundByNorm>(scores, m.params.softcap_series, m.short_series,
                                                                        m.params.rescale_threshold_log2)) {
      return false;
    }
    return PlainSoftmax<Config, false>::run(m, work, key, q_stage, correction);
  }
};

// Exponentials against the row max so far, then the check of their sums. If that fails, the maximum of P tells the new
// row max; only where P overflowed is S computed again.
template <class Config>
struct SpeculativeSoftmax {
  static constexpr bool kMayRecomputeS = true;

  template <class Mainloop>
  __device__ __forceinline__ static typename Config::Flag run(Mainloop& m, const FwdWork<Config>& work, int key,
                                                              int q_stage, float (&correction)[Mainloop::kRows]) {
    auto scores = row_col_view(m.acc_s);
    if (may_speculate(m, work, key)) {
      if (exp2_speculative(m, scores, work, key)) return false;
      if (m.softmax.raise_row_max(scores, m.params.softmax_scale_log2, correction)) return true;
      m.recompute_s(q_stage);
    }
    return PlainSoftmax<Config, false>::run(m, work, key, q_stage, correction);
  }
};

// The same after the mask. A loop, so that the mask's code exists once.
template <class Config>
struct SpeculativeMaskedSoftmax {
  static constexpr bool kMayRecomputeS = true;

  template <class Mainloop>
  __device__ __forceinline__ static typename Config::Flag run(Mainloop& m, const FwdWork<Config>& work, int key,
                                                              int q_stage, float (&correction)[Mainloop::kRows]) {
    auto scores = row_col_view(m.acc_s);
    bool speculative = may_speculate(m, work, key);
#pragma unroll 1
    while (true) {
      modify_scores<true>(m, scores, work, key);
      if (!speculative) return update_softmax(m, scores, correction);
      if (exp2_speculative(m, scores, work, key)) return false;
      if (m.softmax.raise_row_max(scores, m.params.softmax_scale_log2, correction)) return true;
      m.recompute_s(q_stage);
      speculative = false;
    }
  }
};

// The same for a whole block whose bias comes in boxes: it is added in the exponents. Scores are raw, row_max is of
// biased scores.
template <class Config>
struct BoxSoftmax {
  static constexpr bool kMayRecomputeS = true;

  template <class Mainloop>
  __device__ __forceinline__ static typename Config::Flag run(Mainloop& m, const FwdWork<Config>&, int, int q_stage,
                                                              float (&correction)[Mainloop::kRows]) {
    using Element = typename Config::Element;
    auto scores = row_col_view(m.acc_s);
    if constexpr (!Mainloop::kReadsBoxesEarly) read_boxes(m);
    auto& words = m.bias_words;
    if (m.softmax.may_speculate(m.params.rescale_threshold_log2)) {
      // row_max is of biased scores in units of log2(e), biases are in natural units.
      const auto offset = [&](int mi, int ni) {
        return __fmaf_rn(-kBiasUnit, half_of_pair<Element>(words[box_word(mi, ni)], ni % 2), m.softmax.row_max[mi]);
      };
      if (m.softmax.exp2_speculative(scores, m.scale_log2, offset)) return false;
      if (m.softmax.raise_row_max(scores, m.params.softmax_scale_log2, correction)) return true;
      m.recompute_s(q_stage);
      if constexpr (!Mainloop::kReleasesBoxesEarly) read_boxes(m);
    }
#pragma unroll
    for (int i = 0; i < cute::size(scores); ++i) scores(i) *= m.scale_log2;
    add_box<Element>(scores, 0, words);
    return update_softmax(m, scores, correction);
  }
};

template <class Config, bool kMasked>
using SpeculativeStep =
    std::conditional_t<kMasked, SpeculativeMaskedSoftmax<Config>,
                       std::conditional_t<Config::kBiased, BoxSoftmax<Config>, SpeculativeSoftmax<Config>>>;

template <class Config, bool kMasked>
using FwdSoftmaxStep =
    std::conditional_t<Config::kSpeculativeExp && (!kMasked || Config::kSpeculativeOnMasked),
                       SpeculativeStep<Config, kMasked>,
                       std::conditional_t<Config::kModifiers == Modifiers::kSoftcap && !kMasked,
                                          SoftcapPolySoftmax<Config>, PlainSoftmax<Config, kMasked>>>;

}  // namespace sm90
}  // namespace flash
