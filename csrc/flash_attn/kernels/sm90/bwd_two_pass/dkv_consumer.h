// What the consumers of the dK and dV kernel share: pipeline state, P in shared memory, stores of dK and dV.
#pragma once

#include "kernels/common/differentiate.h"
#include "kernels/common/row_store.h"
#include "kernels/sm90/bwd_row_values.h"
#include "kernels/sm90/bwd_two_pass/products.h"
#include "kernels/sm90/bwd_two_pass/storage.h"

namespace flash {
namespace sm90 {

// Rows of dK or dV of a key tile: stored as Elements, or added to an fp32 matrix.
template <class Config, class Accumulator>
__device__ __forceinline__ void store_dkv(const Flash_bwd_params& params, const BwdWorkTile& tile, int key_tile,
                                          int thread, Accumulator& acc, float scale, void* data,
                                          const MatrixStrides& strides, int cols) {
  using Element = typename Config::Element;
#pragma unroll
  for (int i = 0; i < cute::size(acc); ++i) acc(i) *= scale;
  const int key = tile.n_block * Config::kBlockN + key_tile * Config::kTileRows, rows = tile.seqlen_k - key;
  const int64_t offset = matrix_offset(strides, params.is_varlen(), tile.batch, tile.k_begin + key, tile.head_k);
  if (Config::kMayAccumulate && params.accumulates_dkv) {
    add_rows(row_col_view(acc), AccumulatorCoords<4>(thread), static_cast<float*>(data) + offset, strides.row, rows,
             cols);
  } else {
    store_accumulator(acc, thread, static_cast<Element*>(data) + offset, strides.row, rows, cols);
  }
}

// Base of the consumers; pipeline states persist from one work tile to the next.
template <class Config>
struct DkvConsumer {
  using Element = typename Config::Element;
  using Coords = TransposedCoords<AccumulatorCoords<4>>;  // rows: queries of the m_block; columns: keys
  using RowValues = SmemRowValues<Coords>;
  using Scores = AccScores<Config>;

  const BwdTwoPassLaunch& launch;
  const Flash_bwd_params& params;
  DkvStorage<Config>& storage;
  const int thread;  // of the warpgroup
  const Coords coords;
  PipelineState<Config::kStages> state;
  uint32_t kv_phase = 0;

  __device__ __forceinline__ DkvConsumer(const BwdTwoPassLaunch& launch_, DkvStorage<Config>& storage_)
      : launch(launch_),
        params(launch_.params),
        storage(storage_),
        thread(threadIdx.x % 128),
        coords{AccumulatorCoords<4>(threadIdx.x % 128)} {}

  // P has one buffer; its phase is the parity of the step.
  __device__ __forceinline__ uint32_t p_phase() const { return state.stage; }

  // This thread's 16-byte vectors of P.
  __device__ __forceinline__ float4& p_vector(int key_tile, int i) const {
    return reinterpret_cast<float4*>(storage.p[key_tile])[i * 128 + thread];
  }

  __device__ __forceinline__ void write_p(int key_tile, const Scores& acc_p) const {
#pragma unroll
    for (int i = 0; i < decltype(cute::size(acc_p))::value; i += 4) {
      p_vector(key_tile, i / 4) = make_float4(acc_p(i), acc_p(i + 1), acc_p(i + 2), acc_p(i + 3));
    }
  }

  __device__ __forceinline__ void read_p(int key_tile, Scores& acc_p) const {
#pragma unroll
    for (int i = 0; i < decltype(cute::size(acc_p))::value; i += 4) {
      const float4 vector = p_vector(key_tile, i / 4);
      acc_p(i) = vector.x;
      acc_p(i + 1) = vector.y;
      acc_p(i + 2) = vector.z;
      acc_p(i + 3) = vector.w;
    }
  }
};

}  // namespace sm90
}  // namespace flash
