// Epilogue of the wgmma forward: O times o_scale, then stored by each warp (its 16 rows by TMA), staged for the
// epilogue warp (fwd_store.h), or, for a split of the keys, stored as an fp32 partial result.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "kernels/common/fwd_epilogue.h"
#include "kernels/sm90/fwd_mainloop.h"
#include "kernels/sm90/stage_o.h"
#include "kernels/tma/tensor_map.h"

namespace flash {
namespace sm90 {

using namespace tma;

// Stages O over Q.
template <class Config>
__device__ __forceinline__ void stage_o(const FwdMainloop<Config>& mainloop, int q_stage, const float (&o_scale)[2]) {
  stage_o<Config::kAtomCols, Config::kHeadDimV>(mainloop.acc_o, mainloop.storage.q[q_stage][mainloop.group], o_scale);
}

// Stages kStoredCols columns at a time; from the second iteration on, the previous store must have read the buffer. The
// last store is still in flight on return: wait_for_store() says when the buffer is free.
template <class Config>
__device__ __forceinline__ void store_o(FwdMainloop<Config>& mainloop, const FwdWork<Config>& work,
                                        const CUtensorMap& o_map, int q_stage, const float (&o_scale)[2]) {
  using namespace cute;
  using Element = typename Config::Element;
  using Mma = typename Config::MmaStored;
  const Flash_fwd_params& params = mainloop.params;
  const WorkTile& tile = work.tile;
  auto rows_of_o = row_col_view(mainloop.acc_o);
  mainloop.softmax.rescale(rows_of_o, o_scale);
  Element* const buffer =
      Config::kSeparateOSmem ? mainloop.storage.o[mainloop.group] : mainloop.storage.q[q_stage][mainloop.group];
  auto staged = make_tensor(make_smem_ptr(buffer), typename Config::SmemLayoutO{});
  using Store = Copy_Atom<SM90_U32x4_STSM_N, Element>;
  const auto store = make_tiled_copy_C(Store{}, Mma{}).get_thread_slice(threadIdx.x % 128);
  const int warp_row = threadIdx.x % 128 / 32 * 16;
  const TmaRows rows(params.is_varlen(), tile.batch, tile.q_begin, tile.seqlen_q);
  const auto layout = partition_fragment_C(Mma{}, Shape<_64, Int<Config::kStoredCols>>{}).layout();
#pragma unroll
  for (int first = 0; first < Config::kAtomsV; first += Config::kStoredAtoms) {
    const auto out = make_tensor(mainloop.acc_o.data() + first * Config::kAtomCols / 2, layout);
    const auto values = convert<Element>(out);
    if constexpr (Config::kSeparateOSmem) {
      if (threadIdx.x % 32 == 0) tma_store_wait<0>();
      __syncwarp();
    }
    copy(Store{}, store.retile_S(values), store.partition_D(staged));
    tma_store_fence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int atom = 0; atom < Config::kStoredAtoms; ++atom) {
        SM90_TMA_STORE_5D::copy(&o_map, buffer + (atom * 64 + warp_row) * Config::kAtomCols,
                                (first + atom) * Config::kAtomCols, mainloop.row_begin(work) + warp_row + rows.shift,
                                tile.head, rows.outer, rows.origin);
      }
      tma_store_arrive();
    }
  }
}

// Stores the fp32 partial result of a split straight from registers. A lane holds pairs of columns 8 apart;
// neighbouring lanes exchange every second pair, so that four lanes write 64 contiguous bytes of a row.
template <class Config>
__device__ __forceinline__ void store_partial(FwdMainloop<Config>& mainloop, const FwdWork<Config>& work,
                                              const KvSplits& splits, const float (&o_scale)[2]) {
  using namespace cute;
  const Flash_fwd_params& params = mainloop.params;
  auto out = row_col_view(mainloop.acc_o);
  mainloop.softmax.rescale(out, o_scale);
  float* const matrix = splits.out_ptr + (work.split * splits.rows + lse_offset(work.tile, params)) * params.d_v;
  const bool is_odd = threadIdx.x % 2 == 1;
#pragma unroll
  for (int mi = 0; mi < size<0>(out); ++mi) {
    const int row = mainloop.row_begin(work) + mainloop.coords.row(mi);
    float* const to = matrix + static_cast<int64_t>(row) * params.d_v;
#pragma unroll
    for (int ni = 0; ni < size<1>(out); ni += 4) {
      const float2 left{out(mi, ni), out(mi, ni + 1)}, right{out(mi, ni + 2), out(mi, ni + 3)};
      const float2 given = is_odd ? left : right;
      const float2 taken{__shfl_xor_sync(0xffffffffu, given.x, 1), __shfl_xor_sync(0xffffffffu, given.y, 1)};
      const int col = is_odd ? mainloop.coords.col(ni + 2) - 2 : mainloop.coords.col(ni);
      if (row >= work.tile.row_end || col >= params.d_v) continue;
      *reinterpret_cast<float4*>(to + col) =
          is_odd ? float4{taken.x, taken.y, right.x, right.y} : float4{left.x, left.y, taken.x, taken.y};
    }
  }
}

// This warp's last store has read its rows: releases the stage to the next Q.
template <class Config>
__device__ __forceinline__ void wait_for_store(FwdStorage<Config>& storage, int q_stage, int group) {
  if (threadIdx.x % 32 != 0) return;
  cute::tma_store_wait<0>();
  storage.q_empty[q_stage][group].arrive();
}

}  // namespace sm90
}  // namespace flash
