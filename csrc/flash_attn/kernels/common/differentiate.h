// Softmax backward on accumulators: P = exp(S - LSE), dS = P (dP - softmax_d), with mask, score modifiers and dropout.
// Tensors are row_col_views or transposed ones, with matching coordinates.
#pragma once

#include <cute/tensor_impl.hpp>

#include "kernels/common/dropout.h"
#include "kernels/common/mask.h"
#include "kernels/common/origin.h"
#include "kernels/common/score_bias.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/sequence.h"

namespace flash {

// Coordinates of a tile of S within the batch.
struct TileCoords {
  int batch;
  int head;
  int row_begin;
  int key_begin;
};

template <int kBlockM, int kBlockN, class Scores, class Coords, class Mask>
__device__ __forceinline__ void mask_scores(Scores& scores, const Coords& coords, const Mask& mask,
                                            const TileCoords& tile_coords) {
  const int row_end = min(tile_coords.row_begin + kBlockM, mask.seqlen_q);
  apply_mask(scores, coords, mask, tile_coords.row_begin, row_end, tile_coords.key_begin,
             tile_coords.key_begin + kBlockN);
}

// LSE or softmax_d of a thread's rows, in registers.
template <int kRows>
struct RowArray {
  const float (&values)[kRows];

  __device__ __forceinline__ float2 pair(int mi) const { return {values[mi], values[mi + 1]}; }
};

// The LSE from which P is recomputed: an infinite one of either sign marks a fully masked row, and +inf makes its P 0.
__device__ __forceinline__ float lse_or_inf(float lse) { return lse == -INFINITY ? INFINITY : lse; }

// S becomes P. lse_log2.pair(mi): LSE * log2(e) of this thread's rows mi and mi + 1, +inf where there is no row.
template <class Scores, class RowValues>
__device__ __forceinline__ void exponentiate_scores(Scores& scores, float scale_log2, const RowValues& lse_log2) {
  using namespace cute;
#pragma unroll
  for (int mi = 0; mi < size<0>(scores); mi += 2) {
    const float2 lse = lse_log2.pair(mi);
#pragma unroll
    for (int ni = 0; ni < size<1>(scores); ++ni) {
      scores(mi, ni) = exp2f(scores(mi, ni) * scale_log2 - lse.x);
      scores(mi + 1, ni) = exp2f(scores(mi + 1, ni) * scale_log2 - lse.y);
    }
  }
}

template <class Gradients, class RowValues>
__device__ __forceinline__ void subtract_softmax_d(Gradients& dp, const RowValues& softmax_d) {
  using namespace cute;
#pragma unroll
  for (int mi = 0; mi < size<0>(dp); mi += 2) {
    const float2 delta = softmax_d.pair(mi);
#pragma unroll
    for (int ni = 0; ni < size<1>(dp); ++ni) {
      dp(mi, ni) -= delta.x;
      dp(mi + 1, ni) -= delta.y;
    }
  }
}

// dP becomes dS, up to the softmax scale.
template <class Probabilities, class Gradients, class RowValues>
__device__ __forceinline__ void differentiate_scores(const Probabilities& p, Gradients& dp,
                                                     const RowValues& softmax_d) {
  subtract_softmax_d(dp, softmax_d);
#pragma unroll
  for (int i = 0; i < cute::size(dp); ++i) dp(i) *= p(i);
}

// The biases that a mask carries. diagonal: position of the tile's first row on the axis of the keys.
template <class Scores, class Coords, class Mask>
__device__ __forceinline__ void add_biases_of(const Mask& mask, const TileCoords& tile_coords, int diagonal,
                                              const Coords& coords, Scores& scores) {
  if constexpr (HasScoreBias<Mask>::value) {
    const BiasTile tile{tile_coords.row_begin, tile_coords.key_begin, mask.seqlen_q, mask.seqlen_k, diagonal};
    add_biases<typename Mask::BiasElement>(scores, coords, mask.bias, tile);
  }
}

// Score modifiers and biases, and their derivatives on `gradients`.
template <bool kMayHaveOrigins, class Coords, class Scores, class Gradients, class Mask>
__device__ __forceinline__ void modify_scores(const Flash_bwd_params& params, const Mask& mask,
                                              const TileCoords& tile_coords, const Coords& coords, Scores& scores,
                                              Gradients& gradients) {
  if (!params.has_score_mod) return;
  int diagonal = mask.diagonal(tile_coords.row_begin);
  if constexpr (kMayHaveOrigins) diagonal = alibi_diagonal(params, tile_coords.batch, mask, tile_coords.row_begin);
  ScoreMod(params, tile_coords.batch, tile_coords.head)
      .grad(scores, gradients, coords, diagonal, tile_coords.key_begin);
  add_biases_of(mask, tile_coords, diagonal, coords, scores);
}

// The whole softmax backward, with softcap, ALiBi and, with kMayDrop, dropout by the random bits `bits`: scores become
// P with dropped elements 0, as dV = P^T dO needs, and dp becomes dS.
template <int kBlockM, int kBlockN, bool kMayDrop, class Coords, class Bits, class RowValues, class Scores,
          class Gradients, class Mask>
__device__ __forceinline__ void differentiate_general(const Flash_bwd_params& params, const Mask& mask,
                                                      const TileCoords& tile_coords, const Coords& coords,
                                                      const Bits& bits, const RowValues& lse_log2,
                                                      const RowValues& softmax_d, Scores& scores, Gradients& dp) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value, kCols = decltype(size<1>(scores))::value;
  uint32_t dropped[(kRows * kCols + 31) / 32] = {};
  if (kMayDrop && params.has_dropout) {
    const float keep_scale = params.dropout.keep_scale;
    for_each_random_bits<kRows, kCols>(params.dropout.threshold, bits, coords, [&](int mi, int ni, bool keep_mask) {
      const int element = mi * kCols + ni;
      dropped[element / 32] |= static_cast<uint32_t>(!keep_mask) << (element % 32);
      dp(mi, ni) = keep_mask ? dp(mi, ni) * keep_scale : 0.0f;
    });
  }
  subtract_softmax_d(dp, softmax_d);
  modify_scores<kMayDrop>(params, mask, tile_coords, coords, scores, dp);
  mask_scores<kBlockM, kBlockN>(scores, coords, mask, tile_coords);
  exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      dp(mi, ni) *= scores(mi, ni);
      const int element = mi * kCols + ni;
      if (kMayDrop && ((dropped[element / 32] >> (element % 32)) & 1)) scores(mi, ni) = 0.0f;
    }
  }
}

// differentiate_general() as run-time options around the steps of a plain softmax backward, which wait for neither of
// them. Before P: the modified scores. After it: mark_dropped() sets the sign bit of dropped elements, which
// convert_relu() makes 0 for dV. After dP: differentiate_marked().
template <class Coords, class Bits, class Probabilities>
__device__ __forceinline__ void mark_dropped(const Flash_bwd_params& params, const Coords& coords, const Bits& bits,
                                             Probabilities& p) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(p))::value, kCols = decltype(size<1>(p))::value;
  for_each_random_bits<kRows, kCols>(params.dropout.threshold, bits, coords, [&](int mi, int ni, bool keep_mask) {
    if (!keep_mask) p(mi, ni) = -p(mi, ni);
  });
}

// dp becomes dS. The derivative of a softcap is that of P: scores are not kept. Not with softcap and biases as data
// together, which would have to be read again.
template <class Mask, class Coords, class LseRows, class DeltaRows, class Probabilities, class Gradients>
__device__ __forceinline__ void differentiate_marked(const Flash_bwd_params& params, const Mask& mask,
                                                     const TileCoords& tile_coords, const Coords& coords,
                                                     const LseRows& lse_log2, const DeltaRows& softmax_d,
                                                     const Probabilities& p, Gradients& dp) {
  using namespace cute;
  differentiate_handed(params, p, dp, softmax_d);
  if (!(params.softcap > 0.0f)) return;
  const ScoreMod score_mod(params, tile_coords.batch, tile_coords.head);
  const int diagonal = alibi_diagonal(params, tile_coords.batch, mask, tile_coords.row_begin);
#pragma unroll
  for (int mi = 0; mi < size<0>(dp); mi += 2) {
    const float2 lse = lse_log2.pair(mi);
#pragma unroll
    for (int ni = 0; ni < size<1>(dp); ++ni) {
      const int col = tile_coords.key_begin + coords.col(ni);
      score_mod.chain_cap(dp(mi, ni), fabsf(p(mi, ni)), lse.x, diagonal + coords.row(mi), col);
      score_mod.chain_cap(dp(mi + 1, ni), fabsf(p(mi + 1, ni)), lse.y, diagonal + coords.row(mi + 1), col);
    }
  }
}

// The two halves of differentiate_general(), for schedules in which one warpgroup has S and the other dP. First half:
// scores become P with dropped elements 0; `handed` becomes P times the derivative of the modified score, with the sign
// bit set where P was dropped.
template <int kBlockM, int kBlockN, class Coords, class Bits, class RowValues, class Scores, class Mask>
__device__ __forceinline__ void exponentiate_general(const Flash_bwd_params& params, const Mask& mask,
                                                     const TileCoords& tile_coords, const Coords& coords,
                                                     const Bits& bits, const RowValues& lse_log2, Scores& scores,
                                                     Scores& handed) {
  using namespace cute;
  constexpr int kRows = decltype(size<0>(scores))::value, kCols = decltype(size<1>(scores))::value;
  static_assert(kRows * kCols == 32, "a bit of `dropped` for each element");
  uint32_t dropped = 0;
  if (params.has_dropout) {
    for_each_random_bits<kRows, kCols>(params.dropout.threshold, bits, coords, [&](int mi, int ni, bool keep_mask) {
      dropped |= static_cast<uint32_t>(!keep_mask) << (mi * kCols + ni);
    });
  }
  fill(handed, 1.0f);
  modify_scores<true>(params, mask, tile_coords, coords, scores, handed);
  mask_scores<kBlockM, kBlockN>(scores, coords, mask, tile_coords);
  exponentiate_scores(scores, params.softmax_scale_log2, lse_log2);
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
    for (int ni = 0; ni < kCols; ++ni) {
      const bool is_dropped = (dropped >> (mi * kCols + ni)) & 1;
      const float product = fabsf(scores(mi, ni) * handed(mi, ni));
      handed(mi, ni) = is_dropped ? -product : product;
      if (is_dropped) scores(mi, ni) = 0.0f;
    }
  }
}

// Second half: dp becomes dS. `p`: the first half's result, in dp's layout.
template <class Probabilities, class Gradients, class RowValues>
__device__ __forceinline__ void differentiate_handed(const Flash_bwd_params& params, const Probabilities& p,
                                                     Gradients& dp, const RowValues& softmax_d) {
  if (params.has_dropout) {
    const float keep_scale = params.dropout.keep_scale;
#pragma unroll
    for (int i = 0; i < cute::size(dp); ++i) dp(i) = signbit(p(i)) ? 0.0f : dp(i) * keep_scale;
  }
  subtract_softmax_d(dp, softmax_d);
#pragma unroll
  for (int i = 0; i < cute::size(dp); ++i) dp(i) *= fabsf(p(i));
}

}  // namespace flash
