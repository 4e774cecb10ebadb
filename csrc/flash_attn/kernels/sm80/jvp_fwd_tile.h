// A work tile of the mma.sync forward with tangents. Mathematics and centers as in kernels/sm90/jvp_fwd_mainloop.h:
//
//   S' = scale (Q' K^T + Q K'^T)    H = P (S' - center)    O' = P V' + H V
#pragma once

#include "core/block_range.h"
#include "core/visible_range.h"
#include "kernels/common/accumulator.h"
#include "kernels/common/fwd_epilogue.h"
#include "kernels/common/mask.h"
#include "kernels/common/sequence.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tangent_scores.h"
#include "kernels/sm80/jvp_fwd_products.h"
#include "kernels/sm80/tile_view.h"

namespace flash {
namespace sm80 {

// Copies between global and shared memory, eight threads for each 128 bytes of a row.
template <class Config>
struct JvpFwdRows {
  using Element = typename Config::Element;
  static constexpr int kRowThreads = 8, kStep = Config::kThreads / kRowThreads;
  const int row = threadIdx.x / kRowThreads, vector = threadIdx.x % kRowThreads;

  // visit(row, column, element offset in a tile of kRows rows) for each vector of this thread.
  template <int kRows, class Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) const {
    static_assert(kRows % kStep == 0);
#pragma unroll
    for (int i = 0; i < kRows; i += kStep) {
#pragma unroll
      for (int atom = 0; atom < Config::kAtoms; ++atom) {
        const int of_row = atom * kRowThreads + vector;
        visit(row + i, of_row * Config::kVectorCols, Config::template offset<kRows>(row + i, of_row));
      }
    }
  }

  // By cp.async. Rows from `rows` on and columns from `cols` on become 0: 0 * NaN would be NaN.
  template <int kRows>
  __device__ __forceinline__ void load(Element* tile, const Element* from, int64_t stride, int rows, int cols) const {
    for_each<kRows>([&](int at, int col, int offset) {
      copy16_async(tile + offset, from + at * stride + col, at < rows && col < cols);
    });
  }

  template <int kRows>
  __device__ __forceinline__ void store(const Element* tile, Element* to, int64_t stride, int rows, int cols) const {
    for_each<kRows>([&](int at, int col, int offset) {
      if (at >= rows || col >= cols) return;
      *reinterpret_cast<uint4*>(to + at * stride + col) = *reinterpret_cast<const uint4*>(tile + offset);
    });
  }

  // The first `rows` rows become 0, which the caller's barrier publishes.
  template <int kRows>
  __device__ __forceinline__ void clear(Element* tile, int rows) const {
    for_each<kRows>([&](int at, int, int offset) {
      if (at < rows) *reinterpret_cast<uint4*>(tile + offset) = uint4{};
    });
  }
};

template <class Config>
struct JvpFwdTile {
  using Element = typename Config::Element;
  using Products = JvpFwdProducts<Config>;
  static constexpr int kRows = 2 * Products::kRowTiles;  // accumulator rows per thread
  static constexpr int kAllRows = (1 << kRows) - 1;

  const Flash_fwd_jvp_params& params;
  const WorkTile& tile;
  JvpFwdStorage<Config>& storage;
  const Visibility visibility;
  const BlockRange range;
  const JvpFwdRows<Config> rows;
  const Products products;
  const AccumulatorCoords<Config::kWarps> coords;

  typename Products::Out acc_o = {}, acc_to = {};
  Softmax<kRows> softmax;
  float center[kRows] = {}, sum_h[kRows] = {};  // sum_h: over this thread's columns
  int centered = 0;                             // a bit for each row that has its center

  __device__ __forceinline__ JvpFwdTile(const Flash_fwd_jvp_params& params_, const WorkTile& tile_,
                                        JvpFwdStorage<Config>& storage_)
      : params(params_),
        tile(tile_),
        storage(storage_),
        visibility(mask_of<Config>(params_, tile_)),
        range(block_range(visibility, tile_.row_begin, tile_.row_end, Config::kBlockN)),
        products(storage_) {}

  // ---- loads ----

  __device__ __forceinline__ void load_q() const {
    const auto load = [&](Element* to, const void* from, const MatrixStrides& strides) {
      const auto* const first = static_cast<const Element*>(from) + q_offset(tile, strides);
      rows.template load<Config::kBlockM>(to, first + tile.row_begin * strides.row, strides.row,
                                          tile.row_end - tile.row_begin, params.d);
    };
    load(storage.q[0], params.q_ptr, params.q_strides);
    if (params.tq_ptr != nullptr) load(storage.q[1], params.tq_ptr, params.tq_strides);
  }

  // A block of K or V, and of its tangent unless that is null.
  __device__ __forceinline__ void load_keys(Element (&to)[2][Config::kBlockN * Config::kHeadDim], int n_block,
                                            const void* data, const MatrixStrides& strides, const void* tangent,
                                            const MatrixStrides& tangent_strides, int cols) const {
    const int key = n_block * Config::kBlockN, head = tile.head / params.h_h_k_ratio;
    const auto load = [&](Element* buffer, const void* from, const MatrixStrides& of) {
      const int64_t first = matrix_offset(of, params.is_varlen(), tile.batch, tile.k_begin + key, head);
      rows.template load<Config::kBlockN>(buffer, static_cast<const Element*>(from) + first, of.row,
                                          tile.seqlen_k - key, cols);
    };
    load(to[0], data, strides);
    if (tangent != nullptr) load(to[1], tangent, tangent_strides);
    commit_copies();
  }
  __device__ __forceinline__ void load_k(int n_block) const {
    load_keys(storage.k, n_block, params.k_ptr, params.k_strides, params.tk_ptr, params.tk_strides, params.d);
  }
  __device__ __forceinline__ void load_v(int n_block) const {
    load_keys(storage.v, n_block, params.v_ptr, params.v_strides, params.tv_ptr, params.tv_strides, params.d_v);
  }

  // Tangents that are null are zeros, which no load overwrites.
  __device__ __forceinline__ void clear_missing() const {
    if (params.tq_ptr == nullptr) rows.template clear<Config::kBlockM>(storage.q[1], Config::kBlockM);
    if (params.tk_ptr == nullptr) rows.template clear<Config::kBlockN>(storage.k[1], Config::kBlockN);
    if (params.tv_ptr == nullptr) rows.template clear<Config::kBlockN>(storage.v[1], Config::kBlockN);
  }

  // Clears V and V' of keys at the beginning of a block that no query of the sequence sees: they may hold NaN.
  __device__ __forceinline__ void clear_hidden_values(int key) const {
    const int hidden = visibility.may_mask_left() ? first_visible_key(visibility) - key : 0;
    if (hidden <= 0) return;
    rows.template clear<Config::kBlockN>(storage.v[0], hidden);
    rows.template clear<Config::kBlockN>(storage.v[1], hidden);
    __syncthreads();
  }

  // This thread's copies, then those of all: the tile is complete, and the previous one was read.
  __device__ __forceinline__ static void wait_for_copies() {
    wait_for_copies_but(0);
    __syncthreads();
  }

  // ---- scores ----

  // S becomes P; O, O' and the sum of H follow the row max.
  __device__ __forceinline__ void exponentiate(typename Products::Scores& acc_s) {
    using namespace cute;
    auto scores = tile_view(acc_s);
    auto out = tile_view(acc_o), t_out = tile_view(acc_to);
    softmax.update_row_maxima(scores, params.softmax_scale_log2, params.rescale_threshold_log2,
                              [&](int mi, float correction) {
#pragma unroll
                                for (int ni = 0; ni < size<1>(out); ++ni) {
                                  out(mi, ni) *= correction;
                                  t_out(mi, ni) *= correction;
                                }
                                sum_h[mi] *= correction;
                              });
    softmax.template exponentiate<true>(scores, params.softmax_scale_log2);
  }

  // S' becomes H, given P.
  __device__ __forceinline__ void differentiate(typename Products::Scores& acc_p, typename Products::Scores& acc_ts,
                                                bool is_masked) {
    using namespace cute;
    auto probs = tile_view(acc_p), t_scores = tile_view(acc_ts);
    if (is_masked) clear_hidden_tangents<kRows>(probs, t_scores);
    if (__any_sync(0xffffffffu, centered != kAllRows))
      set_centers(probs, t_scores, params.scale_softmax, center, centered);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < size<1>(probs); ++ni) {
        t_scores(mi, ni) = probs(mi, ni) * fmaf(t_scores(mi, ni), params.scale_softmax, -center[mi]);
        sum_h[mi] += t_scores(mi, ni);
      }
    }
  }

  // ---- the tile ----

  // The block of a step. On entry the copy of its K is in flight; on exit that of the next one.
  __device__ __forceinline__ void run_step(int step) {
    const int n_block = range.block_at(step), key = n_block * Config::kBlockN;
    const bool is_masked = step < range.masked_count();
    wait_for_copies();  // K has landed; every warp is done with V of the previous step
    load_v(n_block);
    typename Products::Scores acc_s = {}, acc_ts = {};
    products.add_scores(acc_s, acc_ts);
    if (is_masked) {
      auto scores = tile_view(acc_s);
      apply_mask(scores, coords, visibility, tile.row_begin, tile.row_end, key, key + Config::kBlockN);
    }
    wait_for_copies();  // V has landed; every warp is done with K
    if (is_masked) clear_hidden_values(key);
    if (step + 1 < range.count()) load_k(range.block_at(step + 1));
    exponentiate(acc_s);
    differentiate(acc_s, acc_ts, is_masked);
    typename Products::Probs p, h;
    Products::pack(acc_s, p);
    Products::pack(acc_ts, h);
    products.add_values(acc_o, acc_to, p, h);
  }

  __device__ __forceinline__ void run() {
    if (range.count() > 0) {
      clear_missing();
      load_q();
      load_k(range.block_at(0));
    }
#pragma unroll 1
    for (int step = 0; step < range.count(); ++step) run_step(step);
    store();
  }

  // O and O' are staged without a barrier before it: each warp overwrites rows of Q that it alone has read.
  __device__ __forceinline__ void store() {
    float o_scale[kRows], mean[kRows];
    softmax.finalize(o_scale, 1.0f, params.softmax_scale_log2, -INFINITY);
    auto out = tile_view(acc_o), t_out = tile_view(acc_to);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      mean[mi] = quad_sum(sum_h[mi]) * o_scale[mi];
#pragma unroll
      for (int ni = 0; ni < cute::size<1>(out); ++ni) {
        out(mi, ni) *= o_scale[mi];
        t_out(mi, ni) = t_out(mi, ni) * o_scale[mi] - mean[mi] * out(mi, ni);
      }
    }
    products.stage(storage.q[0], acc_o);
    products.stage(storage.q[1], acc_to);
    store_lse(softmax, params, tile, coords, tile.row_begin, -INFINITY);
    store_t_lse(mean);
    __syncthreads();
    store_rows(storage.q[0], params.o_ptr, params.o_strides);
    store_rows(storage.q[1], params.to_ptr, params.to_strides);
  }

  __device__ __forceinline__ void store_t_lse(const float (&mean)[kRows]) const {
    if (threadIdx.x % 4 != 0) return;
    float* const t_lse = params.t_lse_ptr + lse_offset(tile, params);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = tile.row_begin + coords.row(mi);
      if (row < tile.row_end) t_lse[row] = mean[mi] + center[mi];
    }
  }

  __device__ __forceinline__ void store_rows(const Element* staged, void* to, const MatrixStrides& strides) const {
    auto* const first = static_cast<Element*>(to) + q_offset(tile, strides) + tile.row_begin * strides.row;
    rows.template store<Config::kBlockM>(staged, first, strides.row, tile.row_end - tile.row_begin, params.d_v);
  }
};

}  // namespace sm80
}  // namespace flash
