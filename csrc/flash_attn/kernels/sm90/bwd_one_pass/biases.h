// Biases as data in a consumer of the one-pass wgmma backward: what its mainloop adds to the scores of a step.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/differentiate.h"
#include "kernels/common/mask.h"
#include "kernels/sm90/bias_boxes.h"
#include "kernels/tma/tile_copy.h"
#include "params/flash.h"

namespace flash {
namespace sm90 {

template <class Config>
struct BwdMainloop;

// The boxes of a step, as the loader asked for them.
template <bool kFloat, class Config, class Scores>
__device__ __forceinline__ void add_boxes(BwdMainloop<Config>& m, Scores& scores) {
  const bool has_rows = m.launch.mask.bias.row_stride != 0;
#pragma unroll
  for (int warp = m.thread / 32, i = 0; i < (kFloat ? 2 : 1); ++i) {
    m.storage.bias_full[m.bias_state.stage].wait(m.bias_state.phase);
    const char* const box = m.storage.bias[m.bias_state.stage] + m.group * Config::kBlockM * kBiasBoxBytes;
    if constexpr (!kFloat) {
      add_transposed_box<typename Config::Element>(scores, box, 16 * warp, has_rows);
    } else if (warp / 2 == i) {  // half of the keys
      add_transposed_float_box(scores, box, 16 * (warp % 2), has_rows);
    }
    tma::fence_buffer();  // the arrival waits for no load
    m.storage.bias_empty[m.bias_state.stage].arrive();
    m.bias_state.advance();
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

}  // namespace sm90
}  // namespace flash
