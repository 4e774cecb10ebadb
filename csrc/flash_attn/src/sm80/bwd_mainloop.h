// The tile loop of the mma.sync backward: one block of keys meets every row block that sees it, for all query heads of
// its K/V head. dK and dV stay in registers over the whole loop; dQ is reduced into fp32 tiles in global memory.
// Gradients of softmax attention by recomputation from the LSE: Dao et al. 2022, appendix B.
#pragma once

#include <cute/tensor.hpp>

#include "common/accumulator.h"
#include "common/block_range.h"
#include "common/convert.h"
#include "common/dropout.h"
#include "common/mask.h"
#include "common/row_store.h"
#include "common/score_mod.h"
#include "common/sequence.h"
#include "sm80/bwd_config.h"
#include "sm80/dq_tile.h"
#include "sm80/gemm.h"

namespace flash {

// A place in the loop over (query head of the group, row block), with what is addressed there. It only moves forwards,
// so that a step costs additions.
template <class Element>
struct BwdCursor {
  int head;
  int m_block;
  const Element* q;  // this thread's first chunk of the row block
  const Element* dout;
};

template <class Config>
struct BwdMainloop {
  using Element = typename Config::Element;
  template <class Mma, int kRows, int kCols>
  using Accumulator = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::Int<kRows>, cute::Int<kCols>>{}));
  using AccSdP = Accumulator<typename Config::MmaSdP, Config::kBlockM, Config::kBlockN>;
  using AccDkv = Accumulator<typename Config::MmaDkv, Config::kBlockN, Config::kHeadDim>;
  using AccDq = Accumulator<typename Config::MmaDq, Config::kBlockM, Config::kHeadDim>;
  static constexpr int kRows = decltype(cute::size<0>(row_col_layout(typename AccSdP::layout_type{})))::value;
  static constexpr int kCols = decltype(cute::size<1>(row_col_layout(typename AccSdP::layout_type{})))::value;

  const Flash_bwd_params& params;
  const KeyBlock& block;
  const Visibility visibility;
  const RowRange rows;
  const typename Config::RowCopyT copy;
  const typename Config::SdPCoords coords;
  const int stages;  // buffers of Q and of dO: 2, or 1 where shared memory is short
  using Cursor = BwdCursor<Element>;
  Element* const smem;

  AccDkv acc_dk;  // ((2, 2), MMA_N, MMA_D)
  AccDkv acc_dv;

  __device__ __forceinline__ BwdMainloop(const Flash_bwd_params& params_, const KeyBlock& block_, int stages_,
                                         Element* smem_)
      : params(params_),
        block(block_),
        visibility{block_.seqlen_q, block_.seqlen_k, params_.window},
        rows(row_range(visibility, block_.n_block, Config::kBlockM, Config::kBlockN)),
        copy(params_.d),
        stages(stages_),
        smem(smem_) {
    cute::clear(acc_dk);
    cute::clear(acc_dv);
  }

  // Shared memory: K, V, P, dS, then stages x (Q, dO).
  template <class Layout>
  __device__ __forceinline__ auto tile(int offset) const {
    return cute::make_tensor(cute::make_smem_ptr(smem + offset), Layout{});
  }
  __device__ __forceinline__ auto smem_k() const { return tile<typename Config::SmemLayoutKv>(0); }
  __device__ __forceinline__ auto smem_v() const { return tile<typename Config::SmemLayoutKv>(Config::kSmemKv); }
  __device__ __forceinline__ auto smem_p() const { return tile<typename Config::SmemLayoutP>(2 * Config::kSmemKv); }
  __device__ __forceinline__ auto smem_ds() const {
    return tile<typename Config::SmemLayoutP>(2 * Config::kSmemKv + Config::kSmemP);
  }
  __device__ __forceinline__ auto smem_q(int stage) const {
    return tile<typename Config::SmemLayoutQ>(2 * (Config::kSmemKv + Config::kSmemP) + 2 * stage * Config::kSmemQ);
  }
  __device__ __forceinline__ auto smem_do(int stage) const {
    return tile<typename Config::SmemLayoutQ>(2 * (Config::kSmemKv + Config::kSmemP) +
                                              (2 * stage + 1) * Config::kSmemQ);
  }

  __device__ __forceinline__ bool is_varlen() const { return params.is_varlen(); }
  __device__ __forceinline__ int step_count() const { return (rows.end - rows.begin) * params.h_h_k_ratio; }

  // The first row block of a query head.
  __device__ __forceinline__ Cursor start_of_head(int head) const {
    const int row = block.q_begin + rows.begin * Config::kBlockM;
    auto place = [&](const void* data, const MatrixStrides& strides) {
      return static_cast<const Element*>(data) + matrix_offset(strides, is_varlen(), block.batch, row, head) +
             copy.place(strides.row);
    };
    return {head, rows.begin, place(params.q_ptr, params.q_strides), place(params.do_ptr, params.do_strides)};
  }

  __device__ __forceinline__ void advance(Cursor& cursor) const {
    if (++cursor.m_block == rows.end) {
      cursor = start_of_head(cursor.head + 1);
    } else {
      cursor.q += Config::kBlockM * params.q_strides.row;
      cursor.dout += Config::kBlockM * params.do_strides.row;
    }
  }

  __device__ __forceinline__ void load_kv() const {
    const int key = block.n_block * Config::kBlockN;
    auto load = [&](const void* data, const MatrixStrides& strides, auto&& smem_tile) {
      const Element* base = static_cast<const Element*>(data) +
                            matrix_offset(strides, is_varlen(), block.batch, block.k_begin + key, block.head_k);
      copy.template run_strided<true>(base, strides.row, block.seqlen_k - key, smem_tile);
    };
    load(params.k_ptr, params.k_strides, smem_k());
    load(params.v_ptr, params.v_strides, smem_v());
  }

  __device__ __forceinline__ void load_q_do(const Cursor& cursor, int stage) const {
    const int rows_left = block.seqlen_q - cursor.m_block * Config::kBlockM;
    auto q_tile = smem_q(stage);
    auto do_tile = smem_do(stage);
    copy.template run_from<true>(cursor.q, params.q_strides.row, rows_left, q_tile);
    copy.template run_from<true>(cursor.dout, params.do_strides.row, rows_left, do_tile);
    cute::cp_async_fence();
  }

  // Every thread waits for its own copies, then for everyone: what the last step read may be overwritten.
  __device__ __forceinline__ static void wait_for_copies() {
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    const int count = step_count();
    if (count == 0) return;
    load_kv();
    Cursor current = start_of_head(block.head_k * params.h_h_k_ratio);
    load_q_do(current, 0);
    for (int i = 0; i < count; ++i) {
      const int stage = stages == 2 ? i % 2 : 0;
      const bool has_next = i + 1 < count;
      Cursor next = current;
      if (has_next) advance(next);
      wait_for_copies();
      if (stages == 2 && has_next) load_q_do(next, 1 - stage);
      step(current, stage);
      if (stages == 1 && has_next) {
        __syncthreads();
        load_q_do(next, 0);
      }
      current = next;
    }
  }

  __device__ __forceinline__ void step(const Cursor& at, int stage) {
    using namespace cute;
    const int row_begin = at.m_block * Config::kBlockM;
    float lse_log2[kRows], delta[kRows];
    load_row_statistics(at, row_begin, lse_log2, delta);
    AccSdP acc_s, acc_dp;
    clear(acc_s);
    clear(acc_dp);
    gemm_smem<Operand::kPlain, Operand::kPlain>(typename Config::MmaSdP{}, acc_s, smem_q(stage), smem_k());
    gemm_smem<Operand::kPlain, Operand::kPlain>(typename Config::MmaSdP{}, acc_dp, smem_do(stage), smem_v());
    differentiate(at, row_begin, lse_log2, delta, acc_s, acc_dp);
    auto p_tile = smem_p();
    auto ds_tile = smem_ds();
    stage_accumulator<Element>(typename Config::MmaSdP{}, acc_s, p_tile);
    stage_accumulator<Element>(typename Config::MmaSdP{}, acc_dp, ds_tile);
    __syncthreads();  // P and dS are whole

    gemm_smem<Operand::kTransposed, Operand::kTransposed>(typename Config::MmaDkv{}, acc_dv, transposed(smem_p()),
                                                          transposed(smem_do(stage)));
    AccDq acc_dq;
    clear(acc_dq);
    gemm_smem<Operand::kPlain, Operand::kTransposed>(typename Config::MmaDq{}, acc_dq, smem_ds(), transposed(smem_k()));
    add_dq(at, acc_dq);
    gemm_smem<Operand::kTransposed, Operand::kTransposed>(typename Config::MmaDkv{}, acc_dk, transposed(smem_ds()),
                                                          transposed(smem_q(stage)));
  }

  // Rows beyond the sequence get an LSE of +inf, which makes their probabilities 0.
  __device__ __forceinline__ void load_row_statistics(const Cursor& at, int row_begin, float (&lse_log2)[kRows],
                                                      float (&delta)[kRows]) const {
    const float* lse = params.softmax_lse_ptr + lse_offset(params, block.batch, at.head, block.q_begin);
    const float* d = params.softmax_d_ptr + softmax_d_offset(params, block.batch, at.head, block.q_begin);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = row_begin + coords.row(mi);
      const bool valid = row < block.seqlen_q;
      lse_log2[mi] = valid ? lse[row] * ScoreMod::kLog2e : INFINITY;
      delta[mi] = valid ? d[row] : 0.0f;
    }
  }

  // In: raw scores and dP. Out: the probabilities that multiply dO (dropped ones 0), and dS up to the softmax scale.
  __device__ __forceinline__ void differentiate(const Cursor& at, int row_begin, const float (&lse_log2)[kRows],
                                                const float (&delta)[kRows], AccSdP& acc_s, AccSdP& acc_dp) const {
    using namespace cute;
    auto scores = row_col_view(acc_s);  // ((2, MMA_M), (2, MMA_N))
    auto dp = row_col_view(acc_dp);
    const int key = block.n_block * Config::kBlockN;
    uint32_t kept[(kRows * kCols + 31) / 32] = {};
    if constexpr (Config::kVariant == BwdVariant::kDropout) {
      const float keep_scale = params.dropout.keep_scale;
      DropoutMask(params.dropout, block.batch, at.head)
          .template for_each<kRows, kCols>(coords, row_begin, key, [&](int mi, int ni, bool keep) {
            const int element = mi * kCols + ni;
            kept[element / 32] |= static_cast<uint32_t>(keep) << (element % 32);
            dp(mi, ni) = keep ? dp(mi, ni) * keep_scale : 0.0f;
          });
    }
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < kCols; ++ni) dp(mi, ni) -= delta[mi];
    }
    if (params.has_score_mod) {
      ScoreMod(params, block.batch, at.head)
          .apply_with_derivative(scores, dp, coords, visibility.diagonal(row_begin), key);
    }
    const int row_end = min(row_begin + Config::kBlockM, block.seqlen_q);
    apply_mask(scores, coords, visibility, row_begin, row_end, key, key + Config::kBlockN);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < kCols; ++ni) {
        const float p = exp2f(scores(mi, ni) * params.softmax_scale_log2 - lse_log2[mi]);
        dp(mi, ni) *= p;
        scores(mi, ni) = p;
        if constexpr (Config::kVariant == BwdVariant::kDropout) {
          const int element = mi * kCols + ni;
          scores(mi, ni) = (kept[element / 32] >> (element % 32)) & 1 ? p : 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void add_dq(const Cursor& at, const AccDq& acc_dq) const {
    const int64_t index =
        first_dq_tile(params, block.batch, at.head, block.q_begin, block.q_segment, Config::kBlockM) + at.m_block;
    float* const dq_tile = params.dq_accum_ptr + index * Config::kDqTile;
    if (params.dq_turns_ptr == nullptr) {
      reduce_dq<Config::kThreads>(acc_dq, dq_tile);
      return;
    }
    // Deterministic: the blocks of keys that visit this row block add in the order in which blocks are started, so that
    // whoever is waited for is running or done.
    const int row_begin = at.m_block * Config::kBlockM;
    const int row_end = min(row_begin + Config::kBlockM, block.seqlen_q);
    const BlockRange visitors = block_range(visibility, row_begin, row_end, Config::kBlockN);
    const int turn = keys_descend(params) ? visitors.end - 1 - block.n_block : block.n_block - visitors.begin;
    wait_for_turn(params.dq_turns_ptr + index, turn);
    reduce_dq<Config::kThreads>(acc_dq, dq_tile);
    pass_turn(params.dq_turns_ptr + index);
  }
};

}  // namespace flash
