// Gradients of biases as data, after a backward of either family: S and dP once more by mma.sync, in parts of 64
// columns of the head dim, so that one kernel serves every head dim. A thread block sums dS of all the tiles that add
// to its tile of the result in registers, in a fixed order (core/bias_tiles.h).
#include <atomic>

#include <cute/tensor.hpp>

#include "core/static_switch.h"
#include "kernels/common/accumulator.h"
#include "kernels/common/differentiate.h"
#include "kernels/common/element.h"
#include "kernels/common/launch.h"
#include "kernels/common/mask.h"
#include "kernels/common/origin.h"
#include "kernels/common/row_loader.h"
#include "kernels/common/score_bias.h"
#include "kernels/common/score_mod.h"
#include "kernels/common/sequence.h"
#include "kernels/sm80/gemm.h"
#include "params/bias.h"

namespace flash {
namespace {

using namespace sm80;

constexpr int kBlockM = BiasTiles::kBlockM, kBlockN = BiasTiles::kBlockN;
constexpr int kPartCols = 64;  // of the head dim, in a step
constexpr int kStages = 3, kThreads = 256, kWarpsM = 4, kWarpsN = 2;
constexpr int kStageElements = (kBlockM + kBlockN) * kPartCols;
constexpr int kStageBytes = 2 * kStageElements;
constexpr int kSumPitch = kBlockN + 1;  // floats of a row of the sums in shared memory
static_assert(kStages * kStageBytes >= kBlockM * kSumPitch * 4);

// A tile of which a part is in shared memory.
struct LoadedTile {
  WorkTile at;
  int key_begin;
};
constexpr int kLoadedTiles = 4;
static_assert(kLoadedTiles > kStages / 2 + 1, "a tile has two parts or more");
constexpr int kSmemBytes = kStages * kStageBytes + kLoadedTiles * static_cast<int>(sizeof(LoadedTile));

// The tiles of scores that a thread block adds, one after the other. By all lanes of a warp together.
struct ScoreTiles {
  const BiasGradientParams& params;
  const BiasTiles::Owner owner;
  int64_t item, end;
  WorkTile at;
  int key_begin = 0, key_end = 0;  // of the tile; where tiles of the item no longer begin
  bool done = false;

  __device__ ScoreTiles(const BiasGradientParams& params_, const BiasTiles::Owner& owner_, int64_t chunk)
      : params(params_),
        owner(owner_),
        item(params_.tiles.first_item(chunk) - 1),
        end(params_.tiles.first_item(chunk + 1)) {
    next();
  }

  __device__ static WorkTile rows_of(const BiasGradientParams& params, const BiasTiles::Owner& at) {
    const Flash_bwd_params& call = params.call;
    const int m_block = static_cast<int>(at.m_block), head = static_cast<int>(at.head);
    if (call.is_varlen()) return varlen_work_tile(call, kBlockM, head, m_block);
    const int from_last = static_cast<int>(params.tiles.m_blocks) - 1 - m_block;
    return equal_work_tile(call, kBlockM, static_cast<int>(at.batch), head, from_last);
  }

  __device__ Visibility window() const { return {at.seqlen_q, at.seqlen_k, params.call.window}; }
  __device__ int diagonal() const { return alibi_diagonal(params.call, at.batch, window(), at.row_begin); }

  __device__ void open() {
    const BiasTiles::Owner where = params.tiles.item(owner, item);
    at = rows_of(params, where);
    key_begin = static_cast<int>(where.n_block) * kBlockN;
    key_end = min(key_begin + 1, at.seqlen_k);
    if (params.tiles.of_table) {
      const BiasTiles::Keys keys = params.tiles.keys_of_class(where.n_block, diagonal(), at.seqlen_k);
      key_begin = keys.begin;
      key_end = keys.end;
    }
    if (at.empty()) key_end = key_begin;
  }

  __device__ bool is_visible() const {
    const Visibility mask = window();
    return mask.key_end(at.row_end - 1) > key_begin && mask.key_begin(at.row_begin) < key_begin + kBlockN;
  }

  __device__ void next() {
    do {
      key_begin += kBlockN;
      while (key_begin >= key_end) {
        if (++item >= end) {
          done = true;
          return;
        }
        open();
      }
    } while (!is_visible());
  }
};

template <Dtype kDtype>
struct BiasGradient {
  using Element = ElementOf<kDtype>;
  using Mma = WarpGridMma<MmaAtomOf<kDtype>, kWarpsM, kWarpsN>;
  using Coords = AccumulatorCoords<kWarpsM, kWarpsN>;
  using RowsLayout = SwizzledTile<kBlockM, kPartCols>;
  using KeysLayout = SwizzledTile<kBlockN, kPartCols>;
  using Acc = decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::Int<kBlockM>, cute::Int<kBlockN>>{}));
  using Copy = RowCopy<Element, kThreads, kPartCols, kPartCols>;
  static constexpr int kRows = decltype(cute::size<0>(row_col_layout(typename Acc::layout_type{})))::value;
  static constexpr int kCols = decltype(cute::size<1>(row_col_layout(typename Acc::layout_type{})))::value;
  static_assert(kRows * kCols == 32, "a word has a bit for each element");

  const BiasGradientParams& params;
  const Flash_bwd_params& call;
  Element* const smem;
  const Coords coords;
  const int s_parts, parts;  // of Q and K; with those of dO and V
  Acc acc_s, acc_dp, sums;

  __device__ __forceinline__ BiasGradient(const BiasGradientParams& params_, Element* smem_)
      : params(params_),
        call(params_.call),
        smem(smem_),
        s_parts((params_.call.d + kPartCols - 1) / kPartCols),
        parts(s_parts + (params_.call.d_v + kPartCols - 1) / kPartCols) {
    cute::clear(sums);
  }

  __device__ __forceinline__ auto smem_rows(int stage) const {
    return cute::make_tensor(cute::make_smem_ptr(smem + stage * kStageElements), RowsLayout{});
  }
  __device__ __forceinline__ auto smem_keys(int stage) const {
    return cute::make_tensor(cute::make_smem_ptr(smem + stage * kStageElements + kBlockM * kPartCols), KeysLayout{});
  }

  // Part `part` of a tile: of Q and K, then of dO and V.
  __device__ __forceinline__ void load(const ScoreTiles& tiles, int part, int stage) const {
    const bool is_s = part < s_parts;
    const int col = kPartCols * (is_s ? part : part - s_parts);
    const WorkTile& at = tiles.at;
    const Copy copy((is_s ? call.d : call.d_v) - col);
    const auto load_rows = [&](const void* data, const MatrixStrides& strides, int row, int head, int first, int rows,
                               auto&& tile) {
      const Element* const from =
          static_cast<const Element*>(data) + matrix_offset(strides, call.is_varlen(), at.batch, row, head) + col;
      copy.template run_strided<true>(from, strides.row, rows, tile, first);
    };
    const int head_k = at.head / call.h_h_k_ratio, rows = at.row_end - at.row_begin;
    load_rows(is_s ? call.q_ptr : call.do_ptr, is_s ? call.q_strides : call.do_strides, at.q_begin + at.row_begin,
              at.head, 0, rows, smem_rows(stage));
    load_rows(is_s ? call.k_ptr : call.v_ptr, is_s ? call.k_strides : call.v_strides, at.k_begin + tiles.key_begin,
              head_k, -tiles.key_begin, at.seqlen_k - tiles.key_begin, smem_keys(stage));
  }

  // Loads are kStages - 1 parts ahead, and pass on the tile that a part belongs to.
  __device__ __forceinline__ void run(const BiasTiles::Owner& owner, int64_t chunk, LoadedTile* loaded) {
    ScoreTiles tiles(params, owner, chunk);
    int part = 0, slot = 0, issued = 0;
    const auto load_next = [&](int stage) {
      if (!tiles.done) {
        if (part == 0 && threadIdx.x == 0) loaded[slot] = {tiles.at, tiles.key_begin};
        load(tiles, part, stage);
        ++issued;
        if (++part == parts) {
          part = 0;
          slot = (slot + 1) % kLoadedTiles;
          tiles.next();
        }
      }
      cute::cp_async_fence();  // also if nothing is left: groups are counted
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load_next(i);
    cute::clear(acc_s);
    cute::clear(acc_dp);
    int own_part = 0, own_slot = 0, stage = 0;
    for (int i = 0; i < issued; ++i) {
      cute::cp_async_wait<kStages - 2>();
      __syncthreads();  // the part has landed, and every warp is done with the one before
      load_next(stage == 0 ? kStages - 1 : stage - 1);
      if (own_part < s_parts) {
        gemm_smem<Operand::kPlain, Operand::kPlain>(Mma{}, acc_s, smem_rows(stage), smem_keys(stage));
      } else {
        gemm_smem<Operand::kPlain, Operand::kPlain>(Mma{}, acc_dp, smem_rows(stage), smem_keys(stage));
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (++own_part == parts) {
        own_part = 0;
        add_tile(loaded[own_slot].at, loaded[own_slot].key_begin);
        own_slot = (own_slot + 1) % kLoadedTiles;
        cute::clear(acc_s);
        cute::clear(acc_dp);
      }
    }
    cute::cp_async_wait<0>();
    __syncthreads();
  }

  // A bit for each element. Rolled: in code for rare options size counts.
  template <class Predicate>
  __device__ __forceinline__ uint32_t bits_of(const Predicate& holds) const {
    uint32_t bits = 0;
#pragma unroll 1
    for (int i = 0; i < kRows * kCols; ++i) {
      bits |= static_cast<uint32_t>(holds(coords.row(i / kCols), coords.col(i % kCols))) << i;
    }
    return bits;
  }

  // sums += P (dP - softmax_d)
  __device__ __forceinline__ void add_tile(const WorkTile at, int key_begin) {
    using namespace cute;
    const Visibility window{at.seqlen_q, at.seqlen_k, call.window};
    const int diagonal = alibi_diagonal(call, at.batch, window, at.row_begin);
    auto scores = row_col_view(acc_s);
    auto dp = row_col_view(acc_dp);
    auto total = row_col_view(sums);
    ScoreMod(call, at.batch, at.head).apply(scores, coords, diagonal, key_begin);
    const BiasTile tile{at.row_begin, key_begin, at.seqlen_q, at.seqlen_k, diagonal};
    add_biases<Element>(scores, coords, params.bias.of(at.batch, at.head, at.q_begin), tile);
    apply_mask(scores, coords, window, at.row_begin, at.row_end, key_begin, key_begin + kBlockN);
    uint32_t hidden = hidden_bits(at, key_begin), dropped = 0;
    if (call.has_dropout) {
      const DropoutMask mask(call, at.batch, at.head);
      dropped = bits_of([&](int row, int col) {
        return !dropout_keeps(mask.stream, mask.first_row + at.row_begin + row,
                              mask.first_col + max(key_begin + col, 0), mask.threshold);
      });
    }
    const float* const lse = call.softmax_lse_ptr + lse_offset(call, at.batch, at.head, at.q_begin);
    const float* const softmax_d = call.softmax_d_ptr + softmax_d_offset(call, at.batch, at.head, at.q_begin);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = at.row_begin + coords.row(mi);
      const float row_lse = row < at.seqlen_q ? lse_or_inf(lse[row]) * ScoreMod::kLog2e : INFINITY;
      const float delta = row < at.seqlen_q ? softmax_d[row] : 0.0f;
#pragma unroll
      for (int ni = 0; ni < kCols; ++ni) {
        const int element = mi * kCols + ni;
        const bool is_hidden = (hidden >> element & 1u) || row_lse == INFINITY;
        const float p = is_hidden ? 0.0f : exp2f(scores(mi, ni) - row_lse);
        const float gradient = (dropped >> element & 1u) ? 0.0f : dp(mi, ni) * call.dropout.keep_scale;
        total(mi, ni) += p == 0.0f ? 0.0f : p * (gradient - delta);  // not NaN where V or dO of no score holds one
      }
    }
  }

  // What masks as data hide, and keys before the first one.
  __device__ __forceinline__ uint32_t hidden_bits(const WorkTile& at, int key_begin) const {
    uint32_t hidden = 0;
    if (key_begin < 0) hidden = bits_of([&](int, int col) { return key_begin + col < 0; });
    if (params.factors.given()) {
      const MaskFactors factors =
          params.factors.of(at.batch, at.head, call.seqlen_q, call.seqlen_k, at.q_begin, at.k_begin);
      hidden |= bits_of([&](int row, int col) {
        const int last_row = min(at.row_begin + row, at.seqlen_q - 1);
        return !factors.sees(last_row, min(max(key_begin + col, 0), at.seqlen_k - 1));
      });
    }
    return hidden;
  }

  // ---- the result ----

  __device__ __forceinline__ void put(int64_t index, int64_t chunk, float value) const {
    if (params.partial_ptr != nullptr) {
      params.partial_ptr[chunk * params.tiles.results() + index] = value;
    } else {
      put_result(params, index, value);
    }
  }

  __device__ __forceinline__ static void put_result(const BiasGradientParams& params, int64_t index, float value) {
    if (params.out_is_float) {
      static_cast<float*>(params.out_ptr)[index] = value;
    } else {
      static_cast<Element*>(params.out_ptr)[index] = Element(value);
    }
  }

  __device__ __forceinline__ void store(const BiasTiles::Owner& owner, int64_t chunk) const {
    const BiasTiles& tiles = params.tiles;
    if (!tiles.of_table && !tiles.sums_rows && !tiles.sums_cols) return store_scores(owner, chunk);
    float* const tile = reinterpret_cast<float*>(smem);
    auto total = row_col_view(sums);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
#pragma unroll
      for (int ni = 0; ni < kCols; ++ni) tile[coords.row(mi) * kSumPitch + coords.col(ni)] = total(mi, ni);
    }
    __syncthreads();
    if (tiles.of_table) {
      owner.n_block < tiles.near_count ? store_diagonals(tile, owner, chunk) : store_far(tile, owner, chunk);
    } else if (tiles.sums_rows && tiles.sums_cols) {
      const float sum = sum_all(tile);
      if (threadIdx.x == 0) put(owner.batch * tiles.heads + owner.head, chunk, sum);
    } else if (tiles.sums_rows) {
      store_column_sums(tile, owner, chunk);
    } else {
      store_row_sums(tile, owner, chunk);
    }
  }

  // Index of the result's element (row, 0), where it has one column for each or for all.
  __device__ __forceinline__ int64_t row_index(const BiasTiles::Owner& owner, int64_t row) const {
    const BiasTiles& tiles = params.tiles;
    return ((owner.batch * tiles.heads + owner.head) * tiles.rows + row) * tiles.cols;
  }

  __device__ __forceinline__ void store_scores(const BiasTiles::Owner& owner, int64_t chunk) const {
    const WorkTile at = ScoreTiles::rows_of(params, owner);
    auto total = row_col_view(sums);
#pragma unroll
    for (int mi = 0; mi < kRows; ++mi) {
      const int row = at.row_begin + coords.row(mi);
      const int64_t first = row_index(owner, at.q_begin + row);
#pragma unroll
      for (int ni = 0; ni < kCols; ni += 2) {
        const int64_t col = owner.n_block * kBlockN + coords.col(ni);
        if (row >= at.row_end || col >= params.tiles.cols) continue;
        if (stores_pairs()) {
          put_pair(first + col, total(mi, ni), total(mi, ni + 1));
        } else {
          put(first + col, chunk, total(mi, ni));
          if (col + 1 < params.tiles.cols) put(first + col + 1, chunk, total(mi, ni + 1));
        }
      }
    }
  }

  // Pairs of 16-bit columns, all of which exist.
  __device__ __forceinline__ bool stores_pairs() const {
    return params.partial_ptr == nullptr && !params.out_is_float && params.tiles.cols % 2 == 0;
  }
  __device__ __forceinline__ void put_pair(int64_t index, float first, float second) const {
    static_cast<uint32_t*>(params.out_ptr)[index / 2] = pack_pair(first, second, Element{});
  }

  __device__ __forceinline__ void store_column_sums(const float* tile, const BiasTiles::Owner& owner,
                                                    int64_t chunk) const {
    const int64_t col = owner.n_block * kBlockN + threadIdx.x;
    if (threadIdx.x >= kBlockN || col >= params.tiles.cols) return;
    float sum = 0.0f;
    for (int row = 0; row < kBlockM; ++row) sum += tile[row * kSumPitch + threadIdx.x];
    put(row_index(owner, 0) + col, chunk, sum);
  }

  __device__ __forceinline__ void store_row_sums(const float* tile, const BiasTiles::Owner& owner,
                                                 int64_t chunk) const {
    const WorkTile at = ScoreTiles::rows_of(params, owner);
    const int row = at.row_begin + static_cast<int>(threadIdx.x);
    if (threadIdx.x >= kBlockM || row >= at.row_end) return;
    put(row_index(owner, at.q_begin + row), chunk, sum_of_row(tile, threadIdx.x));
  }

  __device__ __forceinline__ static float sum_of_row(const float* tile, int row) {
    float sum = 0.0f;
    for (int col = 0; col < kBlockN; ++col) sum += tile[row * kSumPitch + col];
    return sum;
  }

  // The sum of a tile, for thread 0. Overwrites the tile.
  __device__ __forceinline__ static float sum_all(float* tile) {
    const int row = threadIdx.x;
    const float own = row < kBlockM ? sum_of_row(tile, row) : 0.0f;
    __syncthreads();
    if (row < kBlockM) tile[row] = own;
    __syncthreads();
    float sum = 0.0f;
    if (row == 0) {
      for (int i = 0; i < kBlockM; ++i) sum += tile[i];
    }
    return sum;
  }

  __device__ __forceinline__ void store_diagonals(const float* tile, const BiasTiles::Owner& owner,
                                                  int64_t chunk) const {
    const int bin = threadIdx.x, distance = bin - (kBlockM - 1);  // of column and row of the tile
    if (bin >= BiasTiles::kDistances) return;
    float sum = 0.0f;
    for (int row = max(0, -distance); row < min(kBlockM, kBlockN - distance); ++row) {
      sum += tile[row * kSumPitch + row + distance];
    }
    params.partial_ptr[params.tiles.partial_index(owner.head, chunk, owner.n_block) + bin] = sum;
  }

  __device__ __forceinline__ void store_far(float* tile, const BiasTiles::Owner& owner, int64_t chunk) const {
    const float sum = sum_all(tile);
    if (threadIdx.x == 0) params.partial_ptr[params.tiles.partial_index(owner.head, chunk, owner.n_block)] = sum;
  }
};

template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads, 2) bias_gradient_kernel(const __grid_constant__ BiasGradientParams params) {
  extern __shared__ __align__(128) char smem[];
  const int64_t index = blockIdx.x / params.tiles.chunks, chunk = blockIdx.x - index * params.tiles.chunks;
  const BiasTiles::Owner owner = params.tiles.owner(index);
  BiasGradient<kDtype> gradient(params, reinterpret_cast<ElementOf<kDtype>*>(smem));
  gradient.run(owner, chunk, reinterpret_cast<LoadedTile*>(smem + kStages * kStageBytes));
  gradient.store(owner, chunk);
}

// Sums of chunks, a thread for each element of the result.
template <Dtype kDtype>
__global__ void __launch_bounds__(kThreads) sum_chunks_kernel(const __grid_constant__ BiasGradientParams params) {
  const int64_t results = params.tiles.results();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < results;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < params.tiles.chunks; ++chunk) sum += params.partial_ptr[chunk * results + i];
    BiasGradient<kDtype>::put_result(params, i, sum);
  }
}

// Sums by distance, a warp for each column of the table: of all chunks and near offsets whose tiles hold the distance,
// for an end of the table all those beyond it.
__global__ void __launch_bounds__(kThreads) sum_distances_kernel(const __grid_constant__ BiasGradientParams params) {
  const BiasTiles& tiles = params.tiles;
  const int64_t cols = 2 * int64_t{tiles.reach} + 1, warps = int64_t{gridDim.x} * (kThreads / 32);
  const int lane = threadIdx.x % 32;
  for (int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; i < tiles.heads * cols; i += warps) {
    const int64_t head = i / cols, wanted = i - head * cols - tiles.reach;
    const bool is_first = wanted == -tiles.reach, is_last = wanted == tiles.reach;
    // Near offsets that hold the distance; an end has all.
    int64_t begin = floor_divide(wanted - BiasTiles::kBlockN, BiasTiles::kBlockN) + 1 - tiles.near_begin;
    int64_t end = floor_divide(wanted + BiasTiles::kBlockM - 1, BiasTiles::kBlockN) + 1 - tiles.near_begin;
    begin = is_first || begin < 0 ? 0 : begin;
    end = is_last || end > tiles.near_count ? tiles.near_count : end;
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < tiles.chunks; ++chunk) {
      for (int64_t index = begin; index < end; ++index) {
        const float* const bins = params.partial_ptr + tiles.partial_index(head, chunk, index);
        for (int bin = lane; bin < BiasTiles::kDistances; bin += 32) {
          const int64_t distance = tiles.distance(index, bin);
          if (distance == wanted || (is_first && distance < wanted) || (is_last && distance > wanted)) sum += bins[bin];
        }
      }
      if (lane == 0 && is_first) sum += params.partial_ptr[tiles.partial_index(head, chunk, tiles.near_count)];
      if (lane == 0 && is_last) sum += params.partial_ptr[tiles.partial_index(head, chunk, tiles.near_count + 1)];
    }
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (lane == 0) static_cast<float*>(params.out_ptr)[i] = sum;
  }
}

template <Dtype kDtype>
cudaError_t run(const BiasGradientParams& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0}, sum_devices{0};
  const BiasTiles& tiles = params.tiles;
  const int device = params.call.device;
  const cudaError_t status = launch(bias_gradient_kernel<kDtype>, tiles.owners() * tiles.chunks, kThreads, kSmemBytes,
                                    params, device, stream, configured_devices);
  if (status != cudaSuccess || params.partial_ptr == nullptr) return status;
  constexpr int64_t kMostBlocks = 8 * 1024;
  const int64_t in_block = tiles.of_table ? kThreads / 32 : kThreads;
  const int64_t blocks = std::min((tiles.results() + in_block - 1) / in_block, kMostBlocks);
  if (tiles.of_table) return launch(sum_distances_kernel, blocks, kThreads, 0, params, device, stream, sum_devices);
  return launch(sum_chunks_kernel<kDtype>, blocks, kThreads, 0, params, device, stream, sum_devices);
}

}  // namespace

cudaError_t run_bias_gradient(const BiasGradientParams& params, cudaStream_t stream) {
  return FP16_SWITCH(params.dtype, [&] { return run<kDtype>(params, stream); });
}

}  // namespace flash
