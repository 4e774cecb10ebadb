// The laboratory's mma.sync forward: dense batches, full or causal, any lengths. With the default design it is the
// shipped kernel (kernels/sm80/fwd_mainloop.h) without features.
#pragma once

#include "core/block_range.h"
#include "fwd_steps.h"
#include "kernels/common/convert.h"
#include "kernels/common/mask.h"
#include "kernels/common/row_store.h"
#include "kernels/sm80/stage_accumulator.h"

namespace flash {
namespace lab {

// q, out: contiguous (batch, seqlen_q, heads, head dim); k, v: (batch, seqlen_k, heads, head dim).
struct FwdParams {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  int seqlen_q, seqlen_k, heads;
  Window window;
  float scale_log2;  // softmax scale times log2(e)
};

template <class Config>
struct FwdMainloop {
  using Element = typename Config::Element;
  using TiledMma = typename Config::TiledMma;
  static constexpr int kRows = 2 * Config::kBlockM / (16 * Config::kWarps);  // accumulator rows per thread
  using AccO = decltype(cute::partition_fragment_C(
      TiledMma{}, cute::Shape<cute::Int<Config::kBlockM>, cute::Int<Config::kHeadDim>>{}));
  template <class Layout>
  using SmemTile = decltype(cute::make_tensor(cute::make_smem_ptr(static_cast<Element*>(nullptr)), Layout{}));
  template <sm80::Side kSide, sm80::Operand kOperand, class Layout>
  using Fragment = sm80::OperandFragment<kSide, kOperand, TiledMma, SmemTile<Layout>>;
  using FragmentQ = Fragment<sm80::Side::kA, sm80::Operand::kPlain, typename Config::SmemLayoutQ>;
  using FragmentK = Fragment<sm80::Side::kB, sm80::Operand::kPlain, typename Config::SmemLayoutKv>;
  using FragmentV = Fragment<sm80::Side::kB, sm80::Operand::kTransposed, typename Config::SmemLayoutKv>;

  const FwdParams& params;
  const int row_begin, row_end;  // query rows of this CTA
  const Visibility visibility;
  const BlockRange range;
  const int64_t row_stride;  // elements
  const int64_t q_offset, k_offset;
  const AccumulatorCoords<Config::kWarps> coords;
  Element* const smem;  // Q, then K, then V

  FragmentQ tSrQ;  // (MMA, MMA_M, MMA_D)
  AccO acc_o;      // ((2, 2), MMA_M, MMA_D)
  Softmax<kRows> softmax;

  __device__ __forceinline__ FwdMainloop(const FwdParams& params_, int batch, int head, int m_block, Element* smem_)
      : params(params_),
        row_begin(m_block * Config::kBlockM),
        row_end(min(row_begin + Config::kBlockM, params_.seqlen_q)),
        visibility{params_.seqlen_q, params_.seqlen_k, params_.window},
        range(block_range(visibility, row_begin, row_end, Config::kBlockN)),
        row_stride(int64_t{Config::kHeadDim} * params_.heads),
        q_offset((int64_t{batch} * params_.seqlen_q + row_begin) * row_stride + head * Config::kHeadDim),
        k_offset(int64_t{batch} * params_.seqlen_k * row_stride + head * Config::kHeadDim),
        smem(smem_) {
    cute::clear(acc_o);
  }

  __device__ __forceinline__ auto smem_q() const {
    return cute::make_tensor(cute::make_smem_ptr(smem), typename Config::SmemLayoutQ{});  // (M, D)
  }
  __device__ __forceinline__ auto smem_k() const { return smem_kv(smem + Config::kSmemQ); }
  __device__ __forceinline__ auto smem_v() const { return smem_kv(smem + Config::kSmemQ + Config::kSmemKv); }
  __device__ __forceinline__ static auto smem_kv(Element* data) {
    return cute::make_tensor(cute::make_smem_ptr(data), typename Config::SmemLayoutKv{});  // (N, D)
  }

  // Starts the copy of one n_block of K or V.
  template <bool kBounded, class Smem>
  __device__ __forceinline__ void load(const void* base, int n_block, Smem&& tile) const {
    const int key = n_block * Config::kBlockN;
    const Element* const rows = static_cast<const Element*>(base) + k_offset + key * row_stride;
    copy_rows<kBounded, Config>(rows, row_stride, params.seqlen_k - key, tile);
    cute::cp_async_fence();
  }

  __device__ __forceinline__ void prologue() {
    auto q_tile = smem_q();
    copy_rows<true, Config>(static_cast<const Element*>(params.q) + q_offset, row_stride, row_end - row_begin, q_tile);
    cute::cp_async_fence();
    if constexpr (kDesign.eager_kv) load<true>(params.k, range.block_at(0), smem_k());
    if constexpr (kDesign.q_in_registers) {
      wait_for_copies();
      auto load_q = sm80::operand_loader<sm80::Side::kA, sm80::Operand::kPlain>(TiledMma{}, tSrQ, smem_q());
      for (int k = 0; k < decltype(cute::size<2>(tSrQ))::value; ++k) load_q(k);
    }
  }

  __device__ __forceinline__ void run() {
    const int masked = range.masked_count();
    const auto next = [&](int i) { return i + 1 < range.count() ? range.block_at(i + 1) : -1; };
    int i = 0;
    if constexpr (kDesign.softmax == SoftmaxRule::kFirstApart) {
      masked > 0 ? step<true, true>(range.block_at(0), next(0)) : step<false, true>(range.block_at(0), next(0));
      i = 1;
    }
    for (; i < masked; ++i) step<true, false>(range.block_at(i), next(i));
    for (int n_block = range.unmasked_end - 1 - (i - masked); n_block >= range.unmasked_begin; --n_block) {
      step<false, false>(n_block, n_block > range.unmasked_begin ? n_block - 1 : -1);
    }
  }

  template <class AccS>
  __device__ __forceinline__ void multiply_qk(AccS& acc_s) {
    using namespace cute;
    FragmentK tSrK;  // (MMA, MMA_N, MMA_D)
    auto load_q = sm80::operand_loader<sm80::Side::kA, sm80::Operand::kPlain>(TiledMma{}, tSrQ, smem_q());
    auto load_k = sm80::operand_loader<sm80::Side::kB, sm80::Operand::kPlain>(TiledMma{}, tSrK, smem_k());
    const auto load_shared_q = [&](int k) {
      if constexpr (!kDesign.q_in_registers) load_q(k);
    };
    gemm_slices<Config, kDesign.q_slices, kDesign.k_slices>(
        load_shared_q, [&](int k) { load_k(k); }, acc_s, tSrQ, tSrK);
  }

  template <class AccS>
  __device__ __forceinline__ void multiply_pv(const AccS& acc_s) {
    using namespace cute;
    const auto probabilities = convert<Element>(acc_s);
    auto tOrP = make_tensor(probabilities.data(), a_operand_layout(probabilities.layout()));  // (MMA, MMA_M, MMA_N)
    FragmentV tOrV;                                                                           // (MMA, MMA_D, MMA_N)
    auto load_v = sm80::operand_loader<sm80::Side::kB, sm80::Operand::kTransposed>(TiledMma{}, tOrV, smem_v());
    gemm_slices<Config, 0, kDesign.v_slices>([](int) {}, [&](int k) { load_v(k); }, acc_o, tOrP, tOrV);
  }

  template <bool kFirst, class Scores>
  __device__ __forceinline__ void update_softmax(Scores& scores) {
    auto out = row_col_view(acc_o);  // ((2, MMA_M), (2, MMA_D))
    if constexpr (kDesign.softmax == SoftmaxRule::kLagging) {
      softmax.update(scores, out, params.scale_log2);
    } else {
      textbook_update<kFirst>(softmax, scores, out, params.scale_log2);
    }
  }

  // One n_block. Eager: on entry the copy of its K is in flight, on exit that of K of next_block (none if < 0).
  template <bool kMasked, bool kFirst>
  __device__ __forceinline__ void step(int n_block, int next_block) {
    using namespace cute;
    if constexpr (kDesign.eager_kv) {
      wait_for_copies();  // K has landed; every warp is done with V of the previous step
      load<kMasked>(params.v, n_block, smem_v());
    } else {
      __syncthreads();  // every warp is done with K and V of the previous step
      load<kMasked>(params.k, n_block, smem_k());
      wait_for_copies();
    }
    auto acc_s = partition_fragment_C(TiledMma{}, Shape<Int<Config::kBlockM>, Int<Config::kBlockN>>{});
    clear(acc_s);
    multiply_qk(acc_s);
    auto scores = row_col_view(acc_s);  // ((2, MMA_M), (2, MMA_N))
    const int key = n_block * Config::kBlockN;
    if constexpr (kMasked) {
      apply_mask(scores, coords, visibility, row_begin, row_end, key, key + Config::kBlockN);
    }
    if constexpr (kDesign.eager_kv) {
      wait_for_copies();  // V has landed; every warp is done with K
      if (next_block >= 0) load<kMasked>(params.k, next_block, smem_k());
      update_softmax<kFirst>(scores);
    } else {
      update_softmax<kFirst>(scores);
      load<kMasked>(params.v, n_block, smem_v());
      wait_for_copies();
    }
    multiply_pv(acc_s);
  }

  // O is staged over Q without a barrier before: each warp overwrites the rows that only it has read.
  __device__ __forceinline__ void store_o() {
    float o_scale[kRows];
    softmax.finalize(o_scale, 1.0f, params.scale_log2, -INFINITY);
    auto out = row_col_view(acc_o);
    softmax.rescale(out, o_scale);
    auto staged = smem_q();
    sm80::stage_accumulator<Element>(TiledMma{}, acc_o, staged);
    __syncthreads();
    store_rows<typename Config::RowCopyT>(staged, static_cast<Element*>(params.out) + q_offset, row_stride,
                                          row_end - row_begin, Config::kHeadDim);
  }
};

// A CTA per (m_block, head), head after head, in each the m_blocks in descending order: those with the most keys first.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, kDesign.blocks_per_sm)
    lab_fwd_kernel(const __grid_constant__ FwdParams params) {
  extern __shared__ __align__(128) char smem[];
  const int m_blocks = (params.seqlen_q + Config::kBlockM - 1) / Config::kBlockM;
  const int batch_head = static_cast<int>(blockIdx.x) / m_blocks, batch = batch_head / params.heads;
  const int from_last = static_cast<int>(blockIdx.x) - batch_head * m_blocks;
  FwdMainloop<Config> mainloop(params, batch, batch_head - batch * params.heads, m_blocks - 1 - from_last,
                               reinterpret_cast<typename Config::Element*>(smem));
  if (mainloop.range.count() > 0) {
    mainloop.prologue();
    mainloop.run();
  }
  mainloop.store_o();
}

}  // namespace lab
}  // namespace flash
