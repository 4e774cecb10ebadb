// Boxes of attn_bias in a consumer of the wgmma forward: what its mainloop does with those of a block.
#pragma once

#include "kernels/sm90/bias_boxes.h"
#include "kernels/tma/tile_copy.h"
#include "params/flash.h"

namespace flash {
namespace sm90 {

template <class Config>
struct FwdMainloop;

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

// The boxes of a whole block, for BoxSoftmax. They are read during S if there are registers for them, and released when
// every lane has used its values.
template <class Config>
__device__ __forceinline__ void read_boxes(FwdMainloop<Config>& m) {
  using Mainloop = FwdMainloop<Config>;
  typename Mainloop::BiasState at = m.bias_state;
#pragma unroll
  for (int i = 0; i < Mainloop::kWholeBoxes; ++i) {
    read_box(m.bias_words, i, m.wait_for_box(at), m.box_lane);
    at.advance();
  }
  if constexpr (Mainloop::kReleasesBoxesEarly) {
    tma::fence_buffer();
    __syncwarp();
    m.release_boxes();
  }
}

}  // namespace sm90
}  // namespace flash
