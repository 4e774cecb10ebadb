// Tensor maps, grid and launch of the wgmma forward.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // wgmma of 80 keys

#include "core/static_switch.h"
#include "kernels/common/launch.h"
#include "kernels/sm90/fwd_kernel.h"
#include "plan/fwd_shape.h"
#include "plan/grid.h"
#include "plan/work_tile_order.h"

namespace flash {
namespace sm90 {

// Indices of row blocks are ints, with room for the draws of all thread blocks beyond the last one.
constexpr int64_t kMaxTiles = 1 << 30;

// Where there are no boxes, rows are copied one by one.
template <class Config>
void make_page_maps(FwdLaunch& launch, Dtype dtype) {
  const Flash_fwd_params& params = launch.params;
  launch.page_box_rows = plan::page_box_rows(params.paged.page_size.divisor, Config::kBlockN);
  auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, int head_dim) {
    const TensorMapSource pool{data,       strides, false, params.paged.num_pages, params.paged.page_size.divisor,
                               params.h_k, head_dim};
    return make_tensor_map(map, pool, dtype, {Config::kAtomCols, launch.page_box_rows}) == cudaSuccess;
  };
  const bool made = launch.page_box_rows > 0 && make(launch.k_map, params.k_ptr, params.k_strides, params.d) &&
                    make(launch.v_map, params.v_ptr, params.v_strides, params.d_v);
  if (!made) launch.page_box_rows = 0;
}

template <class Config>
cudaError_t make_tensor_maps(FwdLaunch& launch, Dtype dtype) {
  const Flash_fwd_params& params = launch.params;
  auto make = [&](CUtensorMap& map, const void* data, const MatrixStrides& strides, bool is_query, int rows,
                  int head_dim) {
    return make_tensor_map(map, tensor_map_source(params, data, strides, is_query, head_dim), dtype,
                           {Config::kAtomCols, rows});
  };
  cudaError_t status = make(launch.q_map, params.q_ptr, params.q_strides, true, 64, params.d);
  constexpr int kStoredRows = Config::kHasStoreWarp ? 64 : 16;
  if (status == cudaSuccess) status = make(launch.o_map, params.o_ptr, params.o_strides, true, kStoredRows, params.d_v);
  if (status != cudaSuccess || params.seqlen_k == 0) return status;  // no key is ever loaded
  if (params.is_paged()) {
    make_page_maps<Config>(launch, dtype);
    return cudaSuccess;
  }
  status = make(launch.k_map, params.k_ptr, params.k_strides, false, Config::kBlockN, params.d);
  if (status != cudaSuccess) return status;
  return make(launch.v_map, params.v_ptr, params.v_strides, false, Config::kBlockN, params.d_v);
}

// Keys of one head in all sequences of a packed batch, or in one sequence; in pages, the most that the table can list.
inline int64_t keys_of_head(const Flash_fwd_params& params) {
  if (!params.is_paged()) return params.seqlen_k;
  const int64_t listed = int64_t{params.b} * params.paged.pages_per_sequence;
  return (listed < params.paged.num_pages ? listed : params.paged.num_pages) * params.paged.page_size.divisor;
}

// cudaErrorNotSupported: more row blocks than can be numbered.
template <class Config>
cudaError_t set_tile_order(FwdLaunch& launch) {
  const Flash_fwd_params& params = launch.params;
  const bool is_varlen = params.is_varlen();
  const int64_t tiles_of_head = plan::m_blocks(is_varlen, is_varlen ? params.b : 1, params.seqlen_q, Config::kBlockM);
  const int64_t all_heads = int64_t{params.h} * (is_varlen ? 1 : params.b);
  const int splits = launch.splits.count;
  if (tiles_of_head * all_heads > kMaxTiles / splits) return cudaErrorNotSupported;
  launch.tiles = static_cast<int>(tiles_of_head * all_heads);
  if (launch.tiles == 0) return cudaSuccess;
  // Query heads of one K/V head share its keys and values.
  const int64_t head_bytes = 2 * keys_of_head(params) * (params.d + params.d_v) / params.h_h_k_ratio;
  const bool uneven = params.window.right != kUnbounded || params.keys_packed();
  const int consumer_groups = params.multiprocessors * Config::kConsumerGroups;
  const bool in_bands = uneven || plan::sm90_dynamic_scheduler_for_equal_tiles(Config::kHeadDim);
  const int band = in_bands ? plan::band_heads(all_heads, tiles_of_head, head_bytes, consumer_groups) : 1;
  launch.sort_varlen_tiles = is_varlen && uneven && params.b <= VarlenOrder::kSequences;
  int64_t short_tiles = 0;
  if (!is_varlen) {
    short_tiles = plan::num_short_tiles(params.seqlen_q, params.seqlen_k, params.window, Config::kBlockM,
                                        Config::kFetchNextTileLate && !params.is_paged());
  } else if (launch.sort_varlen_tiles && params.window.left == kUnbounded) {
    short_tiles = tiles_of_head;  // the last ones, whatever the lengths
  }
  launch.short_tiles = splits > 1 ? 0 : static_cast<int>(short_tiles);
  const int of_head = static_cast<int>(tiles_of_head);
  const int late = plan::num_tail_tiles(of_head, launch.short_tiles);
  launch.order = plan::WorkTileOrder(static_cast<int>(all_heads), of_head, band, late);
  launch.heads_of_batch = FastDiv(params.h);
  // Of the window alone: shorter sequences have the same walk, and seqlen_k is another number where they are packed.
  launch.unmasked_blocks = FastDiv(max_unmasked_blocks(params.window, kMaxLength, Config::kBlockM, Config::kBlockN));
  launch.group = FastDiv(params.h_h_k_ratio);
  launch.tile_count_semaphore = launch.tiles * splits > consumer_groups ? params.tile_count_semaphore : nullptr;
  return cudaSuccess;
}

template <class Config, Dtype kDtype>
cudaError_t run_flash_fwd(const Flash_fwd_split_params& params, cudaStream_t stream) {
  static std::atomic<uint64_t> configured_devices{0};
  const int splits = params.splits.count;
  if (splits > 1 && !Config::kSplitKv) return cudaErrorNotSupported;
  FwdLaunch launch{};
  launch.params = params;
  launch.splits = params.splits;
  if (splits > 1) {
    launch.params.softmax_lse_ptr = params.splits.lse_ptr;
    launch.params.sinks_ptr = nullptr;  // the merge takes them in
  }
  cudaError_t status = make_tensor_maps<Config>(launch, kDtype);
  if (status == cudaSuccess) status = set_tile_order<Config>(launch);
  if (status != cudaSuccess) return status;
  const int tiles = launch.tiles * splits;
  const int grid = tiles < params.multiprocessors ? tiles : params.multiprocessors;
  const int smem_bytes = Config::kConsumerGroups * static_cast<int>(sizeof(FwdStorage<Config>));
  // Who overlaps a kernel has to wait for it: the scheduler waits where it reads what run_prepare() leaves.
  const bool reads_prepared = params.keys_packed() || launch.tile_count_semaphore != nullptr;
  if (overlaps_launches<Config>(launch) || (params.follows_prepare && reads_prepared)) {
    return flash::launch_dependent(flash_fwd_kernel<Config>, grid, Config::kThreads, smem_bytes, launch, params.device,
                                   stream, configured_devices);
  }
  return flash::launch(flash_fwd_kernel<Config>, grid, Config::kThreads, smem_bytes, launch, params.device, stream,
                       configured_devices);
}

template <Dtype kDtype, int kHeadDim>
cudaError_t run_score_mod(const Flash_fwd_split_params& params, cudaStream_t stream) {
  using Softcap = FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kSoftcap>;
  using Alibi = FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kAlibi>;
  using ScoreMod = FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kScoreMod>;
  const bool capped = params.softcap > 0.0f, biased = params.alibi_slopes_ptr != nullptr;
  const bool alone = capped != biased && params.scale_softmax > 0.0f && !params.has_dropout;
  if (!alone) return run_flash_fwd<ScoreMod, kDtype>(params, stream);
  return capped ? run_flash_fwd<Softcap, kDtype>(params, stream) : run_flash_fwd<Alibi, kDtype>(params, stream);
}

}  // namespace sm90

// cudaErrorNotSupported: not for this family, nothing was launched.
template <Dtype kDtype, int kHeadDim>
cudaError_t run_mha_fwd_sm90(const Flash_fwd_split_params& params, cudaStream_t stream) {
  using Plain = sm90::FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kPlain>;
  using Short = sm90::FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kShort>;
  using Dropout = sm90::FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kDropout>;
  if (params.has_score_mod) return sm90::run_score_mod<kDtype, kHeadDim>(params, stream);
  if (params.has_dropout) {
    if (params.is_paged() && !Dropout::kHasPages) return cudaErrorNotSupported;
    return sm90::run_flash_fwd<Dropout, kDtype>(params, stream);
  }
  if (params.splits.count > 1 || params.is_one_wave) {
    using OneWave = sm90::FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kOneWave>;
    static_assert(OneWave::kHasPages, "any call may be of one wave");
    return sm90::run_flash_fwd<OneWave, kDtype>(params, stream);
  }
  if constexpr (Short::kConsumerGroups != Plain::kConsumerGroups || Short::kBlockM != Plain::kBlockM) {
    static_assert(Short::kHasPages || Plain::kHasPages, "one of them reads pages");
    const bool takes_short = params.is_paged() && Short::kHasPages != Plain::kHasPages
                                 ? Short::kHasPages
                                 : plan::sm90_takes_short_tile(fwd_shape(params), Plain::kTile, Short::kTile);
    if (takes_short) return sm90::run_flash_fwd<Short, kDtype>(params, stream);
  }
  if constexpr (Plain::kNoMask) {
    using Masked = sm90::FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kMasked>;
    const Window& window = params.window;
    const bool is_masked = window.left != kUnbounded || window.right != kUnbounded;
    if (is_masked) return sm90::run_flash_fwd<Masked, kDtype>(params, stream);
  }
  return sm90::run_flash_fwd<Plain, kDtype>(params, stream);
}

// The same where V and O have another head dim than Q and K.
template <Dtype kDtype, int kHeadDim, int kHeadDimV>
cudaError_t run_mha_fwd_value_dim_sm90(const Flash_fwd_split_params& params, cudaStream_t stream) {
  if (params.has_score_mod || params.has_dropout) return cudaErrorNotSupported;
  using Plain = sm90::FwdConfig<kDtype, kHeadDim, plan::FwdVariant::kPlain, kHeadDimV>;
  return sm90::run_flash_fwd<Plain, kDtype>(params, stream);
}

}  // namespace flash
