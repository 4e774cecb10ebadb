// attn_bias in shared memory: boxes of kBiasBoxBytes of each row, written by TMA with its 128-byte swizzle.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/score_bias.h"
#include "kernels/tma/mbarrier.h"
#include "kernels/tma/tensor_map.h"
#include "plan/tiles.h"

namespace flash {
namespace sm90 {

constexpr int kBiasBoxBytes = plan::kBiasBoxBytes;

// A ring of boxes of kRows rows. full: the loading lane (1, plus the TMA bytes) -> consumers.
template <int kStages, int kRows>
struct BiasRing {
  alignas(1024) char bias[kStages][kRows * kBiasBoxBytes];
  tma::Barrier bias_full[kStages], bias_empty[kStages];

  __device__ __forceinline__ void init_bias_barriers(int readers) {
    for (int stage = 0; stage < kStages; ++stage) {
      bias_full[stage].init(1);
      bias_empty[stage].init(readers);
    }
  }
};
template <int kRows>
struct BiasRing<0, kRows> {
  __device__ __forceinline__ void init_bias_barriers(int) {}
};

// The bias of a sequence and head for the lane that loads it.
struct BiasBoxes {
  const CUtensorMap& map;
  const bool has_rows;
  const int halves;  // 16-bit halves of an element
  int head;
  const tma::TmaRows rows;

  __device__ __forceinline__ BiasBoxes(const CUtensorMap& map_, const ScoreBias& bias, bool is_packed, int batch,
                                       int q_begin, int seqlen_q, int head_)
      : map(map_),
        has_rows(bias.row_stride != 0),
        halves(bias.is_float ? 2 : 1),
        head(0),
        rows(is_packed, bias.batch_stride != 0 ? batch : 0, q_begin, seqlen_q) {
    set_head(bias, head_);
  }

  __device__ __forceinline__ void set_head(const ScoreBias& bias, int given) {
    head = bias.head_stride != 0 ? given : 0;
  }
  __device__ __forceinline__ int cols() const { return kBiasBoxBytes / 2 / halves; }
  __device__ __forceinline__ int bytes(int box_rows) const {
    return has_rows ? box_rows * kBiasBoxBytes : kBiasBoxBytes;
  }

  __device__ __forceinline__ void load(tma::Barrier& full, char* box, int row, int col) const {
    cute::SM90_TMA_LOAD_5D::copy(&map, &full.state, static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL), box,
                                 halves * col, has_rows ? row + rows.shift : 0, head, rows.outer, rows.origin);
  }
};

// Offset of a 16-byte vector in a box.
__device__ __forceinline__ int box_offset(int row, int vector) { return row * kBiasBoxBytes + (vector ^ row % 8) * 16; }

// A thread's columns in a box of 16-bit elements, and its words: each has a pair of columns of one row.
constexpr int kBoxCols = 16, kBoxWords = kBoxCols;

// The word of row mi and column ni of a row_col_view. Of 16 columns: two rows 8 apart, then the same rows 8 columns on.
__device__ __forceinline__ constexpr int box_word(int mi, int ni) { return ni / 4 * 4 + ni / 2 % 2 * 2 + mi; }

// Offset in a box of a lane's first address for ldmatrix. The warp has 16 rows from first_row on; without rows every
// lane has row 0. The shuffle makes ptxas keep the offset instead of computing it in every step.
__device__ __forceinline__ int box_lane_offset(int first_row, bool has_rows) {
  const int lane = threadIdx.x % 32;
  return __shfl_sync(0xffffffffu, box_offset(has_rows ? first_row + lane % 16 : 0, lane / 16), lane);
}

// Reads box `part` of a row of boxes of 16-bit elements.
template <int kWords>
__device__ __forceinline__ void read_box(uint32_t (&words)[kWords], int part, const char* box, int lane_offset) {
#pragma unroll
  for (int i = 0; i < kBoxCols / 4; ++i) {  // 16 columns of the warp; the swizzle is an XOR of the vector's index
    uint32_t* const at = words + kBoxWords * part + 4 * i;
    cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(box + (lane_offset ^ 32 * i)), at[0], at[1],
                                  at[2], at[3]);
  }
}

// Adds what was read to a row_col_view, from column kBoxCols * part on.
template <class Element, class Scores, int kWords>
__device__ __forceinline__ void add_box(Scores& scores, int part, const uint32_t (&words)[kWords]) {
#pragma unroll
  for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
    for (int ni = 0; ni < kWords; ni += 2) {
      const int col = kBoxCols * part + ni;
      add_bias_pair<Element>(scores(mi, col), scores(mi, col + 1), words[box_word(mi, ni)]);
    }
  }
}

// The same of fp32.
template <class Scores>
__device__ __forceinline__ void add_float_box(Scores& scores, int part, const char* box, int first_row, bool has_rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int mi = 0; mi < 2; ++mi) {
    const int row = has_rows ? first_row + lane / 4 + 8 * mi : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 8 columns
      const char* const at = box + box_offset(row, 2 * i + lane % 4 / 2) + lane % 2 * 8;
      const int col = 8 * part + 2 * i;
      add_bias_pair(scores(mi, col), scores(mi, col + 1), *reinterpret_cast<const float2*>(at));
    }
  }
}

// The same of a transposed view: of kRows rows of a thread and two keys 8 apart, words of pairs of rows.
template <int kRows>
struct TransposedBox {
  const char* first;
  int bytes;  // of 16 rows
  uint32_t words[kRows];

  TransposedBox() = default;
  // The warp's keys are the box's first_key and those after it.
  __device__ __forceinline__ TransposedBox(const char* box, int first_key, bool has_rows) {
    const int lane = threadIdx.x % 32, row = has_rows ? lane / 16 * 8 + lane % 8 : 0;
    first = box + box_offset(row, first_key / 8 + lane / 8 % 2);
    bytes = has_rows ? 16 * kBiasBoxBytes : 0;
  }

  // Words of 16 rows of the warp: keys 8 apart, then rows 8 apart.
  __device__ __forceinline__ void read_rows(int i) {
    uint32_t* const at = words + 4 * i;
    cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(first + i * bytes), at[0], at[1], at[2],
                                  at[3]);
  }
  __device__ __forceinline__ void read() {
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) read_rows(i);
  }

  // Rows mi and mi + 1 of key ni.
  template <class Element>
  __device__ __forceinline__ float2 pair(int mi, int ni) const {
    return unpack_pair<Element>(words[mi / 4 * 4 + mi % 4 / 2 * 2 + ni]);
  }
};

template <class Element, class Scores>
__device__ __forceinline__ void add_transposed_box(Scores& scores, const char* box, int first_key, bool has_rows) {
  constexpr int kRows = decltype(cute::size<0>(scores))::value;
  TransposedBox<kRows> bias(box, first_key, has_rows);
  bias.read();
#pragma unroll
  for (int mi = 0; mi < kRows; mi += 2) {
#pragma unroll
    for (int ni = 0; ni < 2; ++ni) {
      add_bias_pair(scores(mi, ni), scores(mi + 1, ni), bias.template pair<Element>(mi, ni));
    }
  }
}

// The same of fp32 and with rows.
struct TransposedFloatBox {
  const char* first[2][2];  // by the parity of the row, by key

  __device__ __forceinline__ TransposedFloatBox(const char* box, int first_key) {
    const int lane = threadIdx.x % 32, key = first_key + lane / 4;
#pragma unroll
    for (int mi = 0; mi < 2; ++mi) {
#pragma unroll
      for (int ni = 0; ni < 2; ++ni) {
        first[mi][ni] = box + box_offset(lane % 4 * 2 + mi, key / 4 + 2 * ni) + key % 4 * 4;
      }
    }
  }
  __device__ __forceinline__ float2 pair(int mi, int ni) const {
    const int offset = mi / 2 * 8 * kBiasBoxBytes;
    return {*reinterpret_cast<const float*>(first[0][ni] + offset),
            *reinterpret_cast<const float*>(first[1][ni] + offset)};
  }
};

template <class Scores>
__device__ __forceinline__ void add_transposed_float_box(Scores& scores, const char* box, int first_key,
                                                         bool has_rows) {
  constexpr int kRows = decltype(cute::size<0>(scores))::value;
  const int lane = threadIdx.x % 32, key = first_key + lane / 4;
#pragma unroll
  for (int mi = 0; mi < kRows; ++mi) {
    const int row = has_rows ? mi / 2 * 8 + lane % 4 * 2 + mi % 2 : 0;
#pragma unroll
    for (int ni = 0; ni < 2; ++ni) {
      add_bias(scores(mi, ni), *reinterpret_cast<const float*>(box + box_offset(row, key / 4 + 2 * ni) + key % 4 * 4));
    }
  }
}

}  // namespace sm90
}  // namespace flash
