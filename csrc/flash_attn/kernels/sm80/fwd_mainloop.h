// The mainloop of the mma.sync forward: S = Q K^T, online softmax, O += P V, one n_block per step.
#pragma once

#include <cute/tensor.hpp>

#include "core/block_range.h"
#include "core/visible_range.h"
#include "kernels/common/accumulator.h"
#include "kernels/common/convert.h"
#include "kernels/common/dropout.h"
#include "kernels/common/mask.h"
#include "kernels/common/origin.h"
#include "kernels/common/score_bias.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/sequence.h"
#include "kernels/common/softmax.h"
#include "kernels/sm80/clear_rows.h"
#include "kernels/sm80/fwd_config.h"
#include "kernels/sm80/gemm.h"
#include "kernels/sm80/listed_steps.h"
#include "kernels/sm80/row_exchange.h"

namespace flash {
namespace sm80 {

// Issues the cp.async copies of K and V of one (sequence, K/V head) into shared memory.
template <class Config>
struct KvLoader {
  using Element = typename Config::Element;

  const Flash_fwd_params& params;
  typename Config::RowCopyT copy;
  const Element* k_base;
  const Element* v_base;
  const int* pages;  // of this sequence; null when K and V are not paged
  int key_offset;    // paged: row of key 0 in the pages of the sequence
  int seqlen_k;

  __device__ __forceinline__ KvLoader(const Flash_fwd_params& params_, const WorkTile& tile)
      : params(params_),
        copy(params_.d),
        k_base(static_cast<const Element*>(params_.k_ptr) + offset(params_.k_strides, tile)),
        v_base(static_cast<const Element*>(params_.v_ptr) + offset(params_.v_strides, tile)),
        pages(is_paged() ? params_.paged.block_table + tile.batch * params_.paged.block_table_stride : nullptr),
        key_offset(tile.k_begin),
        seqlen_k(tile.seqlen_k) {}

  __device__ __forceinline__ bool is_paged() const { return params.paged.block_table != nullptr; }

  __device__ __forceinline__ int64_t offset(const MatrixStrides& strides, const WorkTile& tile) const {
    const int64_t head = (tile.head / params.h_h_k_ratio) * strides.head;
    if (is_paged()) return head;
    const int64_t batch = params.keys_packed() ? 0 : tile.batch * strides.batch;
    return head + batch + tile.k_begin * strides.row;
  }

  template <bool kBounded, class Smem>
  __device__ __forceinline__ void load(const Element* base, const MatrixStrides& strides, int n_block,
                                       Smem&& smem) const {
    // Unmasked blocks need no bounds check on pages; with dropout ptxas spills without one.
    constexpr bool kBoundsPages = kBounded || Config::kMayDrop;
    const int key = n_block * Config::kBlockN;
    if (is_paged()) {
      copy.template run_paged<kBoundsPages>(base, strides, params.paged, pages, key_offset + key, seqlen_k - key, smem);
    } else {
      copy.template run_strided<kBounded>(base + key * strides.row, strides.row, seqlen_k - key, smem);
    }
  }

  template <bool kBounded, class Smem>
  __device__ __forceinline__ void load_k(int n_block, Smem&& smem) const {
    load<kBounded>(k_base, params.k_strides, n_block, smem);
  }

  template <bool kBounded, class Smem>
  __device__ __forceinline__ void load_v(int n_block, Smem&& smem) const {
    load<kBounded>(v_base, params.v_strides, n_block, smem);
  }
};

template <class Config>
struct FwdMainloop {
  using Element = typename Config::Element;
  using TiledMma = typename Config::TiledMma;
  static constexpr int kRows = 2 * Config::kBlockM / (16 * Config::kRowWarps);  // accumulator rows per thread
  using AccO = decltype(cute::partition_fragment_C(
      TiledMma{}, cute::Shape<cute::Int<Config::kBlockM>, cute::Int<Config::kHeadDim>>{}));

  const typename Config::Params& params;
  const WorkTile& tile;
  const MaskOf<Config> visibility;
  using Steps = std::conditional_t<Config::kMayDrop, GeneralKvSteps<Config>, BlockRange>;
  const Steps steps;
  const KvLoader<Config> loader;
  const typename Config::Coords coords;
  Element* const smem;  // Q, then K, then V, then what warps that share rows exchange

  AccO acc_o;  // ((2, 2), MMA_M, MMA_D)
  Softmax<kRows> softmax;

  __device__ __forceinline__ FwdMainloop(const typename Config::Params& params_, const WorkTile& tile_, Element* smem_)
      : params(params_),
        tile(tile_),
        visibility(mask_of<Config>(params_, tile_)),
        steps(make_steps()),
        loader(params_, tile_),
        smem(smem_) {
    cute::clear(acc_o);
  }

  __device__ __forceinline__ Steps make_steps() const {
    const BlockRange range = block_range(visibility, tile.row_begin, tile.row_end, Config::kBlockN);
    if constexpr (Config::kMayDrop) {
      return {params, tile, range};
    } else {
      return range;
    }
  }

  __device__ __forceinline__ auto smem_q() const {
    return cute::make_tensor(cute::make_smem_ptr(smem), typename Config::SmemLayoutQ{});  // (M, D)
  }
  __device__ __forceinline__ auto smem_k() const { return smem_kv(smem + Config::kSmemQ); }
  __device__ __forceinline__ auto smem_v() const { return smem_kv(smem + Config::kSmemQ + Config::kSmemKv); }
  __device__ __forceinline__ static auto smem_kv(Element* data) {
    return cute::make_tensor(cute::make_smem_ptr(data), typename Config::SmemLayoutKv{});  // (N, D)
  }

  __device__ __forceinline__ void load_q() const {
    const Element* q = static_cast<const Element*>(params.q_ptr) + q_offset(tile, params.q_strides) +
                       tile.row_begin * params.q_strides.row;
    auto q_tile = smem_q();
    loader.copy.template run_strided<true>(q, params.q_strides.row, tile.row_end - tile.row_begin, q_tile);
  }

  // Waits for this thread's cp.async copies, then the barrier: the tile is complete, and the previous step was read.
  __device__ __forceinline__ static void wait_for_copies() {
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void prologue() const {
    load_q();
    loader.template load_k<true>(steps.block_at(0), smem_k());
    cute::cp_async_fence();
  }

  __device__ __forceinline__ void run_masked() {
    const int masked_blocks = steps.masked_count();
    for (int i = 0; i < masked_blocks; ++i)
      step<true>(steps.block_at(i), i + 1 < steps.count() ? steps.block_at(i + 1) : -1);
  }

  __device__ __forceinline__ void run_unmasked() {
    if constexpr (Config::kMayDrop) {
      for (int i = steps.masked_count(), count = steps.count(); i < count; ++i)
        step<false>(steps.block_at(i), i + 1 < count ? steps.block_at(i + 1) : -1);
    } else {
      for (int n_block = steps.unmasked_end - 1; n_block >= steps.unmasked_begin; --n_block) {
        step<false>(n_block, n_block > steps.unmasked_begin ? n_block - 1 : -1);
      }
    }
  }

  // The mask of a masked block.
  template <class Scores>
  __device__ __forceinline__ void mask_block(Scores& scores, int key) const {
    if constexpr (Config::kMayDrop) {
      if (steps.is_listed) {
        const MaskFactors factors = factors_of(params, params.mask.factors, tile, tile.head);
        return sm80::apply_factors(scores, coords, factors, visibility, tile.row_begin, key);
      }
    }
    apply_mask(scores, coords, visibility, tile.row_begin, tile.row_end, key, key + Config::kBlockN);
  }

  // Clears V of keys of the n_block that no query of the sequence sees: by the window those at its beginning.
  __device__ __forceinline__ void clear_masked_values(int key) const {
    if constexpr (Config::kMayDrop) {
      if (steps.is_listed) {
        const uint32_t* const seen = seen_keys_of(params, params.mask, tile, tile.head, tile.segment);
        const auto word = [&](int i) { return seen[key / kMaskWordKeys + i]; };
        return clear_unseen_rows<Config, Config::kBlockN>(word, smem_v());
      }
    }
    if (!params.window.may_mask_left()) return;
    clear_rows<Config>(min(first_visible_key(visibility) - key, Config::kBlockN), smem_v());
  }

  // One n_block. On entry the copy of its K is in flight; on exit that of K of next_block (none if next_block < 0).
  template <bool kMasked>
  __device__ __forceinline__ void step(int n_block, int next_block) {
    using namespace cute;
    wait_for_copies();  // K has landed; every warp is done with V of the previous step
    loader.template load_v<kMasked>(n_block, smem_v());
    cp_async_fence();

    auto acc_s = partition_fragment_C(TiledMma{}, Shape<Int<Config::kBlockM>, Int<Config::kBlockN>>{});
    clear(acc_s);
    gemm_smem<Operand::kPlain, Operand::kPlain>(TiledMma{}, acc_s, smem_q(), smem_k());
    auto scores = row_col_view(acc_s);  // ((2, MMA_M), (2, MMA_N))
    const int key = n_block * Config::kBlockN;
    if (params.has_score_mod) {
      int diagonal = visibility.diagonal(tile.row_begin);
      if constexpr (Config::kMayDrop) diagonal = alibi_diagonal(params, tile.batch, visibility, tile.row_begin);
      ScoreMod(params, tile.batch, tile.head).apply(scores, coords, diagonal, key);
      if constexpr (Config::kMayDrop) {
        const BiasTile bias_tile{tile.row_begin, key, tile.seqlen_q, tile.seqlen_k, diagonal};
        add_biases<Element>(scores, coords, params.mask.bias.of(tile.batch, tile.head, tile.q_begin), bias_tile);
      }
    }
    if constexpr (kMasked) {
      mask_block(scores, key);
    }

    float maxima[kRows];
    if constexpr (Config::kColWarps > 1) exchange().publish_maxima(scores, coords, maxima);
    wait_for_copies();  // V has landed; every warp is done with K
    if constexpr (kMasked) clear_masked_values(key);
    if (next_block >= 0) {
      loader.template load_k<kMasked>(next_block, smem_k());
      cp_async_fence();
    }
    auto out = row_col_view(acc_o);  // ((2, MMA_M), (2, MMA_D))
    if constexpr (Config::kColWarps > 1) {
      exchange().read_maxima(coords, maxima);
      softmax.update_shared(scores, out, maxima, params.softmax_scale_log2, params.rescale_threshold_log2);
    } else {
      softmax.template update<!Config::kMayDrop>(scores, out, params.softmax_scale_log2, params.rescale_threshold_log2);
    }
    if constexpr (Config::kMayDrop) {
      if (params.has_dropout) {
        const DropoutMask mask(params, tile.batch, tile.head);
        apply_dropout(mask, scores, coords, tile.row_begin, key);
      }
    }
    if constexpr (Config::kColWarps > 1) {
      exchange().publish_probabilities(acc_s);
      gemm_smem<Operand::kPlain, Operand::kTransposed>(TiledMma{}, acc_o, exchange().probabilities(), smem_v());
    } else {
      const auto probabilities = convert<Element>(acc_s);
      auto tOrP = make_tensor(probabilities.data(), a_operand_layout(probabilities.layout()));  // (MMA, MMA_M, MMA_N)
      gemm_registers<Operand::kTransposed>(TiledMma{}, acc_o, tOrP, smem_v());
    }
  }

  __device__ __forceinline__ RowExchange<Config> exchange() const {
    return {reinterpret_cast<char*>(smem) + Config::kExchangeAt};
  }
};

}  // namespace sm80
}  // namespace flash
