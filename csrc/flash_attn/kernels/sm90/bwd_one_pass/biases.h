// Biases as data in a consumer of the one-pass wgmma backward: what its mainloop adds to the scores of a step.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/differentiate.h"
#include "kernels/common/listed_mask.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bias_boxes.h"
#include "kernels/tma/tile_copy.h"
#include "params/flash.h"

namespace flash {
namespace sm90 {

template <class Config>
struct BwdMainloop;

// Whether steps need nothing but boxes, and with fp32 ones of rows.
__device__ __forceinline__ bool adds_step_boxes_alone(const Flash_bwd_params& params, const ScoreBias& bias) {
  return bias.loads_boxes && bias.table == nullptr && params.alibi_slopes_ptr == nullptr &&
         !(bias.is_float && bias.row_stride == 0);
}

// The next box of a step's keys, once it has landed, and its release when it has been read.
template <class Config, class State>
__device__ __forceinline__ const char* wait_for_box(const BwdMainloop<Config>& m, const State& state) {
  m.storage.bias_full[state.stage].wait(state.phase);
  return m.storage.bias[state.stage] + m.group * Config::kBlockM * kBiasBoxBytes;
}
// Used: what was stored depends on all that was read. Otherwise the arrival would wait for no load.
template <bool kUsed, class Config>
__device__ __forceinline__ void release_box(BwdMainloop<Config>& m) {
  if constexpr (!kUsed) tma::fence_buffer();
  m.storage.bias_empty[m.bias_state.stage].arrive();
  m.bias_state.advance();
}

// The boxes of a step, as the loader asked for them.
template <bool kFloat, class Config, class Scores>
__device__ __forceinline__ void add_boxes(BwdMainloop<Config>& m, Scores& scores) {
  const bool has_rows = m.launch.mask.bias.row_stride != 0;
#pragma unroll
  for (int warp = m.thread / 32, i = 0; i < (kFloat ? 2 : 1); ++i) {
    const char* const box = wait_for_box(m, m.bias_state);
    if constexpr (!kFloat) {
      add_transposed_box<typename Config::Element>(scores, box, 16 * warp, has_rows);
    } else if (warp / 2 == i) {  // half of the keys
      add_transposed_float_box(scores, box, 16 * (warp % 2), has_rows);
    }
    release_box<false>(m);
  }
}

// P of the raw scores of a step that adds nothing but its box: the bias is part of what exponents subtract. kReads: the
// box is read here.
template <bool kReads, class Element, class Scores, class Box, class RowValues>
__device__ __forceinline__ void exponentiate_with_box(Scores& scores, Box& box, float scale_log2,
                                                      const RowValues& lse_log2) {
#pragma unroll
  for (int mi = 0; mi < cute::size<0>(scores); mi += 2) {
    if (kReads && mi % 4 == 0) box.read_rows(mi / 4);
    const float2 lse = lse_log2.pair(mi);
#pragma unroll
    for (int ni = 0; ni < 2; ++ni) {
      const float2 bias = box.template pair<Element>(mi, ni);
      scores(mi, ni) = exp2f(scores(mi, ni) * scale_log2 - __fmaf_rn(-kBiasUnit, bias.x, lse.x));
      scores(mi + 1, ni) = exp2f(scores(mi + 1, ni) * scale_log2 - __fmaf_rn(-kBiasUnit, bias.y, lse.y));
    }
  }
}

// The same of fp32, rounded as by add_bias(): half of the keys a box.
template <class Config, class Scores, class RowValues>
__device__ __forceinline__ void exponentiate_with_float_boxes(BwdMainloop<Config>& m, Scores& scores, float scale_log2,
                                                              const RowValues& lse_log2) {
  const int warp = m.thread / 32;
  auto second = m.bias_state;
  second.advance();
  const char* const boxes[] = {wait_for_box(m, m.bias_state), wait_for_box(m, second)};
  const TransposedFloatBox box(boxes[warp / 2], 16 * (warp % 2));
#pragma unroll
  for (int mi = 0; mi < cute::size<0>(scores); mi += 2) {
    const float2 lse = lse_log2.pair(mi);
#pragma unroll
    for (int ni = 0; ni < 2; ++ni) {
      const float2 bias = box.pair(mi, ni);
      scores(mi, ni) = exp2f(__fmaf_rn(kBiasUnit, bias.x, __fmul_rn(scores(mi, ni), scale_log2)) - lse.x);
      scores(mi + 1, ni) = exp2f(__fmaf_rn(kBiasUnit, bias.y, __fmul_rn(scores(mi + 1, ni), scale_log2)) - lse.y);
    }
  }
}

// Turns raw scores of a step into those of the softmax, without the mask.
template <class Config, class Scores>
__device__ __forceinline__ void add_step_biases(BwdMainloop<Config>& m, int head, const TileCoords& at,
                                                Scores& scores) {
  const ScoreBias& bias = m.launch.mask.bias;
  const int diagonal = alibi_diagonal(m.params, m.tile.batch, m.visibility, at.row_begin);
  const ScoreMod score_mod(m.params, m.tile.batch, head);
#pragma unroll
  for (int i = 0; i < cute::size(scores); ++i) scores(i) *= score_mod.scale_log2;
  score_mod.add_bias(scores, m.coords, diagonal, at.key_begin);
  const BiasTile bias_tile{at.row_begin, at.key_begin, m.tile.seqlen_q, m.tile.seqlen_k, diagonal};
  const ScoreBias own = bias.of(m.tile.batch, head, m.tile.q_begin);
  if (!bias.loads_boxes) add_data<typename Config::Element>(scores, m.coords, own, bias_tile);
  if (bias.loads_boxes) bias.is_float ? add_boxes<true>(m, scores) : add_boxes<false>(m, scores);
  if (bias.table != nullptr) add_table(scores, m.coords, own, bias_tile);
}

// The box of a step, if nothing else is added and it is of 16-bit elements; already read where that is before the order
// barrier.
template <class Config>
__device__ __forceinline__ typename BwdMainloop<Config>::Box box_of_step(BwdMainloop<Config>& m) {
  typename BwdMainloop<Config>::Box box;
  if constexpr (Config::kBiased) {
    const ScoreBias& bias = m.launch.mask.bias;
    if (bias.is_float || !adds_step_boxes_alone(m.params, bias)) return box;
    box = {wait_for_box(m, m.bias_state), 16 * (m.thread / 32), bias.row_stride != 0};
    if constexpr (Config::kHasDqWarpgroup) box.read();
  }
  return box;
}

// P of the raw scores of a step, of any biases.
template <class Config, class Seen, class Box, class RowValues, class Scores>
__device__ __forceinline__ void exponentiate_biased(BwdMainloop<Config>& m, int head, const TileCoords& at,
                                                    bool is_unmasked, const Seen& seen, Box& box,
                                                    const RowValues& lse_log2, Scores& scores) {
  const ScoreBias& bias = m.launch.mask.bias;
  if (!adds_step_boxes_alone(m.params, bias)) {
    add_step_biases(m, head, at, scores);
    if (!is_unmasked) hide_unseen(scores, seen);
    return exponentiate_scores(scores, m.params.softmax_scale_log2, lse_log2);
  }
  const float scale_log2 = m.params.scale_softmax * ScoreMod::kLog2e;
  if (bias.is_float) {
    exponentiate_with_float_boxes(m, scores, scale_log2, lse_log2);
  } else {
    constexpr bool kReads = !Config::kHasDqWarpgroup;
    exponentiate_with_box<kReads, typename Config::Element>(scores, box, scale_log2, lse_log2);
  }
  if (!is_unmasked) hide_unseen(scores, seen, 0.0f);
}

// dp becomes dS.
template <class Config, class Probabilities, class Gradients, class RowValues>
__device__ __forceinline__ void differentiate_biased(const BwdMainloop<Config>& m, const Probabilities& p,
                                                     Gradients& dp, const RowValues& softmax_d) {
  if constexpr (Config::kMayDrop) {
    differentiate_handed(m.params, p, dp, softmax_d);
  } else {
    differentiate_scores(p, dp, softmax_d);
  }
}

// Stores dS in fp32, where it is the gradient of attn_bias: 8 lanes have 8 neighbouring keys.
template <class Config, class Gradients>
__device__ __forceinline__ void store_float_ds(const BwdMainloop<Config>& m, int head, const TileCoords& at,
                                               const Gradients& ds) {
  const ScoreGradients& result = m.launch.float_ds;
  if (result.data == nullptr) return;
  const int rows = m.tile.seqlen_q - at.row_begin, cols = result.cols - at.key_begin;
  float* const out =
      static_cast<float*>(result.data) +
      matrix_offset(result.strides, m.params.is_varlen(), m.tile.batch, m.tile.q_begin + at.row_begin, head) +
      at.key_begin;
#pragma unroll
  for (int mi = 0; mi < cute::size<0>(ds); ++mi) {
    const int row = m.coords.row(mi);
    float* const row_out = out + row * result.strides.row;
#pragma unroll
    for (int ni = 0; ni < 2; ++ni) {
      if (row < rows && m.coords.col(ni) < cols) __stcs(row_out + m.coords.col(ni), ds(mi, ni));
    }
  }
}

// After dS of a step is in shared memory: releases its boxes, and stores dS in fp32.
template <class Config, class Visit, class Accumulator>
__device__ __forceinline__ void finish_step(BwdMainloop<Config>& m, const Visit& at, Accumulator& acc_ds) {
  if constexpr (Config::kBiased) {
    const ScoreBias& bias = m.launch.mask.bias;
    if (adds_step_boxes_alone(m.params, bias)) {
      release_box<true>(m);
      if (bias.is_float) release_box<true>(m);
    }
    store_float_ds(m, at.head, {m.tile.batch, at.head, at.m_block * Config::kBlockM, m.key_begin()},
                   transposed_row_col_view(acc_ds));
  }
}

}  // namespace sm90
}  // namespace flash
