// Mainloop of the decode kernel: S = Q K^T, online softmax, O += P V; a warp takes one step of keys at a time. Warp
// groups visit the same n_blocks, each a different step of them, and meet only when a split is combined. If a tile has
// two K/V heads, a group multiplies the queries of both heads by one of them; the other head's rows are computed and
// discarded.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/exact_softmax.h"
#include "kernels/common/mask.h"
#include "kernels/decode/mask_bits.h"
#include "kernels/decode/packed_rows.h"
#include "kernels/decode/ring.h"

namespace flash {
namespace decode {

template <class Config>
struct KvMainloop {
  using Element = typename Config::Element;
  using Swizzle = typename Config::Swizzle;
  using KvSwizzle = typename Config::KvSwizzle;
  static constexpr int kRows = Config::kSwapAb ? 1 : 2 * Config::kRowTiles;  // rows of S per thread
  static constexpr int kSlices = Config::kHeadDim / 16;
  struct Nothing {};
  template <int kCols>
  using Accumulator = decltype(cute::make_tensor<float>(
      cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::Int<Config::kRowTiles>, cute::Int<kCols / 8>>{}));

  const Flash_kvcache_params& params;
  const KvRing<Config>& ring;
  const Element* const q_rows;  // shared, (kRows of the tile, kHeadDim)

  // ((2, 2), MMA_M, MMA_D); over 8 bits its columns are those of eight_bit::o_col. kSwapAb: of O^T, squares of 16
  // columns of O; elements (row 2 t + i, column 2 g + j).
  Accumulator<Config::kSwapAb ? Config::kCols / 2 : Config::kCols> acc_o;
  ExactSoftmax<kRows> softmax;
  bool has_invalid_page = false;  // some key so far is in an invalid page

  WorkPart part;
  KvTokens tokens;
  // Keys [full_begin, full_end) are unmasked for every row of the tile.
  Visibility visibility;
  int full_begin = 0, full_end = 0;
  float k_descale = 1.0f, v_descale = 1.0f;  // of the group's head, unless by row or channel
  std::conditional_t<Config::kEightBit, BlockScales<kRows>, Nothing> block_scales;
  std::conditional_t<Config::kMaskBits, uint32_t, Nothing> seen_keys;  // of the step: by some row of the warp

  __device__ __forceinline__ KvMainloop(const Flash_kvcache_params& params_, const KvRing<Config>& ring_,
                                        const Element* q_rows_)
      : params(params_), ring(ring_), q_rows(q_rows_) {}

  __device__ __forceinline__ void enter_tile(const WorkPart& part_) {
    part = part_;
    const KvQueries queries = kv_queries<!Config::kPlain>(params, part.request.index);
    tokens = kv_tokens(params, queries, part.row_tile);
    visibility = Visibility{queries.count, part.request.seqlen_k, params.window};
    full_begin = visibility.key_begin(tokens.end - 1);
    full_end = visibility.key_end(tokens.begin);
    if constexpr (Config::kMaskBits) full_end = min(full_end, params.mask_bits.first_key(part.request.seqlen_k));
    has_invalid_page = part.request.invalid;
    if constexpr (Config::kEightBit) {
      k_descale = head_descale(params.k_descale, part.request.index, ring.head(part));
      v_descale = head_descale(params.v_descale, part.request.index, ring.head(part));
    }
  }

  __device__ __forceinline__ void begin_split() {
    cute::clear(acc_o);
    softmax.clear();
    if constexpr (Config::kEightBit) block_scales.clear();
  }

  // The current step of the ring, of n_block `block`.
  __device__ __forceinline__ void step(int block) {
    using namespace cute;
    Accumulator<Config::kStep> acc_s;  // ((2, 2), MMA_M, MMA_N)
    clear(acc_s);
    if constexpr (Config::kEightBit) {
      multiply_quantized_k(acc_s);
    } else {
      multiply_q_k(acc_s);
    }
    auto scores = score_view(acc_s);  // ((2, MMA_M), (2, MMA_N))
    if constexpr (Config::kEightBit) scale_scores(scores);
    const int key = ring.first_key(block);
    const PackedCoords coords{params.tile_group,
                              part.row_tile * Config::kRows + ring.row_warp() * 16 * Config::kRowTiles, tokens.begin};
    if (!Config::kPlain && params.has_score_mod) {
      modify_packed_scores(scores, params, coords, part.request.fits ? part.request.index : 0, part.head_tile,
                           visibility.diagonal(tokens.begin), key);
    }
    const bool is_masked = key < full_begin || key + Config::kStep > full_end;
    if (is_masked) {
      apply_mask(scores, coords, visibility, tokens.begin, tokens.end, key, key + Config::kStep);
    }
    if constexpr (Config::kMaskBits) {
      const int first = key - params.mask_bits.first_key(part.request.seqlen_k);
      seen_keys = is_masked ? apply_mask_bits(scores, params, coords, part.request.index, part.head_tile, first) : ~0u;
    }
    if constexpr (Config::kEightBit) {
      const bool by_row = params.v_descale.by_row;
      bool may_raise = by_row && is_masked;
      // A branch takes time, its absence registers.
      if (Config::kHeadDim < 256 || Config::kSwapAb || (by_row && !is_masked)) {
        may_raise |= by_row & block_scales.is_below(ring.v_descales()[lane()]);
      }
      std::conditional_t<Config::kSwapAb, uint32_t[kSlices][4], Nothing> first_values;
      if constexpr (Config::kSwapAb) load_values(first_values, 0);  // fills the latency of the row max
      softmax.update(scores, params.softmax_scale_log2, may_raise, [&](float (&factors)[kRows]) {
        if (__any_sync(0xffffffffu, may_raise)) raise_block_scales(scores, factors, is_masked);
        rescale_out(factors);
      });
      if (by_row) scale_probabilities(scores, is_masked);
      if constexpr (Config::kSwapAb) {
        multiply_values_p(acc_s, first_values);
      } else {
        multiply_quantized_v(acc_s);
      }
    } else {
      auto out = row_col_view(acc_o);  // ((2, MMA_M), (2, MMA_D))
      softmax.update(scores, out, params.softmax_scale_log2);
      multiply_p_v(acc_s);
    }
    has_invalid_page |= ring.step_has_invalid_page();
  }

  // kSwapAb: of rows 2 t and 2 t + 1, which this thread has of O, given that of row g, which it has of S.
  __device__ __forceinline__ static float2 of_out_rows(float of_score_row) {
    const int first = lane() % 4 * 8;
    return {__shfl_sync(0xffffffffu, of_score_row, first), __shfl_sync(0xffffffffu, of_score_row, first + 4)};
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  // kSwapAb: of the rows that exist, g of each square.
  template <class Acc>
  __device__ __forceinline__ static auto score_view(Acc& acc_s) {
    using namespace cute;
    if constexpr (Config::kSwapAb) {
      return make_tensor(acc_s.data(), make_layout(Layout<_1>{}, get<1>(row_col_layout(acc_s.layout()))));
    } else {
      return row_col_view(acc_s);
    }
  }

  __device__ __forceinline__ void rescale_out(const float (&factors)[kRows]) {
    if constexpr (Config::kSwapAb) {
      const float2 factor = of_out_rows(factors[0]);
#pragma unroll
      for (int i = 0; i < cute::size(acc_o); ++i) acc_o(i) *= i % 2 == 0 ? factor.x : factor.y;
    } else {
      auto out = row_col_view(acc_o);
      softmax.rescale_rows(out, factors);
    }
  }

  template <class Acc>
  __device__ __forceinline__ static float (&square(Acc& acc, int mi, int ni))[4] {
    return reinterpret_cast<float (&)[4]>(acc(0, mi, ni));
  }

  // This lane's columns of a step's descales, as pairs.
  __device__ __forceinline__ static float2 descale_pair(const float* descales, int pair) {
    return *reinterpret_cast<const float2*>(descales + pair * 8 + lane() % 4 * 2);
  }

  // From here on raw scores are those of dequantised keys: the row max, score modifiers and the LSE need no descale.
  template <class Scores>
  __device__ __forceinline__ void scale_scores(Scores& scores) const {
#pragma unroll
    for (int pair = 0; pair < Config::kStep / 8; ++pair) {
      float2 descale{k_descale, k_descale};
      if (params.k_descale.by_row) descale = descale_pair(ring.k_descales(), pair);
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        scores(mi, 2 * pair) *= descale.x;
        scores(mi, 2 * pair + 1) *= descale.y;
      }
    }
  }

  // Descales of keys that a row does not see must not matter: another call may not have these keys. The block scales'
  // factors for O are multiplied to `factors`.
  template <class Scores>
  __device__ __forceinline__ void raise_block_scales(const Scores& scores, float (&factors)[kRows], bool is_masked) {
    float of_all = 0.0f, of_row[kRows] = {};
#pragma unroll
    for (int pair = 0; pair < Config::kStep / 8; ++pair) {
      const float2 descale = descale_pair(ring.v_descales(), pair);
      of_all = fmaxf(of_all, fmaxf(fabsf(descale.x), fabsf(descale.y)));
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        if (scores(mi, 2 * pair) > -INFINITY) of_row[mi] = fmaxf(of_row[mi], fabsf(descale.x));
        if (scores(mi, 2 * pair + 1) > -INFINITY) of_row[mi] = fmaxf(of_row[mi], fabsf(descale.y));
      }
    }
    of_all = quad_max(of_all);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      factors[mi] *= block_scales.raise(mi, is_masked ? quad_max(of_row[mi]) : of_all);
    }
  }

  // A key that a row does not see may have a descale far above the row's block scale, or NaN: its probability stays 0.
  template <class Scores>
  __device__ __forceinline__ void scale_probabilities(Scores& scores, bool is_masked) const {
    float2 descale[Config::kStep / 8];
#pragma unroll
    for (int pair = 0; pair < Config::kStep / 8; ++pair) descale[pair] = descale_pair(ring.v_descales(), pair);
    const auto scale = [&](auto masks) {
#pragma unroll
      for (int mi = 0; mi < kRows; ++mi) {
        const float inverse = block_scales.inverse(mi);
#pragma unroll
        for (int pair = 0; pair < Config::kStep / 8; ++pair) {
          const float x = scores(mi, 2 * pair), y = scores(mi, 2 * pair + 1);
          scores(mi, 2 * pair) = masks && x == 0.0f ? x : x * (descale[pair].x * inverse);
          scores(mi, 2 * pair + 1) = masks && y == 0.0f ? y : y * (descale[pair].y * inverse);
        }
      }
    };
    if (is_masked) {
      scale(cute::true_type{});
    } else {
      scale(cute::false_type{});
    }
  }

  // The two squares of 16 columns, in all row tiles.
  template <class Acc>
  __device__ __forceinline__ static void multiply_pair(Acc& acc, int pair, const uint32_t (&a)[Config::kRowTiles][4],
                                                       const uint32_t (&b)[4]) {
#pragma unroll
    for (int mi = 0; mi < Config::kRowTiles; ++mi) {
      multiply(square(acc, mi, 2 * pair), a[mi], b[0], b[1], Element{});
      multiply(square(acc, mi, 2 * pair + 1), a[mi], b[2], b[3], Element{});
    }
  }

  template <class Acc>
  __device__ __forceinline__ void multiply_q_k(Acc& acc_s) const {
    const int q_row = ring.row_warp() * 16 * Config::kRowTiles + lane() % 16;
    const int q_vector = lane() / 16 ^ Swizzle::key(lane() % 16);
    const int k_row = lane() % 8 + lane() / 16 * 8;
    const int k_vector = lane() / 8 % 2 ^ Swizzle::key(k_row);
    const Element* const q = q_rows + q_row * Config::kHeadDim;
    const Element* const k = ring.k_stage() + k_row * Config::kHeadDim;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t a[Config::kRowTiles][4];
#pragma unroll
      for (int mi = 0; mi < Config::kRowTiles; ++mi) {
        load_matrices(a[mi], q + mi * 16 * Config::kHeadDim + Swizzle::next(q_vector, 2 * slice) * 8);
      }
#pragma unroll
      for (int pair = 0; pair < Config::kStep / 16; ++pair) {
        uint32_t b[4];
        load_matrices(b, k + pair * 16 * Config::kHeadDim + Swizzle::next(k_vector, 2 * slice) * 8);
        multiply_pair(acc_s, pair, a, b);
      }
    }
  }

  // Operands B of a slice of 16 keys, of which the even ones hold the first half.
  template <int kRegisters>
  __device__ __forceinline__ void clear_unseen(uint32_t (&b)[kRegisters], int slice) const {
#pragma unroll
    for (int i = 0; i < kRegisters; ++i) b[i] &= seen_pair(seen_keys, slice * 16 + i % 2 * 8 + lane() % 4 * 2);
  }

  // A row tile of P, over 16 keys, as operand A.
  template <class Acc>
  __device__ __forceinline__ static void pack_probabilities(const Acc& acc_s, int mi, int slice, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 2 * (i % 2), square = 2 * slice + i / 2;
      a[i] = pack_pair(acc_s(row, mi, square), acc_s(row + 1, mi, square), Element{});
    }
  }

  // All keys of a step are one ldmatrix, and its words operands B (core/eight_bit.h); Q's columns are permuted alike.
  template <class Acc>
  __device__ __forceinline__ void multiply_quantized_k(Acc& acc_s) const {
    const int q_row = ring.row_warp() * 16 * Config::kRowTiles + lane() % 16;
    const int q_vector = lane() / 16 ^ Swizzle::key(lane() % 16);
    const uint32_t q = shared_address(q_rows + q_row * Config::kHeadDim + q_vector * 8);
    const uint32_t k =
        shared_address(ring.k_stage() + lane() * Config::kHeadDim + KvSwizzle::key(lane()) * Config::kVectorCols);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      uint32_t a[Config::kRowTiles][4], words[4];
#pragma unroll
      for (int mi = 0; mi < Config::kRowTiles; ++mi) {
        load_matrices(a[mi], Swizzle::next_address(q, 2 * slice) + mi * 16 * Config::kHeadDim * 2);
      }
      load_matrices(words, KvSwizzle::next_address(k, slice));
#pragma unroll
      for (int ni = 0; ni < 4; ++ni) {
        uint32_t b0, b1;
        keys_to_half<Config::kDtype>(words[ni], b0, b1);
#pragma unroll
        for (int mi = 0; mi < Config::kRowTiles; ++mi) multiply(square(acc_s, mi, ni), a[mi], b0, b1, Element{});
      }
    }
  }

  // Of this lane's first vector of 8-bit V, for ldmatrix.trans.
  __device__ __forceinline__ uint32_t values_address() const {
    const int v_row = lane() % 16;
    const int v_vector = lane() / 16 ^ KvSwizzle::key(v_row);
    return shared_address(ring.v_stage() + v_row * Config::kHeadDim + v_vector * Config::kVectorCols);
  }

  // A 16-byte vector of V makes two squares of O, of its even and of its odd columns.
  template <class Acc>
  __device__ __forceinline__ void multiply_quantized_v(const Acc& acc_s) {
    const uint32_t v = values_address();
#pragma unroll
    for (int slice = 0; slice < Config::kStep / 16; ++slice) {
      uint32_t a[Config::kRowTiles][4];
#pragma unroll
      for (int mi = 0; mi < Config::kRowTiles; ++mi) pack_probabilities(acc_s, mi, slice, a[mi]);
#pragma unroll
      for (int vector = 0; vector < kSlices; vector += 2) {
        uint32_t words[4];
        load_matrices_transposed(words, KvSwizzle::next_address(v, vector) + slice * 16 * Config::kHeadDim);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t even[2], odd[2];  // of keys 0 to 7, and 8 to 15
          values_to_half<Config::kDtype>(words[2 * i], even[0], odd[0]);
          values_to_half<Config::kDtype>(words[2 * i + 1], even[1], odd[1]);
          if constexpr (Config::kMaskBits) {
            clear_unseen(even, slice);
            clear_unseen(odd, slice);
          }
#pragma unroll
          for (int mi = 0; mi < Config::kRowTiles; ++mi) {
            multiply(square(acc_o, mi, 2 * (vector + i)), a[mi], even[0], even[1], Element{});
            multiply(square(acc_o, mi, 2 * (vector + i) + 1), a[mi], odd[0], odd[1], Element{});
          }
        }
      }
    }
  }

  // kSwapAb: V^T of 16 keys, as operands A of 16 columns each.
  __device__ __forceinline__ void load_values(uint32_t (&values)[kSlices][4], int slice) const {
    const uint32_t v = values_address();
#pragma unroll
    for (int vector = 0; vector < kSlices; vector += 2) {
      uint32_t words[4];
      load_matrices_transposed(words, KvSwizzle::next_address(v, vector) + slice * 16 * Config::kHeadDim);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t (&a)[4] = values[vector + i / 2];
        values_to_half<Config::kDtype>(words[i], a[i % 2 * 2], a[i % 2 * 2 + 1]);
      }
    }
  }

  template <class Acc>
  __device__ __forceinline__ void multiply_values_p(const Acc& acc_s, const uint32_t (&first_values)[kSlices][4]) {
    uint32_t p[4];
    pack_probabilities(acc_s, 0, 0, p);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) multiply(square(acc_o, 0, i), first_values[i], p[0], p[2], Element{});
    uint32_t values[kSlices][4];
    load_values(values, 1);
    pack_probabilities(acc_s, 0, 1, p);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) multiply(square(acc_o, 0, i), values[i], p[0], p[2], Element{});
  }

  template <class Acc>
  __device__ __forceinline__ void multiply_p_v(const Acc& acc_s) {
    static_assert(Config::kColWarps == 1 || Config::kCols % 64 == 0, "the swizzle key is below the warp's columns");
    const int v_row = lane() % 16;
    const int v_vector = lane() / 16 ^ Swizzle::key(v_row);
    const Element* const v = ring.v_stage() + v_row * Config::kHeadDim + ring.col_warp() * Config::kCols;
#pragma unroll
    for (int slice = 0; slice < Config::kStep / 16; ++slice) {
      uint32_t a[Config::kRowTiles][4];
#pragma unroll
      for (int mi = 0; mi < Config::kRowTiles; ++mi) pack_probabilities(acc_s, mi, slice, a[mi]);
#pragma unroll
      for (int pair = 0; pair < Config::kCols / 16; ++pair) {
        uint32_t b[4];
        load_matrices_transposed(b, v + slice * 16 * Config::kHeadDim + Swizzle::next(v_vector, 2 * pair) * 8);
        if constexpr (Config::kMaskBits) clear_unseen(b, slice);
        multiply_pair(acc_o, pair, a, b);
      }
    }
  }
};

}  // namespace decode
}  // namespace flash
