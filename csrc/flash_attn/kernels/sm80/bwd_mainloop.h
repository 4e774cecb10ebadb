// The mainloop of the mma.sync backward: one n_block against every m_block that sees it, for all query heads of its K/V
// head, in the order of core/bwd_schedule.h. dK and dV accumulate in registers over the whole loop; dQ is reduced into
// fp32 tiles in global memory. P is recomputed from the LSE: Dao et al. 2022, appendix B.
#pragma once

#include <cute/tensor.hpp>
#include <tuple>
#include <type_traits>

#include "core/block_range.h"
#include "core/bwd_schedule.h"
#include "core/visible_range.h"
#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/dq_semaphore.h"
#include "kernels/common/dq_tile.h"
#include "kernels/common/mask.h"
#include "kernels/common/row_store.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/sequence.h"
#include "kernels/sm80/bwd_config.h"
#include "kernels/sm80/clear_rows.h"
#include "kernels/sm80/gemm.h"
#include "kernels/sm80/listed_steps.h"
#include "kernels/sm80/stage_accumulator.h"
#include "kernels/sm80/warp_ops.h"

namespace flash {
namespace sm80 {

// A step with this thread's pointers into Q and dO, which advance by additions alone.
template <class Element, class Step>
struct BwdCursor {
  Step at;
  const Element* q;  // this thread's first 16-byte vector of the m_block
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

  const Flash_bwd_params& params;
  const MaskParams& mask;  // of kMayBias
  const ScoreGradients& ds;
  const BwdWorkTile& tile;
  const MaskOf<Config> visibility;
  const int first_row;  // rows before it are fully masked and are cleared in shared memory
  const BwdStepsOf<Config> order;
  const typename Config::RowCopyT copy;
  const typename Config::SdPCoords coords;
  const int stages;  // buffers of Q and of dO: 2, or 1 where shared memory is short
  using Cursor = BwdCursor<Element, BwdStepOf<Config>>;
  Element* const smem;

  AccDkv acc_dk;  // ((2, 2), MMA_N, MMA_D)
  AccDkv acc_dv;
  using TileV = decltype(cute::make_tensor(cute::make_smem_ptr(static_cast<Element*>(nullptr)),
                                           typename Config::SmemLayoutVHead{}));
  using FragmentV = OperandFragment<Side::kB, Operand::kPlain, typename Config::MmaSdP, TileV>;
  std::conditional_t<Config::kVInRegisters, FragmentV, std::tuple<>> v_operand;

  __device__ __forceinline__ BwdMainloop(const BwdLaunch& launch, const BwdWorkTile& tile_, Element* smem_)
      : params(launch.params),
        mask(launch.mask),
        ds(launch.ds),
        tile(tile_),
        visibility(mask_of<Config>(launch.params, tile_)),
        first_row(first_visible_row(visibility)),
        order(bwd_steps<Config>(launch, tile_)),
        copy(launch.params.d),
        stages(launch.stages),
        smem(smem_) {
    cute::clear(acc_dk);
    cute::clear(acc_dv);
  }

  // Shared memory: K, V, P, dS, then stages x (Q, dO). If registers hold columns of V, V comes last.
  static constexpr int kSmemP0 = (Config::kVInRegisters ? 1 : 2) * Config::kSmemKv;
  static constexpr int kSmemQ0 = kSmemP0 + 2 * Config::kSmemP;
  template <class Layout>
  __device__ __forceinline__ auto smem_tile(int offset) const {
    return cute::make_tensor(cute::make_smem_ptr(smem + offset), Layout{});
  }
  __device__ __forceinline__ auto smem_k() const { return smem_tile<typename Config::SmemLayoutKv>(0); }
  // Columns of V on their way to registers overlap Q and dO. A tile's columns are stored kAtomCols at a time, so that
  // the first ones can be overwritten.
  static constexpr int kSmemV0 =
      Config::kVInRegisters ? kSmemQ0 + 2 * Config::kSmemQ - Config::kSmemVHead : Config::kSmemKv;
  __device__ __forceinline__ auto smem_v() const { return smem_tile<typename Config::SmemLayoutKv>(kSmemV0); }
  __device__ __forceinline__ auto smem_v_head() const { return smem_tile<typename Config::SmemLayoutVHead>(kSmemV0); }
  __device__ __forceinline__ auto smem_p() const { return smem_tile<typename Config::SmemLayoutP>(kSmemP0); }
  __device__ __forceinline__ auto smem_ds() const {
    return smem_tile<typename Config::SmemLayoutP>(kSmemP0 + Config::kSmemP);
  }
  __device__ __forceinline__ auto smem_q(int stage) const {
    return smem_tile<typename Config::SmemLayoutQ>(kSmemQ0 + 2 * stage * Config::kSmemQ);
  }
  __device__ __forceinline__ auto smem_do(int stage) const {
    return smem_tile<typename Config::SmemLayoutQ>(kSmemQ0 + (2 * stage + 1) * Config::kSmemQ);
  }

  __device__ __forceinline__ bool is_varlen() const { return params.is_varlen(); }
  __device__ __forceinline__ bool is_deterministic() const { return params.dq_semaphore_ptr != nullptr; }

  __device__ __forceinline__ Cursor cursor_at(const BwdStepOf<Config>& at) const {
    const int row = tile.q_begin + at.m_block * Config::kBlockM;
    auto pointer_to = [&](const void* data, const MatrixStrides& strides) {
      return static_cast<const Element*>(data) + matrix_offset(strides, is_varlen(), tile.batch, row, at.head) +
             copy.thread_offset(strides.row);
    };
    return {at, pointer_to(params.q_ptr, params.q_strides), pointer_to(params.do_ptr, params.do_strides)};
  }

  __device__ __forceinline__ void advance(Cursor& cursor) const {
    if constexpr (Config::kMayBias) {
      order.advance(cursor.at);
      cursor = cursor_at(cursor.at);
    } else {
      const bool other_rows = order.advance(cursor.at);
      cursor.q += order.offset(other_rows, params.q_strides.row, params.q_strides.head, Config::kBlockM);
      cursor.dout += order.offset(other_rows, params.do_strides.row, params.do_strides.head, Config::kBlockM);
    }
  }

  __device__ __forceinline__ void load_kv() const {
    const int key = tile.n_block * Config::kBlockN, first_key = first_visible_key(visibility);
    auto load = [&](const void* data, const MatrixStrides& strides, auto&& smem_tile) {
      const Element* base = static_cast<const Element*>(data) +
                            matrix_offset(strides, is_varlen(), tile.batch, tile.k_begin + key, tile.head_k);
      copy.template run_strided<true>(base, strides.row, tile.seqlen_k - key, smem_tile, first_key - key);
    };
    load(params.k_ptr, params.k_strides, smem_k());
    load(params.v_ptr, params.v_strides, smem_v());
  }

  __device__ __forceinline__ void load_q(const Cursor& cursor, int stage) const {
    load_rows(cursor.q, params.q_strides.row, rows_left(cursor), smem_q(stage));
  }
  __device__ __forceinline__ void load_do(const Cursor& cursor, int stage) const {
    load_rows(cursor.dout, params.do_strides.row, rows_left(cursor), smem_do(stage));
  }
  template <class Tile>
  __device__ __forceinline__ void load_rows(const Element* from, int64_t stride, int rows, Tile tile) const {
    if constexpr (Config::kQCopyThreads == Config::kThreads) {
      copy.template run_from<true>(from, stride, rows, tile);
    } else if (threadIdx.x < Config::kQCopyThreads) {
      typename Config::RowCopyQ(params.d).template run_from<true>(from, stride, rows, tile);
    }
  }
  __device__ __forceinline__ int rows_left(const Cursor& cursor) const {
    return tile.seqlen_q - cursor.at.m_block * Config::kBlockM;
  }
  __device__ __forceinline__ void load_q_do(const Cursor& cursor, int stage) const {
    load_q(cursor, stage);
    load_do(cursor, stage);
    cute::cp_async_fence();
  }

  __device__ __forceinline__ void load_v_operand() {
    cute::cp_async_fence();
    wait_for_copies();
    load_b<Operand::kPlain>(typename Config::MmaSdP{}, v_operand, smem_v_head());
    __syncthreads();  // Q and dO may overwrite it
  }

  // Waits for this thread's cp.async copies, then the barrier: the tiles are complete, and what the previous step read
  // may be overwritten.
  __device__ __forceinline__ static void wait_for_copies() {
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  // Of keys that no query of the group sees, and of queries that see no key.
  __device__ __forceinline__ void clear_unseen_keys() const {
    if constexpr (Config::kMayBias) {
      if (mask.lists.entries == nullptr) return;
      cute::cp_async_fence();
      wait_for_copies();
      const int key = tile.n_block * Config::kBlockN;
      const auto word = [&](int i) {
        uint32_t seen = 0u;
        for (int j = 0; j < params.h_h_k_ratio; ++j) {
          const int head = tile.head_k * params.h_h_k_ratio + j;
          seen |= seen_keys_of(params, mask, tile, head, tile.q_segment)[key / kMaskWordKeys + i];
        }
        return seen;
      };
      clear_unseen_rows<Config, Config::kBlockN>(word, smem_k(), smem_v());
    }
  }
  __device__ __forceinline__ void clear_unseen_queries(const QStep& at, int stage) const {
    if constexpr (Config::kMayBias) {
      if (mask.lists.entries == nullptr) return;
      const uint32_t* const seen = seen_rows_of(params, mask, tile, at.head);
      const int row = at.m_block * Config::kBlockM;
      const auto word = [&](int i) { return seen[row / kMaskWordKeys + i] >> (row % kMaskWordKeys); };
      clear_unseen_rows<Config, Config::kBlockM>(word, smem_q(stage), smem_do(stage));
    }
  }

  __device__ __forceinline__ void run() {
    const int count = order.count();
    if (count == 0) return;
    load_kv();
    clear_unseen_keys();
    if constexpr (Config::kVInRegisters) load_v_operand();
    Cursor current = cursor_at(order.start());
    load_q_do(current, 0);
    for (int i = 0; i < count; ++i) {
      const int stage = stages == 2 ? i % 2 : 0;
      const bool has_next = i + 1 < count;
      Cursor next = current;
      if (has_next) advance(next);
      wait_for_copies();
      const int fully_masked_rows = min(first_row - current.at.m_block * Config::kBlockM, Config::kBlockM);
      clear_rows<Config>(fully_masked_rows, smem_q(stage), smem_do(stage));
      clear_unseen_queries(current.at, stage);
      if (i > 0) release_dq_semaphore(order.before(current.at));
      if constexpr (Config::kVInRegisters) {
        step_of_one_buffer(current.at, next, has_next);
      } else {
        if (stages == 2 && has_next) load_q_do(next, 1 - stage);
        step(current.at, stage);
        if (stages == 1 && has_next) {
          __syncthreads();
          load_q_do(next, 0);
        }
      }
      current = next;
    }
    if (is_deterministic()) __syncthreads();
    release_dq_semaphore(current.at);
  }

  // Stores P and dS of a step to shared memory; ends with a barrier.
  __device__ __forceinline__ void make_p_ds(const BwdStepOf<Config>& at, int stage) {
    if constexpr (Config::kSplitsSdP) {
      make_p_ds_by_halves(at, stage);
    } else {
      make_p_ds_by_all(at, stage);
    }
    __syncthreads();
  }

  // Some warps compute dP and pass it in fp32, in accumulator order, to the threads of as many others, which have S.
  __device__ __forceinline__ void make_p_ds_by_halves(const BwdStepOf<Config>& at, int stage) {
    using namespace cute;
    constexpr int kDpBarrier = 1;
    const int thread = threadIdx.x % Config::kSdPThreads;
    const bool has_s = threadIdx.x < Config::kSdPThreads;
    AccSdP acc;
    clear(acc);
    if (threadIdx.x < 2 * Config::kSdPThreads) {
      const auto rows = smem_tile<typename Config::SmemLayoutQ>(kSmemQ0 + (2 * stage + !has_s) * Config::kSmemQ);
      const auto keys = smem_tile<typename Config::SmemLayoutKv>(has_s ? 0 : kSmemV0);
      gemm_smem<Operand::kPlain, Operand::kPlain>(typename Config::MmaSdP{}, acc, rows, keys, thread);
    }
    float4* const passed = reinterpret_cast<float4*>(smem + kSmemP0) + thread;
    static_assert(decltype(size(acc))::value % 4 == 0, "passed in vectors");
    if (!has_s && threadIdx.x < 2 * Config::kSdPThreads) {
#pragma unroll
      for (int i = 0; i < decltype(size(acc))::value; i += 4) {
        passed[i / 4 * Config::kSdPThreads] = make_float4(acc(i), acc(i + 1), acc(i + 2), acc(i + 3));
      }
    }
    __syncthreads();
    if (!has_s) return;
    AccSdP acc_dp;
#pragma unroll
    for (int i = 0; i < decltype(size(acc))::value; i += 4) {
      const float4 values = passed[i / 4 * Config::kSdPThreads];
      acc_dp(i) = values.x;
      acc_dp(i + 1) = values.y;
      acc_dp(i + 2) = values.z;
      acc_dp(i + 3) = values.w;
    }
    sync_named(kDpBarrier, Config::kSdPThreads);  // P and dS may overwrite it
    const int row_begin = at.m_block * Config::kBlockM;
    float lse_log2[kRows], delta[kRows];
    load_row_statistics(at, row_begin, lse_log2, delta);
    differentiate(at, row_begin, lse_log2, delta, acc, acc_dp);
    store_p_ds(acc, acc_dp);
  }

  __device__ __forceinline__ void make_p_ds_by_all(const BwdStepOf<Config>& at, int stage) {
    using namespace cute;
    const int row_begin = at.m_block * Config::kBlockM;
    float lse_log2[kRows], delta[kRows];
    load_row_statistics(at, row_begin, lse_log2, delta);
    AccSdP acc_s, acc_dp;
    clear(acc_s);
    clear(acc_dp);
    gemm_smem<Operand::kPlain, Operand::kPlain>(typename Config::MmaSdP{}, acc_s, smem_q(stage), smem_k());
    if constexpr (Config::kVInRegisters) {
      gemm_b_head<Operand::kPlain, Operand::kPlain>(typename Config::MmaSdP{}, acc_dp, smem_do(stage), v_operand,
                                                    smem_v());
    } else {
      gemm_smem<Operand::kPlain, Operand::kPlain>(typename Config::MmaSdP{}, acc_dp, smem_do(stage), smem_v());
    }
    differentiate(at, row_begin, lse_log2, delta, acc_s, acc_dp);
    store_p_ds(acc_s, acc_dp);
  }

  __device__ __forceinline__ void store_p_ds(const AccSdP& p, const AccSdP& ds) const {
    stage_accumulator<Element>(typename Config::MmaSdP{}, p, smem_p());
    stage_accumulator<Element>(typename Config::MmaSdP{}, ds, smem_ds());
  }

  __device__ __forceinline__ void add_dv(int stage) {
    gemm_smem<Operand::kTransposed, Operand::kTransposed>(typename Config::MmaDkv{}, acc_dv, smem_p(), smem_do(stage));
  }
  __device__ __forceinline__ void add_dk(int stage) {
    gemm_smem<Operand::kTransposed, Operand::kTransposed>(typename Config::MmaDkv{}, acc_dk, smem_ds(), smem_q(stage));
  }
  __device__ __forceinline__ void add_dq(const QStep& at) {
    using namespace cute;
    const int peeked = is_deterministic() ? dq_semaphore_peek(params.dq_semaphore_ptr + dq_tile_index(at)) : 0;
    AccDq acc_dq;
    clear(acc_dq);
    gemm_smem<Operand::kPlain, Operand::kTransposed>(typename Config::MmaDq{}, acc_dq, smem_ds(), smem_k());
    reduce_dq_tile(at, peeked, acc_dq);
  }

  // For the gradients of biases. Whole vectors: rows of dS are padded.
  __device__ __forceinline__ void store_ds(const QStep& at) const {
    if constexpr (Config::kMayBias) {
      if (ds.data == nullptr) return;
      const int row = at.m_block * Config::kBlockM, key = tile.n_block * Config::kBlockN;
      Element* const base = static_cast<Element*>(ds.data) +
                            matrix_offset(ds.strides, is_varlen(), tile.batch, tile.q_begin + row, at.head) + key;
      store_rows<typename Config::RowCopyDs>(smem_ds(), base, ds.strides.row, min(tile.seqlen_q - row, Config::kBlockM),
                                             ds.cols - key);
    }
  }

  __device__ __forceinline__ void step(const BwdStepOf<Config>& at, int stage) {
    make_p_ds(at, stage);
    store_ds(at);
    add_dv(stage);
    add_dq(at);
    add_dk(stage);
  }

  // The same with one buffer: the next dO and Q overwrite this step's as soon as nobody reads these any more.
  __device__ __forceinline__ void step_of_one_buffer(const BwdStepOf<Config>& at, const Cursor& next, bool has_next) {
    make_p_ds(at, 0);
    store_ds(at);
    add_dv(0);
    __syncthreads();
    if (has_next) load_do(next, 0);
    add_dk(0);
    __syncthreads();
    if (has_next) load_q(next, 0);
    cute::cp_async_fence();
    add_dq(at);
  }

  // Fully masked rows (by position, or by an infinite LSE of either sign) and rows beyond the sequence get an LSE of
  // +inf, which makes P 0.
  __device__ __forceinline__ void load_row_statistics(const QStep& at, int row_begin, float (&lse_log2)[kRows],
                                                      float (&delta)[kRows]) const {
    const float* lse = params.softmax_lse_ptr + lse_offset(params, tile.batch, at.head, tile.q_begin);
    const float* d = params.softmax_d_ptr + softmax_d_offset(params, tile.batch, at.head, tile.q_begin);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = row_begin + coords.row(mi);
      const bool valid = row >= first_row && row < tile.seqlen_q;
      lse_log2[mi] = valid ? lse_or_inf(lse[row]) * ScoreMod::kLog2e : INFINITY;
      delta[mi] = valid ? d[row] : 0.0f;
    }
  }

  // In: S and dP. Out: P with dropped elements 0, as dV needs it, and dS up to the softmax scale.
  __device__ __forceinline__ void differentiate(const BwdStepOf<Config>& at, int row_begin,
                                                const float (&lse_log2)[kRows], const float (&delta)[kRows],
                                                AccSdP& acc_s, AccSdP& acc_dp) const {
    auto scores = row_col_view(acc_s);  // ((2, MMA_M), (2, MMA_N))
    auto dp = row_col_view(acc_dp);
    const TileCoords tile_coords{tile.batch, at.head, row_begin, tile.n_block * Config::kBlockN};
    constexpr bool kMayDrop = Config::kMayDrop;
    DropoutMask dropout;
    if constexpr (kMayDrop) dropout = DropoutMask(params, tile_coords.batch, tile_coords.head);
    const TileBits<decltype(coords)> bits(dropout, coords, row_begin, tile_coords.key_begin);
    const auto run = [&](const auto& mask_of_tile) {
      differentiate_general<Config::kBlockM, Config::kBlockN, kMayDrop>(params, mask_of_tile, tile_coords, coords, bits,
                                                                        RowArray<kRows>{lse_log2},
                                                                        RowArray<kRows>{delta}, scores, dp);
    };
    if constexpr (Config::kMayBias) {
      run(GeneralMask<Element>{
          {visibility, mask.bias.of(tile.batch, at.head, tile.q_begin)}, params, mask, tile, at.hides});
    } else {
      run(visibility);
    }
  }

  __device__ __forceinline__ int64_t dq_tile_index(const QStep& at) const {
    return flash::dq_tile_index(params, tile, at, Config::kBlockM);
  }

  // Reduces dQ into global memory, in deterministic mode in the order of the dQ semaphore. `peeked`: its value as read
  // before the GEMM.
  __device__ __forceinline__ void reduce_dq_tile(const QStep& at, int peeked, const AccDq& acc_dq) const {
    if constexpr (Config::kMayBias) {
      if (!order.has_dq(at)) return;
    }
    const int64_t index = dq_tile_index(at);
    if (is_deterministic()) dq_semaphore_acquire<Config>(params, visibility, at.m_block, tile.n_block, index, peeked);
    reduce_dq<Config::kThreads>(acc_dq, params.dq_accum_ptr + index * Config::kDqTile, threadIdx.x);
  }

  // After the barrier that follows the step, so that every thread has reduced; overlaps with the next step.
  __device__ __forceinline__ void release_dq_semaphore(const QStep& at) const {
    if (is_deterministic() && threadIdx.x == 0) dq_semaphore_release(params.dq_semaphore_ptr + dq_tile_index(at));
  }
};

}  // namespace sm80
}  // namespace flash
