// Boxes of attn_bias in a consumer of the wgmma forward: what its mainloop does with those of a block.
#pragma once

#include "kernels/sm90/bias_boxes.h"
#include "kernels/tma/tile_copy.h"
#include "params/flash.h"

namespace flash {
namespace sm90 {

template <class Config>
struct FwdMainloop;

// Smaller scales are left to the masked steps: divided by one of them, a mask's -1e30 would overflow.
constexpr float kLeastDivisor = 0x1p-20f;

// Whether whole blocks need nothing but boxes of 16-bit elements.
__device__ __forceinline__ bool adds_boxes_alone(const Flash_fwd_params& params, const ScoreBias& bias) {
  return bias.loads_boxes && !bias.is_float && bias.table == nullptr && !params.has_dropout &&
         !(params.softcap > 0.0f) && params.alibi_slopes_ptr == nullptr;
}

template <bool kFloat, class Config, class Scores>
__device__ __forceinline__ void add_boxes(FwdMainloop<Config>& m, Scores& scores) {
  constexpr int kBoxes = Config::kBlockN * (kFloat ? 4 : 2) / kBiasBoxBytes;
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    const char* const box = m.wait_for_box(m.bias_state);
    if constexpr (kFloat) {
      add_float_box(scores, i, box, m.box_row(), m.mask.bias.row_stride != 0);
    } else {
      uint32_t words[kBoxWords];
      read_box(words, 0, box, m.box_lane);
      add_box<typename Config::Element>(scores, i, words);
    }
    tma::fence_buffer();  // the arrival waits for no load
    __syncwarp();
    m.release_box();
  }
}

// The boxes of a block that this warpgroup skips.
template <class Config>
__device__ __forceinline__ void skip_boxes(FwdMainloop<Config>& m) {
  if (!m.mask.bias.loads_boxes) return;
  const int boxes = Config::kBlockN * static_cast<int>(m.mask.bias.element_bytes()) / kBiasBoxBytes;
  for (int i = 0; i < boxes; ++i) {
    m.wait_for_box(m.bias_state);
    m.release_box();
  }
}

// Raw scores of a whole block, kAdds: plus its bias over the scale; else that alone, and the first box has been read.
template <bool kAdds, class Config>
__device__ __forceinline__ void put_bias(FwdMainloop<Config>& m) {
  using Mainloop = FwdMainloop<Config>;
  auto scores = row_col_view(m.acc_s);
  typename Mainloop::BiasState at = m.bias_state;
#pragma unroll
  for (int i = 0; i < Mainloop::kWholeBoxes; ++i) {
    if (kAdds || i > 0) read_box(m.bias_words, 0, m.wait_for_box(at), m.box_lane);
    at.advance();
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
      for (int ni = 0; ni < kBoxCols; ++ni) {
        const float bias = half_of_pair<typename Config::Element>(m.bias_words[box_word(mi, ni)], ni % 2);
        float& score = scores(mi, kBoxCols * i + ni);
        score = kAdds ? __fmaf_rn(m.inverse_scale, bias, score) : m.inverse_scale * bias;
      }
    }
  }
}

// The one box of a whole block, for BoxSoftmax, read during S. It is the only stage, whose next box is loaded during
// the softmax: that is worth a fence.
template <class Config>
__device__ __forceinline__ void read_whole_box(FwdMainloop<Config>& m) {
  static_assert(Config::kTile.bias_stages == 1 && FwdMainloop<Config>::kWholeBoxes == 1, "bias_words keeps the box");
  read_box(m.bias_words, 0, m.wait_for_box(m.bias_state), m.box_lane);
  tma::fence_buffer();
  __syncwarp();
  m.release_boxes();
}

// Issues P V of the block before, then S of a whole block on top of its bias, which ptxas puts into the accumulators
// between the wgmmas of P V: the way from S to P is as short as without one.
template <class Config>
__device__ __forceinline__ void issue_from_bias(FwdMainloop<Config>& m, int q_stage, bool clears) {
  const char* const box = m.wait_for_box(m.bias_state);
  m.issue_pv(clears, [&](int slice) {
    if (slice == 0) read_box(m.bias_words, 0, box, m.box_lane);
  });
  put_bias<false>(m);
  m.wait_for_k();
  m.issue_qk(q_stage, false);
}

}  // namespace sm90
}  // namespace flash
